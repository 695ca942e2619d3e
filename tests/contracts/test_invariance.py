"""Any split into micro-batches and ranks, packed or padded, any padding, any permutation: one loss, one gradient."""

from dataclasses import fields, replace

import pytest
import torch

import trustrl
from support.worlds import K, gradient, mapped, narrow_preset, world

PRESETS = trustrl.presets()


def batch(name, dtype=torch.float32, seed=3):
    """A region, its records (leaves on the policy's side) and the reduction over everything."""
    region = narrow_preset(name)
    needs = region.needs()
    w = world(seed, rows=8, width=12, vocabulary=70, drift=0.06 if name.startswith("trm") else 0.4)
    w.in_loss[5] = False  # a row without a token in the loss
    rollout = w.rollout(needs.anchor, dtype=dtype, k=needs.topk or K, reference_logp=w.at_token(w.proximal).to(dtype))
    rollout = replace(rollout, version=torch.arange(96).reshape(8, 12) % 5)
    policy = replace(w.policy_tokens(rollout, dtype=dtype), version=5)
    if needs.reduction is not None:
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=8)
    else:
        reduction = trustrl.TokenMean(num_tokens=w.num_tokens)
    return region, policy, rollout, reduction


PENALTIES = (trustrl.KLPenalty(coefficient=0.1), trustrl.EntropyBonus(coefficient=0.01))


def evaluate(region, parts, reduction):
    """Summed loss and merged rates over parts of a batch; gradients gather in the leaves."""
    outs = [trustrl.policy_loss(p, r, region, reduction=reduction, penalties=PENALTIES) for p, r in parts]
    loss = sum(out.loss for out in outs)
    loss.backward()
    return float(loss.detach()), trustrl.rates(trustrl.merge(out.sums for out in outs))


