"""The policy inside a kept set, against softmax over the kept logits alone."""

import pytest
import torch

import trustrl
from trustrl.core.sampling import KeptSet, Sampling, within_kept

V = 40


@pytest.fixture
def case():
    """Logits, their kept ids (3 to 12 per row, shuffled, padded), and the renormalized distribution over V."""
    torch.manual_seed(3)
    logits = torch.randn(6, V, dtype=torch.float64, requires_grad=True)
    ids = torch.full((6, 12), -1)
    restricted = torch.full((6, V), -torch.inf, dtype=torch.float64)
    for row, size in enumerate((3, 5, 7, 12, 1, 4)):
        chosen = torch.randperm(V)[:size]
        ids[row, torch.randperm(12)[:size]] = chosen
        restricted[row, chosen] = torch.log_softmax(logits.detach()[row, chosen], -1)
    return logits, ids, restricted


def kept_of(logits, ids):
    return KeptSet(ids, torch.log_softmax(logits, -1).gather(-1, ids.clamp(min=0)))


def test_log_probs_are_those_of_a_softmax_over_the_kept_logits(case):
    logits, ids, restricted = case
    kept = kept_of(logits, ids)
    everywhere = torch.arange(V).expand(6, V)
    torch.testing.assert_close(kept.at(everywhere).detach(), restricted)
    token = ids.max(-1).values
    whole = torch.log_softmax(logits, -1).gather(-1, token.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(kept.within(whole).detach(), restricted.gather(-1, token.unsqueeze(-1)).squeeze(-1))


def test_removed_and_padded_ids_have_no_mass(case):
    logits, ids, _ = case
    kept = kept_of(logits, ids)
    assert (kept.at(torch.full((6, 2), -1)) == -torch.inf).all()


def test_the_mass_outside_some_ids_is_that_of_the_other_kept_ids(case):
    logits, ids, restricted = case
    listed = torch.tensor([[0, 1, 2, 2, -1]]).expand(6, 5)
    others = restricted.clone()
    others[:, :3] = -torch.inf
    torch.testing.assert_close(kept_of(logits, ids).outside(listed).detach(), torch.logsumexp(others, -1))


def test_the_top_are_the_most_probable_kept_ids(case):
    logits, ids, restricted = case
    top, logp = kept_of(logits, ids).top(5)
    expected, order = restricted.topk(5)
    torch.testing.assert_close(logp.detach(), expected)
    assert torch.equal(top, order.masked_fill(expected == -torch.inf, -1))


def test_more_ids_than_columns_are_padded(case):
    logits, ids, _ = case
    top, logp = kept_of(logits, ids).top(20)
    assert top.shape == (6, 20)
    assert ((top < 0) == (logp == -torch.inf)).all()
    assert (logp.exp().sum(-1) - 1).abs().max() < 1e-12


def test_the_gradient_is_that_of_a_softmax_over_the_kept_logits(case):
    logits, ids, _ = case
    token = ids.max(-1).values.unsqueeze(-1)

    def ours(x):
        kept = kept_of(x, ids)
        return kept.within(torch.log_softmax(x, -1).gather(-1, token).squeeze(-1)), kept.outside(token).exp()

    def naive(x):
        inside = (ids.unsqueeze(-1) == torch.arange(V)).any(1)
        p = torch.log_softmax(x.masked_fill(~inside, -torch.inf), -1)
        return p.gather(-1, token).squeeze(-1)

    own, _ = ours(logits)
    (gradient,) = torch.autograd.grad(own.sum(), logits)
    (expected,) = torch.autograd.grad(naive(logits).sum(), logits)
    torch.testing.assert_close(gradient, expected)
    assert torch.autograd.gradcheck(ours, logits)


def test_a_row_without_kept_ids_keeps_its_log_prob_and_a_finite_gradient():
    logp = torch.tensor([-1.0, -2.0], requires_grad=True)
    columns = torch.tensor([[-0.5, -1.0], [-0.5, -1.0]], requires_grad=True)
    kept = KeptSet(torch.tensor([[-1, -1], [3, 4]]), columns)
    out = kept.within(logp)
    (out.sum() + kept.outside(torch.tensor([[3, 4], [3, 4]])).exp().sum()).backward()
    assert out[0] == -1.0
    assert columns.grad.isfinite().all()
    assert (columns.grad[0] == 0).all()
    assert logp.grad.tolist() == [1.0, 1.0]


def test_a_set_without_a_mark_is_returned_unchanged():
    logp = torch.tensor([-1.0])
    assert within_kept(logp, torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.bool)) == logp


def test_both_sides_inside_the_kept_set_are_accepted_and_one_side_is_not():
    inside = Sampling(logprobs="processed", truncated=True, kept_known=True)
    inside.must_match(inside)
    with pytest.raises(trustrl.errors.IncompatibleSamplingError, match="KeptSet"):
        inside.must_match(Sampling(logprobs="processed"))


def test_a_kept_set_has_one_row_per_token():
    mask = torch.ones(1, 3, dtype=torch.bool)
    with pytest.raises(trustrl.errors.RecordError, match="kept_ids"):
        trustrl.RolloutTokens(advantage=torch.ones(1), in_loss=mask, kept_ids=torch.zeros(1, 2, 4, dtype=torch.int64))
