"""TROLL's projection and its loss: feasibility, optimality, gradients, the sparse form, and the tail's gradient."""

import math

import numpy as np
import pytest
import scipy
import torch

import trustrl
from support import oracle
from support.troll_corpus import CORPUS, EPS, normal, randoms, sparse_loss
from support.worlds import world
from trustrl import regions
from trustrl.core.projection import MAX_EVALUATIONS, troll_project


def kl64(log_q, log_b):
    """An independent KL: plain float64, with 0·log 0 = 0."""
    q = log_q.exp()
    return torch.where(q > 0, q * (log_q - log_b), 0.0).sum(-1)


def test_the_corpus_has_100000_tokens():
    assert sum(make()[0].shape[0] for make in CORPUS.values()) >= 100_000


@pytest.mark.parametrize("bound", [1e-3, EPS, 1.0])
@pytest.mark.parametrize("name", CORPUS)
def test_projected_tokens_are_feasible_and_the_inside_is_left_alone(name, bound):
    p, b = CORPUS[name]()
    found = troll_project(p, b, bound=bound)
    after = kl64(found.log_projected, b)
    assert (after <= bound * (1 + 1e-4)).all()
    assert found.converged.all()
    assert torch.isfinite(found.log_projected).all()
    outside = kl64(p, b) > bound * (1 + 1e-4)
    assert torch.equal(found.log_projected[~found.active], p[~found.active])
    assert (found.active == outside).double().mean() > 0.9999  # a token may sit on the last bit of the edge
    # Outside, the projection goes to the edge and not further in.
    edge = after[found.active]
    if edge.numel():
        assert (edge >= bound * (1 - 1e-4)).all()
        assert found.evaluations.max() <= MAX_EVALUATIONS
        torch.testing.assert_close(found.log_projected.exp().sum(-1), torch.ones_like(after), rtol=0, atol=1e-12)


def test_evaluations_are_few():
    """Median ≤ 4 and 99 % ≤ 8 up to 22 nats; every adversarial token within 32."""
    p, b = randoms(20_000, 22, 4.0, 30)
    keep = kl64(p, b) <= 22
    found = troll_project(p[keep], b[keep], bound=EPS)
    spent = found.evaluations[found.active]
    assert spent.numel() > 10_000
    assert spent.median() <= 4
    assert spent.quantile(0.99) <= 8


@pytest.mark.parametrize("seed", range(3))
def test_the_projection_is_the_optimum_an_independent_solver_finds(seed):
    """In η, by bisection, one token at a time."""
    p, b = randoms(40, 9, 1.5, 40 + seed)
    found = troll_project(p, b, bound=EPS).log_projected
    for i in range(p.shape[0]):
        want = oracle.troll_projection(p[i].numpy(), b[i].numpy(), EPS)
        np.testing.assert_allclose(found[i].numpy(), want, atol=1e-8)


def test_projecting_twice_is_projecting_once():
    p, b = randoms(20_000, 22, 2.0, 50)
    once = troll_project(p, b, bound=EPS)
    twice = troll_project(once.log_projected, b, bound=EPS)
    assert once.active.double().mean() > 0.5
    assert not twice.active.any()
    assert torch.equal(twice.log_projected, once.log_projected)


def dense_solver(log_b, bound):
    """logits → log π̂ through scipy's root finder, for finite differences; knows nothing of the closed form."""

    def solve(logits):
        log_p = logits - math.log(np.exp(logits - logits.max()).sum()) - logits.max()

        def tilted(beta):
            x = log_b + beta * (log_p - log_b)
            x = x - x.max()
            return x - math.log(np.exp(x).sum())

        def excess(beta):
            q = tilted(beta)
            return float(np.sum(np.exp(q) * (q - log_b))) - bound

        if excess(1.0) <= 0:
            return log_p
        return tilted(scipy.optimize.brentq(excess, 1e-12, 1.0, xtol=1e-16, rtol=8.9e-16))

    return solve


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("scale", [0.1, 1.0, 3.0], ids=["inside", "outside", "far outside"])
def test_the_jacobian_equals_an_independent_dense_solver(seed, scale):
    """Central differences with Richardson extrapolation through scipy, to 1e-7."""
    rng = np.random.default_rng(seed)
    c = 7
    log_b = rng.normal(size=c)
    log_b = log_b - np.log(np.exp(log_b).sum())
    logits = log_b + scale * rng.normal(size=c)
    solve = dense_solver(log_b, EPS)

    def slope(j, h):
        step = np.zeros(c)
        step[j] = h
        return (solve(logits + step) - solve(logits - step)) / (2 * h)

    want = np.stack([(4 * slope(j, 5e-4) - slope(j, 1e-3)) / 3 for j in range(c)], axis=1)
    x = torch.tensor(logits).requires_grad_()
    anchor = torch.tensor(log_b).unsqueeze(0)
    got = torch.autograd.functional.jacobian(
        lambda z: troll_project(normal(z).unsqueeze(0), anchor, bound=EPS).log_projected[0], x
    )
    np.testing.assert_allclose(got.numpy(), want, atol=1e-7 * max(1.0, np.abs(want).max()))


