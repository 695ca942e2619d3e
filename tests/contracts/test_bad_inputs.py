"""Every case of the corpus × every preset that reads it: the outcome it states, never silence, never NaN or inf."""

from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch

import trustrl
from support.bad_inputs import BAD, CASES, MASKED, Dropped, Raises, Rounded, Same, SameInFloat64
from support.worlds import narrow_preset, world

PRESETS = trustrl.presets()


def healthy(name):
    """A preset's region, and the raw tensors of a batch with which nothing is wrong; a case may change anything."""
    region, raw = made(name)
    return region, {field: x.clone() for field, x in raw.items()}


@cache
def made(name):
    region = narrow_preset(name)
    needs = region.needs()
    w = world(1, rows=4, width=8, vocabulary=70, drift=0.05)
    w.in_loss[MASKED] = False
    for at, sign in zip(BAD, (1.0, -1.0), strict=True):
        w.in_loss[at] = True
        w.advantage[at] = sign
    source = w.anchor(needs.anchor)
    ids = source.topk(needs.topk or 4, -1).indices
    return region, {
        "behavior": w.at_token(w.behavior).float(),
        "proximal": w.at_token(w.proximal).float(),
        "policy": w.at_token(w.policy).float(),
        "advantage": w.advantage.float(),
        "in_loss": w.in_loss,
        "tokens": w.tokens,
        "topk_ids": ids,
        "topk_logp": source.gather(-1, ids).float(),
        "policy_topk": w.policy.gather(-1, ids).float(),
        "full_anchor": source.float(),
        "full_policy": w.policy.float(),
    }


def evaluate(region, raw):
    """Loss, gradients and sums; leaves are made here, so that a case may change anything."""
    needs = region.needs()
    other = "proximal" if needs.anchor == "behavior" else "behavior"
    topk = None
    if raw["topk_ids"] is not None:
        topk = trustrl.TopK(raw["topk_ids"], raw["topk_logp"], raw.get("topk_of", needs.anchor) or other)
    rollout = trustrl.RolloutTokens(
        behavior_logp=raw["behavior"], proximal_logp=raw["proximal"], advantage=raw["advantage"], in_loss=raw["in_loss"],
        token_ids=raw["tokens"], topk=topk, version=raw.get("version"),
        full=None if raw["full_anchor"] is None else trustrl.FullVocabulary(raw["full_anchor"], needs.anchor),
    )  # fmt: skip
    leaves = {}
    for name in ("policy", "policy_topk", "full_policy"):
        x = raw[name]
        leaves[name] = (
            x.detach().clone().requires_grad_() if isinstance(x, torch.Tensor) and x.is_floating_point() else x
        )
    policy = trustrl.PolicyTokens(
        logp=leaves["policy"], topk_logp=leaves["policy_topk"], full_logp=leaves["full_policy"], version=8
    )
    reduction = (
        trustrl.SequenceMeanTokenMean(num_sequences=4) if region.needs().reduction else trustrl.TokenMean(num_tokens=20)
    )
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
    if out.loss.requires_grad:
        out.loss.backward()
    grads = {
        n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items() if isinstance(x, torch.Tensor)
    }
    return out, grads


def assert_finite(out, grads):
    assert torch.isfinite(out.loss)
    for name, g in grads.items():
        assert torch.isfinite(g).all(), f"gradient of {name}"
    mostly_dropped = out.sums.added["used"] < 0.5 * out.sums.added["tokens"]
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most") if mostly_dropped else nullcontext():
        metrics = trustrl.rates(out.sums)
    for name, value in metrics.items():
        assert value == value, f"{name} is NaN"
    return metrics


def faults(out):
    return {
        name.removeprefix("fault/"): int(x) for name, x in out.sums.added.items() if name.startswith("fault/") and x
    }


def assert_same(got, want, places=slice(None)):
    torch.testing.assert_close(got[places], want[places], rtol=2e-5, atol=1e-9, equal_nan=False)


PAIRS = [(bad, name) for bad in CASES for name in PRESETS if bad.presets(name) and bad.is_read_by(name)]
UNREAD = {name: [bad for bad in CASES if bad.presets(name) and not bad.is_read_by(name)] for name in PRESETS}


def pairs(kind):
    """Parametrizes a test with the pairs of this outcome."""
    found = [pytest.param(bad, name, id=f"{bad.name}-{name}") for bad, name in PAIRS if isinstance(bad.outcome, kind)]
    return pytest.mark.parametrize(("bad", "name"), found)


@pairs(Raises)
def test_a_batch_that_cannot_be_right_raises(bad, name):
    region, raw = healthy(name)
    bad.change(raw)
    with pytest.raises(bad.outcome.error, match="must be"):
        evaluate(region, raw)


@pairs(Dropped)
def test_bad_tokens_leave_the_loss_and_are_counted(bad, name):
    """As if the tokens were outside the loss; the denominator and the other tokens do not notice."""
    region, raw = healthy(name)
    bad.change(raw)
    out, grads = evaluate(region, raw)
    metrics = assert_finite(out, grads)
    dropped = bad.outcome.tokens(raw)
    count = int((dropped & raw["in_loss"]).sum())
    assert faults(out)[bad.outcome.fault] == count
    out_without, grads_without = evaluate(region, dict(raw, in_loss=raw["in_loss"] & ~dropped))
    if region.needs().reduction is None:  # its denominator is the sequence's length, which still counts them
        assert out.loss.item() == pytest.approx(out_without.loss.item(), rel=1e-5, abs=1e-7)
        for key in grads:
            assert_same(grads[key], grads_without[key])
    assert (grads["policy"][dropped] == 0).all()
    assert metrics["trustrl/dropped_share"] == pytest.approx(count / int(raw["in_loss"].sum()))