def assert_equal(a, b):
    (loss_a, rates_a, grads_a), (loss_b, rates_b, grads_b) = a, b
    assert loss_a == pytest.approx(loss_b, rel=1e-6, abs=1e-6)
    for x, y in zip(grads_a, grads_b, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)
    assert rates_a.keys() == rates_b.keys()
    for name, value in rates_a.items():
        assert rates_b[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


def whole(name, **kwargs):
    region, policy, rollout, reduction = batch(name, **kwargs)
    loss, rates = evaluate(region, [(policy, rollout)], reduction)
    return region, policy, rollout, reduction, (loss, rates, gradient(policy))


PER_CALL = [name for name in PRESETS if trustrl.preset(name).needs().whole_call]
"""Presets that decide on all tokens of a call, so that a split changes the decision."""


@pytest.mark.parametrize("name", [name for name in PRESETS if name not in PER_CALL])
@pytest.mark.parametrize("cuts", [[1, 7], [3, 5], [1] * 8, [0, 8]], ids=["1+7", "3+5", "one by one", "an empty part"])
def test_splits_between_sequences_add_up(name, cuts):
    region, policy, rollout, reduction, want = whole(name)
    parts, at = [], 0
    for size in cuts:
        rows = slice(at, at + size)
        parts.append((mapped(policy, lambda x, rows=rows: x[rows]), mapped(rollout, lambda x, rows=rows: x[rows])))
        at += size
    loss, rates = evaluate(region, parts, reduction)
    assert_equal((loss, rates, gradient(policy)), want)


TOKEN_LEVEL = [n for n in PRESETS if not trustrl.preset(n).needs().sequences and n not in PER_CALL]


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_token_regions_may_be_split_anywhere(name):
    region, policy, rollout, reduction, want = whole(name)
    flat_policy, flat_rollout = (mapped(x, lambda t: t.reshape(96, *t.shape[2:])) for x in (policy, rollout))
    cuts = [slice(0, 13), slice(13, 50), slice(50, 96)]
    parts = [(mapped(flat_policy, lambda x, c=c: x[c]), mapped(flat_rollout, lambda x, c=c: x[c])) for c in cuts]
    loss, rates = evaluate(region, parts, reduction)
    without = {k: v for k, v in want[1].items() if k != "trustrl/sequences"}
    assert_equal((loss, rates, gradient(policy)), (want[0], without, want[2]))


@pytest.mark.parametrize("name", PRESETS)
def test_packed_equals_padded(name):
    """Only the tokens in the loss and a few tool tokens, in one row, sequences interleaved."""
    region, policy, rollout, reduction, want = whole(name)
    g = torch.Generator().manual_seed(1)
    chosen = (rollout.in_loss | (torch.rand(8, 12, generator=g) < 0.3)).reshape(-1).nonzero().squeeze(-1)
    # Any interleaving that keeps each sequence's own order.
    rows = chosen // 12
    shuffled = rows[torch.randperm(len(rows), generator=g)]
    order = torch.empty_like(chosen)
    for row in range(8):
        order[shuffled == row] = chosen[rows == row]

    def pack(x):
        return x.reshape(96, *x.shape[2:])[order]

    ids = 1_000_003 * (order // 12) - 7  # any integers
    packed = (mapped(policy, pack), replace(mapped(rollout, pack), sequence_ids=ids))
    loss, rates = evaluate(region, [packed], reduction)
    assert_equal((loss, rates, gradient(policy)), want)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("filler", [0.0, torch.nan, -torch.inf, 1e30], ids=["0", "NaN", "-inf", "1e30"])
def test_padding_may_be_anywhere_and_hold_anything(name, filler):
    """Tool tokens and padding: columns outside the loss, left, right and between, count nowhere."""
    region, policy, rollout, reduction, want = whole(name)
    columns = torch.tensor([0, 0, 1, 2, 3, 3, 4, 5, 6, 7, 8, 8, 9, 10, 11, 11])
    real = torch.tensor(
        [False, True, True, True, True, False, True, True, True, True, True, False, True, True, True, False]
    )

    def pad(x):
        wide = x[:, columns]
        mask = real.view(1, -1, *([1] * (x.ndim - 2)))
        if x.dtype == torch.bool:
            return wide & mask
        return wide if not x.is_floating_point() else torch.where(mask, wide, torch.tensor(filler, dtype=x.dtype))

    loss, rates = evaluate(region, [(mapped(policy, pad), mapped(rollout, pad))], reduction)
    assert_equal((loss, rates, gradient(policy)), want)


@pytest.mark.parametrize("name", PRESETS)
def test_the_order_of_sequences_does_not_matter(name):
    region, policy, rollout, reduction, want = whole(name)
    order = torch.tensor([6, 0, 3, 7, 1, 5, 2, 4])
    loss, rates = evaluate(
        region, [(mapped(policy, lambda x: x[order]), mapped(rollout, lambda x: x[order]))], reduction
    )
    assert_equal((loss, rates, gradient(policy)), want)


@pytest.mark.parametrize("name", TOKEN_LEVEL)
def test_the_order_of_tokens_does_not_matter_to_token_regions(name):
    region, policy, rollout, reduction, want = whole(name)
    order = torch.randperm(12, generator=torch.Generator().manual_seed(0))
    parts = [(mapped(policy, lambda x: x[:, order]), mapped(rollout, lambda x: x[:, order]))]
    loss, rates = evaluate(region, parts, reduction)
    assert_equal((loss, rates, gradient(policy)), want)


@pytest.mark.parametrize("name", PRESETS)
def test_advantages_per_sequence_equal_advantages_per_token(name):
    region, policy, rollout, reduction = batch(name)
    results = []
    one = torch.randn(8, generator=torch.Generator().manual_seed(0))
    for advantage in (one, one.unsqueeze(1), one.unsqueeze(1).expand(8, 12)):
        loss, rates = evaluate(region, [(policy, replace(rollout, advantage=advantage))], reduction)
        results.append((loss, rates, gradient(policy)))
    assert_equal(results[0], results[1])
    assert_equal(results[0], results[2])


REDUCTIONS = {
    "token sum": (trustrl.TokenSum(), lambda x, m, n: (x * m).sum()),
    "token mean": (trustrl.TokenMean(num_tokens=50), lambda x, m, n: (x * m).sum() / 50),
    "sequence mean of token mean": (trustrl.SequenceMeanTokenMean(num_sequences=8), lambda x, m, n: ((x * m).sum(1) / m.sum(1).clamp(min=1)).sum() / 8),
    "sequence mean of token sum": (trustrl.SequenceMeanTokenSum(num_sequences=8), lambda x, m, n: (x * m).sum() / 8),
    "fixed length": (trustrl.FixedLength(length=100, num_sequences=8), lambda x, m, n: (x * m).sum() / 800),
}  # fmt: skip


@pytest.mark.parametrize("name", ["dppo-binary-tv", "gspo", "troll"])
def test_given_weights_are_the_reduction_they_amount_to(name):
    """Loss and gradient; a weight of NaN at a token that is not in the loss reaches neither."""
    region, policy, rollout, _ = batch(name)
    length = rollout.in_loss.sum(1, keepdim=True).clamp(min=1)
    weights = torch.where(rollout.in_loss, 1 / (8 * length), torch.nan)
    kind = trustrl.SequenceMeanTokenMean
    given = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenWeights(weights, like=kind))
    given.loss.backward()
    found = gradient(policy)
    named = trustrl.policy_loss(policy, rollout, region, reduction=kind(num_sequences=8))
    named.loss.backward()
    torch.testing.assert_close(given.loss, named.loss)
    torch.testing.assert_close(found, gradient(policy))


def test_given_weights_that_do_not_fit_are_refused():
    region, policy, rollout, _ = batch("dppo-binary-tv")
    for weights in (torch.ones(3), 1.0):
        with pytest.raises(trustrl.errors.RecordError, match="weights must be a tensor of 96 numbers"):
            trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenWeights(weights))
    reduction = trustrl.TokenWeights(torch.ones(8, 12))
    with pytest.raises(trustrl.errors.ConfigError, match="must be SequenceMeanTokenMean with gspo, got TokenWeights"):
        trustrl.policy_loss(policy, rollout, trustrl.preset("gspo"), reduction=reduction)