def test_gradcheck_of_the_projection():
    p, b = randoms(6, 5, 1.0, 60)
    x = p.clone().requires_grad_()
    assert troll_project(p, b, bound=EPS).active.double().mean() not in (0.0, 1.0)
    assert torch.autograd.gradcheck(lambda z: troll_project(normal(z), b, bound=EPS).log_projected, (x,))


def test_treating_the_multiplier_as_a_constant_would_be_wrong():
    """The c-term of the backward is most of the answer."""
    p, b = randoms(200, 9, 1.5, 61)
    x = p.clone().requires_grad_()
    found = troll_project(normal(x), b, bound=EPS)
    found.log_projected[:, 0].sum().backward()
    q, beta = found.log_projected.detach().exp(), found.beta.unsqueeze(-1)
    g = torch.zeros_like(q)
    g[:, 0] = 1
    constant = beta * (g - q)
    outside = found.active
    error = (constant - x.grad)[outside].norm() / x.grad[outside].norm()
    assert error > 0.2


def dense_loss(region, w, logits):
    """TROLL's loss on a full vocabulary as a function of logits."""
    rollout = w.rollout(region.anchor)
    logp = normal(logits)
    policy = trustrl.PolicyTokens(logp=w.at_token(logp), full_logp=logp)
    return trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())


@pytest.mark.parametrize("alpha", [0.0, 1.0])
def test_the_whole_dense_loss_is_a_true_function_of_the_logits(alpha):
    """Value and gradient belong together, up to the α-term's stopped target."""
    w = world(3, rows=2, width=3, vocabulary=6, drift=0.8)
    logits = w.policy.clone().requires_grad_()
    region = regions.TROLL(support="full", alpha=alpha, anchor="behavior")
    out = dense_loss(region, w, logits)
    out.loss.backward()
    got = logits.grad.clone()

    target = troll_project(w.policy.reshape(-1, 6), w.behavior.reshape(-1, 6), bound=EPS).log_projected.reshape(
        w.policy.shape
    )

    def by_hand(z):
        logp = normal(z)
        found = troll_project(logp.reshape(-1, 6), w.behavior.reshape(-1, 6), bound=EPS).log_projected.reshape(z.shape)
        ratio = (w.at_token(found) - w.at_token(w.behavior)).exp()
        pull = (logp.exp() * (logp - target)).sum(-1)
        return torch.where(w.in_loss, -w.advantage * ratio + alpha * pull, 0.0).sum()

    z = w.policy.clone().requires_grad_()
    value = by_hand(z)
    value.backward()
    assert out.loss.item() == pytest.approx(value.item(), rel=1e-10)
    torch.testing.assert_close(got, z.grad, rtol=0, atol=1e-10)
    assert torch.autograd.gradcheck(by_hand, (w.policy.clone().requires_grad_(),))


def test_a_zero_advantage_still_feels_the_pull():
    """The α-term acts on every token in the loss."""
    w = world(4, rows=2, width=4, drift=1.0)
    w.advantage.zero_()
    logits = w.policy.clone().requires_grad_()
    out = dense_loss(regions.TROLL(support="full", anchor="behavior"), w, logits)
    out.loss.backward()
    assert logits.grad[w.in_loss].abs().sum() > 0
    assert logits.grad[~w.in_loss].abs().sum() == 0


@pytest.mark.parametrize("anchor", ["behavior", "proximal"])
def test_the_sparse_form_is_the_dense_form_over_its_cells(anchor):
    """Merge the unrecorded ids by hand, project densely over the cells, and compare loss and gradient."""
    w = world(5, rows=3, width=5, vocabulary=30, drift=0.35)
    region = regions.TROLL(k=6, anchor=anchor)
    logits = w.policy.clone().requires_grad_()
    out = sparse_loss(region, w, logits, 6)
    out.loss.backward()

    z = w.policy.clone().requires_grad_()
    logp, anchor_logp = normal(z), w.anchor(anchor)
    ids = anchor_logp.topk(6, -1).indices
    total = torch.zeros((), dtype=torch.float64)
    for i, t in w.in_loss.nonzero().tolist():
        cells = sorted({*ids[i, t].tolist(), int(w.tokens[i, t])})
        rest = [v for v in range(30) if v not in cells]

        def merge(x, cells=cells, rest=rest):
            return torch.cat([x[cells], torch.logsumexp(x[rest], 0, keepdim=True)]).unsqueeze(0)

        p, b = merge(logp[i, t]), merge(anchor_logp[i, t])
        q = troll_project(p, b, bound=EPS).log_projected
        at = cells.index(int(w.tokens[i, t]))
        total = total - w.advantage[i, t] * (q[0, at] - b[0, at]).exp() + (p.exp() * (p - q.detach())).sum()
    total.backward()
    assert 0 < trustrl.rates(out.sums)["trustrl/projected_share"] < 1
    assert out.loss.item() == pytest.approx(total.item(), rel=1e-10)
    torch.testing.assert_close(logits.grad, z.grad, rtol=0, atol=1e-9)


