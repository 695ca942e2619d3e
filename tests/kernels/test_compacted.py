"""A compacted backward pass: the chunked pass's values, gradients that are off by no more than the bound says."""

import pytest
import torch
from research.compacted import token_logprobs_compacted
from research.gradient_error import gradient_error_bound
from research.kept_columns import KEEP_STEP

import trustrl

N, D, V, K = 37, 12, 500, 6


def inputs(kind, dtype=torch.float64, seed=0):
    """Random logits of moderate size, or rows that each point at one word; all heads share a common part."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randn(V, D, generator=g, dtype=torch.float64) + 0.5
    noise = torch.randn(N, D, generator=g, dtype=torch.float64)
    hidden = noise if kind == "random" else 0.8 * head[torch.randperm(V, generator=g)[:N]] + 0.1 * noise
    logits = hidden @ head.T
    ids = logits.topk(K, -1).indices
    ids[::4] = torch.randint(-1, V, ids[::4].shape, generator=g)  # some rows were given poor ids, repeated or empty
    token = torch.multinomial(logits.softmax(-1), 1, generator=g).squeeze(-1)
    return hidden.to(dtype), head.to(dtype), token, ids


def loss_of(out, with_entropy, seed=1):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(len(out.logp), generator=g, dtype=torch.float64).to(out.logp.dtype)
    loss = (weight * (out.logp + 0.3 * out.tail_logp)).sum()
    return loss + (weight.flip(0) * out.entropy).sum() if with_entropy else loss


def dense(hidden, head, token, ids, entropy, frozen=False):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
    out = trustrl.token_logprobs(hidden, head, token, gather_ids=ids, entropy=entropy, temperature=0.8)
    loss_of(out, entropy).backward()
    return out, hidden.grad, head.grad


def compacted(hidden, head, token, ids, entropy, drop_below, frozen=False, block_rows=10, block_vocab=130):
    hidden, head = hidden.clone().requires_grad_(), head.clone().requires_grad_(not frozen)
    out, dropped = token_logprobs_compacted(
        hidden, head, token, gather_ids=ids, entropy=entropy, temperature=0.8, drop_below=drop_below,
        block_rows=block_rows, block_vocab=block_vocab,
    )  # fmt: skip
    loss = loss_of(out, entropy)
    bound = gradient_error_bound(loss, dropped, hidden, head)
    loss.backward()
    return out, hidden.grad, head.grad, dropped, bound


@pytest.mark.parametrize("drop_below", [0.0, 1e-3, 0.3], ids=["nothing dropped", "some", "nearly all"])
@pytest.mark.parametrize("kind", ["random", "peaked"])
def test_values_are_those_of_the_chunked_pass(kind, drop_below):
    data = inputs(kind)
    want = dense(*data, entropy=True)[0]
    got, *_, dropped, _ = compacted(*data, True, drop_below)
    for name in ("logp", "logsumexp", "gathered_logp", "tail_logp", "entropy", "logp_error"):
        torch.testing.assert_close(getattr(got, name), getattr(want, name), rtol=1e-12, atol=1e-12, msg=name)
    assert (dropped.mass_N >= 0).all()
    assert (dropped.mass_N <= want.tail_logp.exp() + 1e-12).all()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained head", "frozen head"])
@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("cuts", [(10, 130), (64, 1000), (5, 41)], ids=["ragged", "one block", "many tiles"])
def test_dropping_nothing_gives_the_exact_gradient(cuts, entropy, frozen):
    data = inputs("random")
    _, d_hidden, d_head = dense(*data, entropy, frozen)
    _, got_hidden, got_head, dropped, bound = compacted(*data, entropy, 0.0, frozen, *cuts)
    torch.testing.assert_close(got_hidden, d_hidden, rtol=1e-10, atol=1e-10)
    assert (got_head is None) == frozen
    if not frozen:
        torch.testing.assert_close(got_head, d_head, rtol=1e-10, atol=1e-10)
    assert (dropped.mass_N == 0).all()
    assert (bound.hidden_N == 0).all()
    assert bound.head == 0


@pytest.mark.parametrize("entropy", [False, True], ids=["log-probs", "entropy"])
@pytest.mark.parametrize("drop_below", [0.1, 1e-2, 1e-3, 1e-5])
@pytest.mark.parametrize("kind", ["random", "peaked"])
@pytest.mark.parametrize("seed", range(4))
def test_the_bound_holds_in_every_row(seed, kind, drop_below, entropy):
    data = inputs(kind, seed=seed)
    _, d_hidden, d_head = dense(*data, entropy)
    _, got_hidden, got_head, dropped, bound = compacted(*data, entropy, drop_below)
    assert 0 < dropped.columns_kept_B.mean() < 1  # the comparison must drop something
    error_N = (got_hidden - d_hidden).norm(dim=-1)
    assert (error_N <= bound.hidden_N + 1e-12).all()
    assert (got_head - d_head).norm() <= bound.head + 1e-12
    frozen_hidden = compacted(*data, entropy, drop_below, frozen=True)[1]
    torch.testing.assert_close(frozen_hidden, got_hidden, rtol=1e-9, atol=1e-11)


def test_the_bound_follows_the_dropped_mass():
    """A bound without the mass would be loose by orders; one with a twentieth of it would not hold."""
    data = inputs("random")
    _, d_hidden, d_head = dense(*data, False)
    found = []
    for drop_below in (1e-2, 1e-4):
        _, got_hidden, got_head, dropped, bound = compacted(*data, False, drop_below)
        error_N = (got_hidden - d_hidden).norm(dim=-1)
        assert (error_N > 0.05 * bound.hidden_N).all()
        assert (got_head - d_head).norm() > 0.05 * bound.head
        found.append((dropped.share_N.mean(), bound.hidden_N.mean(), bound.head))
    (mass, hidden, head), (less_mass, less_hidden, less_head) = found
    assert less_mass < 0.02 * mass
    assert less_hidden < 0.03 * hidden
    assert less_head < 0.03 * head


def test_dropped_sums_are_those_of_the_dropped_columns():
    hidden, head, token, ids = inputs("random")
    *_, dropped, _ = compacted(hidden, head, token, ids, True, 1e-3)
    p = torch.softmax(hidden @ head.T / 0.8, -1)
    given = torch.zeros_like(p, dtype=torch.bool).scatter(1, token.unsqueeze(-1), True)
    for n, row in enumerate(ids):
        given[n, row[row >= 0]] = True
    left_out = (dropped.shape_BV > 0)[torch.arange(N) // 10] & ~given
    mass = torch.where(left_out, p, 0.0).sum(-1)
    torch.testing.assert_close(dropped.mass_N, mass)
    q = p / torch.where(given, 0.0, p).sum(-1, keepdim=True)
    torch.testing.assert_close(dropped.spread_N, -torch.where(left_out, q * q.log(), 0.0).sum(-1))
    assert p[left_out].max() <= 1e-3
    torch.testing.assert_close(dropped.shape_BV.sum(-1), torch.ones(4, dtype=torch.float64))


def test_given_ids_keep_their_gradient_however_small():
    """Everything but the given ids is dropped, and an id of probability 1e-20 is still pushed."""
    hidden, head = torch.eye(2, dtype=torch.float64), torch.zeros(40, 2, dtype=torch.float64)
    head[:2] = 50.0 * torch.eye(2, dtype=torch.float64)
    hidden.requires_grad_()
    head.requires_grad_()
    token, ids = torch.tensor([0, 1]), torch.tensor([[7], [9]])
    out, dropped = token_logprobs_compacted(hidden, head, token, gather_ids=ids, drop_below=0.5)
    assert (dropped.columns_kept_B == 0).all()
    out.gathered_logp.sum().backward()
    assert out.gathered_logp.max() < -45
    torch.testing.assert_close(head.grad[[7, 9]], torch.eye(2, dtype=torch.float64))


def test_what_is_dropped_is_spread_not_lost():
    """Each row of dz sums to 0, so the head's gradient sums to 0 over the vocabulary, and every row of it is touched."""
    data = inputs("random")
    _, _, d_head, dropped, _ = compacted(*data, False, 0.3)
    assert dropped.columns_kept_B.mean() < 0.05
    exact = dense(*data, False)[2]
    torch.testing.assert_close(d_head.sum(0), exact.sum(0), rtol=1e-9, atol=1e-10)
    assert (d_head != 0).any(-1).all()