@pytest.mark.parametrize("kind", REDUCTIONS)
@pytest.mark.parametrize("count", ["int", "tensor"])
def test_reductions_are_what_they_say(kind, count):
    """Denominators count every token in the loss, stopped ones included."""
    reduction, by_hand = REDUCTIONS[kind]
    if count == "tensor":
        counts = {
            f.name: torch.tensor(getattr(reduction, f.name)) for f in fields(reduction) if f.name.startswith("num")
        }
        reduction = replace(reduction, **counts)
    _, policy, rollout, _ = batch("dppo-binary-tv", torch.float64)
    out = trustrl.policy_loss(policy, rollout, trustrl.preset("dppo-binary-tv"), reduction=reduction)
    assert 0.5 < out.decision.keep[rollout.in_loss].double().mean() < 1
    ratio = (policy.logp - rollout.behavior_logp).exp().detach()
    term = -(out.decision.keep * ratio * rollout.advantage * policy.logp)
    want = by_hand(term.detach(), rollout.in_loss.double(), 50)
    assert out.loss.item() == pytest.approx(want.item(), rel=1e-12)


def test_sums_cross_ranks_as_two_vectors():
    """flat → all-reduce (SUM and MAX) → unflat is the same as adding."""
    region, policy, rollout, reduction = batch("dppo-topk-tv")
    halves = [
        trustrl.policy_loss(mapped(policy, lambda x, r=r: x[r]), mapped(rollout, lambda x, r=r: x[r]), region, reduction=reduction).sums
        for r in (slice(0, 4), slice(4, 8))
    ]  # fmt: skip
    flat = [s.flat() for s in halves]
    reduced = halves[0].unflat(flat[0][0] + flat[1][0], torch.maximum(flat[0][1], flat[1][1]))
    assert trustrl.rates(reduced) == trustrl.rates(halves[0] + halves[1])
    with pytest.raises(trustrl.errors.RecordError, match="entries"):
        halves[0].unflat(flat[0][0][:-1], flat[0][1])


def test_sums_with_different_optional_parts_merge_to_the_right_mean():
    """A micro-batch without entropies must not dilute the others' mean."""
    region, policy, rollout, reduction = batch("dppo-binary-tv", torch.float64)
    with_entropy = trustrl.policy_loss(policy, rollout, region, reduction=reduction).sums
    without = trustrl.policy_loss(replace(policy, entropy=None), rollout, region, reduction=reduction).sums
    want = policy.entropy[rollout.in_loss].mean().item()
    for merged in (with_entropy + without, without + with_entropy):
        assert trustrl.rates(merged)["trustrl/entropy"] == pytest.approx(want)