def test_a_derived_tail_gives_the_same_gradient_as_a_masked_log_sum_exp():
    w = world(6, rows=3, width=5, vocabulary=30, drift=0.8, peak=1.0)
    grads = []
    for tail in ("lse", "derived"):
        logits = w.policy.clone().requires_grad_()
        sparse_loss(regions.TROLL(k=6, anchor="behavior"), w, logits, 6, tail).loss.backward()
        grads.append(logits.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=0, atol=1e-9)


def test_all_ids_recorded_is_the_dense_form():
    w = world(7, rows=2, width=4, vocabulary=12, drift=1.0)
    dense, sparse = (w.policy.clone().requires_grad_() for _ in range(2))
    a = dense_loss(regions.TROLL(support="full", anchor="behavior"), w, dense)
    b = sparse_loss(regions.TROLL(k=12, anchor="behavior"), w, sparse, 12)
    a.loss.backward()
    b.loss.backward()
    assert a.loss.item() == pytest.approx(b.loss.item(), rel=1e-9)
    torch.testing.assert_close(dense.grad, sparse.grad, rtol=0, atol=1e-9)


def descend(pull, steps=60, much_later=None):
    """Follow the pull alone (A = 0) from a policy whose tail is too small.

    Returns the tail before, after `steps`, after `much_later` steps (or the same), and the anchor's.
    """
    w = world(8, rows=4, width=4, vocabulary=60, peak=1.5, drift=0.1)
    w.advantage.zero_()
    w.in_loss.fill_(True)
    known = torch.zeros_like(w.behavior, dtype=torch.bool).scatter(-1, w.behavior.topk(8, -1).indices, True)
    known = known.scatter(-1, w.tokens.unsqueeze(-1), True)
    w.policy = normal(w.policy - 1.5 * (~known))

    def outside(logp):
        return float(logp.detach().exp().masked_fill(known, 0.0).sum(-1).mean())

    logits = w.policy.clone().requires_grad_()
    for step in range(much_later or steps):
        logits.grad = None
        pull(w, logits, known).backward()
        with torch.no_grad():
            logits -= logits.grad
        if step + 1 == steps:
            after = outside(normal(logits))
    return outside(w.policy), after, outside(normal(logits)), outside(w.behavior)


def without_the_tails_term(w, logits, known):
    """The fault itself: Σ over the known ids of π log(π/π̂), and nothing for the rest."""
    logp = normal(logits)

    def cells(x):
        return torch.cat(
            [x.masked_fill(~known, -torch.inf), torch.logsumexp(x.masked_fill(known, -torch.inf), -1, keepdim=True)], -1
        )

    p, b = (cells(x).reshape(-1, x.shape[-1] + 1) for x in (logp.detach(), w.behavior))
    target = troll_project(p, b, bound=EPS).log_projected[:, :-1].reshape(logp.shape).masked_fill(~known, 0.0)
    return torch.where(known, logp.exp() * (logp - target), 0.0).sum()


def ours(tail):
    return lambda w, logits, known: sparse_loss(regions.TROLL(k=8, anchor="behavior"), w, logits, 8, tail).loss


def test_pitfall_5_the_tails_gradient_keeps_entropy_from_exploding():
    """Without the tail's term mass runs past the anchor's own tail and on; with it, it is pulled to the ball and stays."""
    start, exploded, _, anchor = descend(without_the_tails_term)
    _, whole, much_later, _ = descend(ours("lse"), much_later=300)
    _, cut, _, _ = descend(ours("cut"))
    assert exploded > anchor + 0.05
    assert start < whole < much_later < anchor
    # The bucket's own gradient does most of the pulling: cut it, and this comparison fails.
    assert whole - start > 3 * (cut - start)


