"""Every case of the corpus × every preset: the declared verdict, never silence, never NaN or inf."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from bad_inputs import BAD, CASES, MASKED

import trustrl
from worlds import world

PRESETS = trustrl.presets()


def healthy(name, dtype=torch.float32):
    """The raw tensors of a batch with which nothing is wrong."""
    region = trustrl.preset(name)
    needs = region.needs()
    w = world(1, rows=4, width=8, vocabulary=70, drift=0.05)
    w.in_loss[MASKED] = False
    for at, sign in zip(BAD, (1.0, -1.0), strict=True):
        w.in_loss[at] = True
        w.advantage[at] = sign
    source = w.anchor(needs.anchor)
    ids = source.topk(needs.topk or 4, -1).indices
    return region, {
        "behavior": w.at_token(w.behavior).to(dtype),
        "proximal": w.at_token(w.proximal).to(dtype),
        "policy": w.at_token(w.policy).to(dtype),
        "advantage": w.advantage.to(dtype),
        "in_loss": w.in_loss,
        "tokens": w.tokens,
        "topk_ids": ids,
        "topk_logp": source.gather(-1, ids).to(dtype),
        "policy_topk": w.policy.gather(-1, ids).to(dtype),
        "full_anchor": source.to(dtype),
        "full_policy": w.policy.to(dtype),
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
        trustrl.SequenceMeanTokenMean(num_sequences=4) if region.kind == "gspo" else trustrl.TokenMean(num_tokens=20)
    )
    out = trustrl.policy_loss(policy, rollout, region, reduction=reduction)
    if out.loss.requires_grad:
        out.loss.backward()
    grads = {
        n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in leaves.items() if isinstance(x, torch.Tensor)
    }
    return out, grads


def does_read(reads, needs):
    return {
        "always": True,
        "behavior": "behavior" in needs.anchors,
        "proximal": "proximal" in needs.anchors,
        "topk": needs.topk > 0,
        "full": needs.full,
        "support": needs.full or needs.topk > 0,
        "sequences": needs.sequences or needs.reduction is not None,
    }[reads]


def assert_finite(out, grads):
    assert torch.isfinite(out.loss)
    for name, g in grads.items():
        assert torch.isfinite(g).all(), f"gradient of {name}"
    mostly_dropped = out.sums.added["used"] < 0.5 * out.sums.added["tokens"]
    with pytest.warns(trustrl.TrustRLWarning, match="dropped most") if mostly_dropped else nullcontext():
        metrics = trustrl.rates(out.sums)
    for name, value in metrics.items():
        assert value == value, f"{name} is NaN"


def faults(out):
    return {
        name.removeprefix("fault/"): int(x) for name, x in out.sums.added.items() if name.startswith("fault/") and x
    }


def assert_same(got, want, places=slice(None)):
    torch.testing.assert_close(got[places], want[places], rtol=2e-5, atol=1e-9, equal_nan=False)


@pytest.mark.parametrize(
    ("bad", "name"), [pytest.param(c, n, id=f"{c.name}-{n}") for c in CASES for n in PRESETS if c.presets(n)]
)
def test_bad_input(bad, name):
    region, raw = healthy(name)
    needs = region.needs()
    bad.change(raw)
    applies = does_read(bad.reads, needs) and bad.only(name)
    if isinstance(bad.verdict, type):
        # A record that cannot be right is refused whether or not the region reads it.
        if not applies:
            refused_anyway = False
            try:
                out, grads = evaluate(region, raw)
            except trustrl.RecordError as error:
                assert "must be" in str(error)
                refused_anyway = True
            if not refused_anyway:
                assert_finite(out, grads)
            return
        with pytest.raises(bad.verdict, match="must be"):
            evaluate(region, raw)
        return

    out, grads = evaluate(region, raw)
    assert_finite(out, grads)
    if bad.verdict == "drop" and applies:
        check_drop(bad, region, raw, out, grads)
    elif bad.verdict == "bounded" and applies:
        check_bounded(bad, region, raw, out, grads)
    else:
        check_exact(bad, name, raw, out, grads)


def check_drop(bad, region, raw, out, grads):
    """As if the tokens were outside the loss; the denominator and the other tokens do not notice."""
    changed = torch.zeros_like(raw["in_loss"])
    for at in BAD:
        changed[at] = True
    if bad.name.startswith("a group of one"):
        changed[1] = raw["in_loss"][1]
        changed[BAD[1]] = False
    count = int((changed & raw["in_loss"]).sum())
    assert faults(out)[bad.fault] == count
    without = dict(raw, in_loss=raw["in_loss"] & ~changed)
    out_without, grads_without = evaluate(region, without)
    if region.kind != "gspo":  # its denominator is the sequence's length, which still counts them
        assert out.loss.item() == pytest.approx(out_without.loss.item(), rel=1e-5, abs=1e-7)
        for key in grads:
            assert_same(grads[key], grads_without[key])
    assert (grads["policy"][changed] == 0).all()
    dropped = trustrl.rates(out.sums)["trustrl/dropped_share"]
    assert dropped == pytest.approx(count / int(raw["in_loss"].sum()))


def check_bounded(bad, region, raw, out, grads):
    """Right to float32, judged by the same batch in float64; or left out and counted."""
    exact = {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in raw.items()}
    out64, grads64 = evaluate(region, exact)
    assert torch.equal(out.decision.keep, out64.decision.keep) or faults(out)
    for at in BAD:
        got, want = grads["policy"][at].double(), grads64["policy"][at]
        if got == 0 and want != 0 and want.abs() > 1e-44:
            assert faults(out).get("overflow", 0) > 0, "a gradient vanished without being counted"
        else:
            torch.testing.assert_close(got, want, rtol=2e-4, atol=1e-37)


def check_exact(bad, name, raw, out, grads):
    """The result of the batch this one is equivalent to."""
    assert not faults(out)
    region, same = healthy(name)
    if bad.equivalent is not None:
        bad.equivalent(same)
    elif bad.name.split(":")[0] in UNTOUCHED or "outside the loss" in bad.name or bad.reads != "always":
        pass
    else:
        same = {k: x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for k, x in raw.items()}
    want, want_grads = evaluate(region, same)
    assert out.loss.item() == pytest.approx(want.loss.item(), rel=1e-4, abs=1e-6)
    if bad.name != "one row masked is one row less":
        assert_same(grads["policy"].double(), want_grads["policy"].double().reshape(grads["policy"].shape))


UNTOUCHED = {"versions mixed", "versions from the future", "tensors that are not contiguous", "gradients wanted on the behavior side"}  # fmt: skip


def test_the_corpus_is_large_enough():
    names = [c.name for c in CASES]
    assert len(names) == len(set(names)) >= 60


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
        reduction = trustrl.SequenceMeanTokenMean(num_sequences=4) if region.kind == "gspo" else trustrl.TokenSum()
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
    with pytest.raises(trustrl.NonFiniteError, match=f"advantage: {count}"):
        trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum(), on_nonfinite="raise")


def test_replace_keeps_a_top_k_valid():
    """A copy of a record computes its valid columns anew."""
    region, raw = healthy("dppo-topk-tv")
    topk = trustrl.TopK(raw["topk_ids"], raw["topk_logp"])
    emptied = replace(topk, ids=torch.full_like(topk.ids, -1))
    assert topk.valid.all()
    assert not emptied.valid.any()