@pairs(Rounded)
def test_an_extreme_value_is_right_to_float32_or_counted(bad, name):
    """Judged by the same batch in float64. Only tokens that are counted for it may lose their gradient."""
    region, raw = healthy(name)
    bad.change(raw)
    out, grads = evaluate(region, raw)
    assert_finite(out, grads)
    out64, grads64 = evaluate(region, in_float64(raw))
    assert faults(out) == bad.outcome.counted(name)
    assert torch.equal(out.decision.keep, out64.decision.keep)
    vanished = 0
    for at in BAD:
        got, want = grads["policy"][at].double(), grads64["policy"][at]
        if got == 0 and want.abs() > 1e-44:
            vanished += 1
        else:
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-37)
    assert vanished == faults(out).get("overflow", 0) - faults(out64).get("overflow", 0)


@pairs((Same, SameInFloat64))
def test_a_harmless_input_has_the_result_of_its_equivalent(bad, name):
    region, raw = healthy(name)
    bad.change(raw)
    if isinstance(bad.outcome, SameInFloat64):
        expected = evaluate(region, in_float64(raw))
    else:
        _, same = healthy(name)
        bad.outcome.after(same)
        expected = evaluate(region, same)
    assert_unnoticed(region, raw, expected)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_region_does_not_read_changes_nothing(name):
    """Every case for which the region does not read the changed field; missing fields too."""
    expected = evaluate(*healthy(name))
    for bad in UNREAD[name]:
        print(bad.name)  # shown if the case fails
        region, raw = healthy(name)
        bad.change(raw)
        assert_unnoticed(region, raw, expected)


def assert_unnoticed(region, raw, expected):
    """Nothing is counted, and loss and gradient are the expected ones."""
    out, grads = evaluate(region, raw)
    assert_finite(out, grads)
    assert not faults(out)
    want, want_grads = expected
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-4, abs=1e-6)
    got, expected_grad = grads["policy"], want_grads["policy"]
    if got.numel() > expected_grad.numel():  # of rows outside the loss, which the expected batch does not have
        rows = raw["in_loss"].any(-1)
        assert (got[~rows] == 0).all()
        got = got[rows]
    assert_same(got.double(), expected_grad.double().reshape(got.shape))


def in_float64(raw):
    return {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in raw.items()}


def test_every_case_has_a_name_of_its_own_and_a_preset_it_applies_to():
    names = [bad.name for bad in CASES]
    assert len(names) == len(set(names)) >= 60
    assert {bad.name for bad, _ in PAIRS} == set(names)
    assert all(UNREAD.values()), "no region reads every field"


@pytest.mark.parametrize("name", PRESETS)
def test_zeroed_tokens_count_in_their_sequence_as_unmoved(name):
    """`zero`: the token leaves the loss, and its sequence reads it as log r = 0, D = 0."""
    region, raw = healthy(name)
    raw["policy"] = raw["policy"].clone()
    raw["policy"][BAD[0]] = torch.nan
    still = dict(
        raw,
        policy=raw["policy"].clone(),
        policy_topk=raw["policy_topk"].clone(),
        full_policy=raw["full_policy"].clone(),
    )
    anchor = raw[region.needs().anchor]
    still["policy"][BAD[0]] = anchor[BAD[0]]
    if getattr(region, "correction", None) is not None:
        still["behavior"] = still["behavior"].clone()
        still["behavior"][BAD[0]] = anchor[BAD[0]]  # its mismatch is unknown too
    still["policy_topk"][BAD[0]] = raw["topk_logp"][BAD[0]]
    still["full_policy"][BAD[0]] = raw["full_anchor"][BAD[0]]

    def keep(raw, mode):
        needs = region.needs()
        rollout = trustrl.RolloutTokens(
            behavior_logp=raw["behavior"], proximal_logp=raw["proximal"], advantage=raw["advantage"], in_loss=raw["in_loss"],
            token_ids=raw["tokens"], topk=trustrl.TopK(raw["topk_ids"], raw["topk_logp"], needs.anchor),
            full=trustrl.FullVocabulary(raw["full_anchor"], needs.anchor),
        )  # fmt: skip
        policy = trustrl.PolicyTokens(logp=raw["policy"], topk_logp=raw["policy_topk"], full_logp=raw["full_policy"])
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=4) if region.needs().reduction else trustrl.TokenSum()
        return trustrl.policy_loss(policy, rollout, region, reduction=reduction, on_nonfinite=mode).decision

    zeroed, unmoved = keep(raw, "zero"), keep(still, "drop")
    others = raw["in_loss"].clone()
    others[BAD[0]] = False
    assert torch.equal(zeroed.keep[others], unmoved.keep[others])
    torch.testing.assert_close(zeroed.weight[others], unmoved.weight[others])


def test_raise_names_the_faults():
    region, raw = healthy("dppo-binary-tv")
    rollout = trustrl.RolloutTokens(
        behavior_logp=raw["behavior"], advantage=raw["advantage"] * torch.nan, in_loss=raw["in_loss"]
    )
    policy = trustrl.PolicyTokens(logp=raw["policy"])
    count = int(raw["in_loss"].sum())
    with pytest.raises(trustrl.errors.NonFiniteError, match=f"advantage: {count}"):
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), on_nonfinite="raise")


def test_replace_keeps_a_top_k_valid():
    """A copy of a record computes its valid columns anew."""
    region, raw = healthy("dppo-topk-tv")
    topk = trustrl.TopK(raw["topk_ids"], raw["topk_logp"])
    emptied = replace(topk, ids=torch.full_like(topk.ids, -1))
    assert topk.valid.all()
    assert not emptied.valid.any()