def test_the_policys_own_ids_join_as_cells_where_the_anchor_is_known():
    """π put its mass on an id μ' hardly knew: as part of the bucket its KL is lower than it is."""
    b = torch.tensor([[0.6, 0.3, 0.05, 0.05]], dtype=torch.float64)
    p = torch.tensor([[0.6, 0.3, 0.099, 0.001]], dtype=torch.float64)
    rollout = trustrl.RolloutTokens(
        proximal_logp=b[:, 0].log(), advantage=torch.ones(1), in_loss=torch.tensor([True]), token_ids=torch.tensor([0]),
        topk=trustrl.TopK(torch.tensor([[0, 1]]), b[:, :2].log(), "proximal"),
    )  # fmt: skip

    def kl(**own):
        policy = trustrl.PolicyTokens(logp=p[:, 0].log(), topk_logp=p[:, :2].log(), **own)
        out = trustrl.policy_loss(policy, rollout, regions.TROLL(k=2), reduction=trustrl.TokenSum())
        return trustrl.rates(out.sums)["trustrl/projected_kl_before"]

    own = trustrl.TopK(torch.tensor([[0, 2]]), p[:, [0, 2]].log(), "proximal")
    assert kl() == pytest.approx(0.0, abs=1e-12)
    assert kl(topk=own) == pytest.approx(0.0, abs=1e-12)  # unknown values are never filled
    exact = float((p * (p / b).log()).sum())
    assert kl(topk=own, topk_anchor_logp=b[:, [0, 2]].log()) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("rest", ["bucket", "fill"])
def test_a_record_may_end_early_only_where_nearly_nothing_is_left(rest):
    """One id recorded of 64 asked for: fine for tokens that are all but certain, a fault for the others."""
    anchor = torch.log_softmax(torch.tensor([[[14.0, 0.0, 0.0, 0.0], [1.0, 0.9, 0.8, 0.7]]], dtype=torch.float64), -1)
    top = anchor.topk(1, dim=-1)
    rollout = trustrl.RolloutTokens(
        proximal_logp=anchor[..., 0], token_ids=torch.zeros(1, 2, dtype=torch.long), advantage=torch.ones(1),
        in_loss=torch.ones(1, 2, dtype=torch.bool), topk=trustrl.TopK(top.indices, top.values, of="proximal"),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(
        logp=anchor[..., 0].clone().requires_grad_(), topk_logp=top.values, topk=trustrl.TopK(top.indices, top.values)
    )
    out = trustrl.policy_loss(policy, rollout, regions.TROLL(rest=rest), reduction=trustrl.TokenSum())
    out.loss.backward()
    assert trustrl.rates(out.sums)["trustrl/fault_narrow"] == 1
    assert policy.logp.grad[0].ne(0).tolist() == [True, False]


def test_a_tail_mass_is_below_1():
    with pytest.raises(trustrl.errors.ConfigError, match=r"troll\.tail_mass must be a mass below 1, got 5\.0"):
        regions.TROLL(tail_mass=5.0)


@pytest.mark.parametrize("side", ["policy", "anchor"])
def test_an_infinity_on_one_side_does_not_make_a_token_silently_inactive(side):
    p = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64).log()
    b = torch.tensor([[0.1, 0.2, 0.7]], dtype=torch.float64).log()
    p, b = (p, b) if side == "policy" else (b, p)
    found = troll_project(p, b, bound=EPS)
    assert found.active.all()
    assert found.converged.all()
    assert found.kl_after.item() == pytest.approx(EPS, rel=1e-4)


def test_bf16_rounding_of_the_recorded_tail_projects_nothing():
    """Identical policies in bf16: Σ rounds to either side of 1 by up to 1e-2, and both tails are made alike."""
    w = world(10, rows=8, width=16, vocabulary=64, drift=0.0, mismatch=0.0)
    rollout = w.rollout("behavior", dtype=torch.bfloat16, k=32)
    policy = w.policy_tokens(rollout, dtype=torch.bfloat16)
    out = trustrl.policy_loss(policy, rollout, regions.TROLL(k=32, anchor="behavior"), reduction=trustrl.TokenSum())
    assert trustrl.rates(out.sums)["trustrl/projected_share"] == 0.0


def test_the_correction_multiplies_the_first_term_alone():
    w = world(11, rows=3, width=5, vocabulary=20, drift=1.0, mismatch=0.5)
    w.advantage.zero_()
    plain, corrected = (w.policy.clone().requires_grad_() for _ in range(2))
    sparse_loss(regions.TROLL(k=8), w, plain, 8).loss.backward()
    sparse_loss(
        regions.TROLL(k=8, correction=regions.IcePop(min_ratio=0.99, max_ratio=1.01)), w, corrected, 8
    ).loss.backward()
    torch.testing.assert_close(plain.grad, corrected.grad, rtol=0, atol=0)