def test_logits_far_above_the_given_ids_raise_the_shift():
    """The given ids are the least probable: the lower bound is 300 too low, and nothing may overflow."""
    hidden = torch.ones(3, 1, dtype=torch.float32, requires_grad=True)
    head = torch.linspace(-200, 100, 400).unsqueeze(-1)
    token = torch.zeros(3, dtype=torch.long)
    for order in (head, head.flip(0)):
        want = trustrl.token_logprobs(hidden.double(), order.double(), token, entropy=True)
        got, _ = token_logprobs_compacted(hidden, order, token, entropy=True, drop_below=1e-3, block_vocab=30)
        torch.testing.assert_close(got.logp.double(), want.logp, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(got.entropy.double(), want.entropy, rtol=1e-4, atol=1e-5)


def test_bf16_is_as_close_to_the_truth_as_the_dense_pass_once_little_is_dropped():
    hidden, head, token, ids = inputs("random", torch.bfloat16)
    _, true_hidden, true_head = dense(hidden.double(), head.double(), token, ids, True)
    _, plain_hidden, plain_head = dense(hidden, head, token, ids, True)
    _, got_hidden, got_head, dropped, _ = compacted(hidden, head, token, ids, True, 1e-5)
    assert dropped.columns_kept_B.mean() < 1
    for got, plain, true in ((got_hidden, plain_hidden, true_hidden), (got_head, plain_head, true_head)):
        assert (got.double() - true).norm() < 1.2 * (plain.double() - true).norm()


def test_large_passes_keep_columns_in_steps():
    """Few shapes, so that products are not prepared anew; the columns added are the next most probable ones."""
    from research.kept_columns import kept_columns

    top = torch.randn(1000, generator=torch.Generator().manual_seed(0)) - 3
    exact, stepped = kept_columns(top, 0.1, 1), kept_columns(top, 0.1, KEEP_STEP)
    assert 0 < len(exact) < len(stepped) < len(top)
    assert len(stepped) % KEEP_STEP == 0
    assert set(exact.tolist()) <= set(stepped.tolist())
    rest = [j for j in range(1000) if j not in set(stepped.tolist())]
    assert top[rest].max() <= top[stepped].min()
    assert len(kept_columns(top, 0.0, KEEP_STEP)) == len(top)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param({"drop_below": 1.0}, "drop_below must be", id="threshold of 1"),
        pytest.param({"drop_below": -0.1}, "drop_below must be", id="threshold below 0"),
        pytest.param({"block_rows": 0}, "block_rows and block_vocab must be", id="no rows"),
        pytest.param({"token_ids_N": torch.tensor([0, -100])}, "token_ids_N must be", id="ignored row"),
    ],
)
def test_what_does_not_fit_is_refused_in_a_sentence(change, message):
    given = {"hidden_ND": torch.zeros(2, 3), "head_VD": torch.zeros(5, 3), "token_ids_N": torch.tensor([0, 1])}
    with pytest.raises(ValueError, match=message):
        token_logprobs_compacted(**{**given, "drop_below": 0.01, **change})
