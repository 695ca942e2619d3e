"""One test per fault that others shipped and that the core could share.

The numbers are those of docs/guides/debugging-a-collapse.md.

Number 5, the tail's gradient in a sparse KL, is in regions/test_troll.py.
"""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import pytest
import torch

import trustrl
from support.worlds import log, run, world
from trustrl import regions
from trustrl.core import divergences
from trustrl.core.numerics import log1mexp
from trustrl.core.sampling import within_kept


def single(region, policy, behavior, advantage=1.0, dtype=torch.float32, **extra):
    """(gradient, output) of one token."""
    logp = torch.tensor([[policy]], dtype=dtype, requires_grad=True)
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[behavior]], dtype=dtype), advantage=torch.tensor([advantage], dtype=dtype),
        in_loss=torch.ones(1, 1, dtype=torch.bool), **extra,
    )  # fmt: skip
    out = trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum())
    out.loss.backward()
    return logp.grad.item(), out


@pytest.mark.parametrize("name", trustrl.presets())
def test_pitfall_1_masked_tokens_may_hold_anything_without_poisoning_the_gradient(name):
    """exp first, mask later: 0 · inf = NaN in loss or gradient. Here log r = +200 and NaN at masked tokens."""
    w = world(0, vocabulary=70)
    rollout = w.rollout(trustrl.preset(name).needs().anchor, dtype=torch.float32, k=64)
    hidden = ~w.in_loss
    assert hidden.any()
    behavior = rollout.behavior_logp.clone()
    behavior[hidden] = -200.0
    behavior[hidden.nonzero()[0].tolist()[0], hidden.nonzero()[0].tolist()[1]] = torch.nan
    out, policy = run(name, w, dtype=torch.float32, behavior_logp=behavior, proximal_logp=behavior)
    assert torch.isfinite(out.loss)
    assert torch.isfinite(policy.logp.grad).all()
    assert (policy.logp.grad[hidden] == 0).all()


def test_pitfall_2_a_huge_ratio_is_dropped_or_capped_and_counted_never_clamped_in_silence():
    """A log-ratio clamped at 20 prints a loss of 4.4e7 with gradient 0, or detached a gradient of e²⁰."""
    gradient, out = single(regions.PolicyGradient(), -1.0, -101.0)
    assert gradient == 0.0
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most of its tokens: the loss term overflows"):
        metrics = trustrl.rates(out.sums)
    assert metrics["trustrl/fault_overflow"] == 1
    assert metrics["trustrl/ratio_max"] == pytest.approx(math.exp(100), rel=1e-3)
    gradient, out = single(regions.CISPO(5.0), -1.0, -101.0)
    assert gradient == -5.0
    assert trustrl.rates(out.sums)["trustrl/capped_share"] == 1.0
    # Between: large and representable is neither clamped nor dropped.
    gradient, _ = single(regions.PolicyGradient(), -1.0, -41.0)
    assert gradient == pytest.approx(-math.exp(40), rel=1e-5)


def test_pitfall_3_binary_kl_in_bf16_is_not_inf():
    """1 − 1e-7 rounds to 1 in bf16, so that a KL of .222 nats would come out as +inf."""
    anchor, policy = torch.tensor(-0.02).bfloat16(), torch.tensor(-1e-7).bfloat16()
    b, p = (x.double() for x in (anchor, policy))
    true = float(b.exp() * (b - p) + (-torch.expm1(b)) * (log1mexp(b) - log1mexp(p)))
    found = float(divergences.binary_kl(policy, anchor).lower)
    assert math.isfinite(found)
    assert found == pytest.approx(true, rel=1e-9)
    in_bf16 = anchor.exp() * (anchor - policy) + (1 - anchor.exp()) * torch.log((1 - anchor.exp()) / (1 - policy.exp()))
    assert not torch.isfinite(in_bf16)


def test_pitfall_4_near_certain_tokens_keep_their_precision():
    """log(1 − p + 1e-8) is far off for near-certain tokens in fp32; log1mexp is not."""
    logp = torch.tensor(-1e-8, dtype=torch.float64)
    assert float(log1mexp(logp)) == pytest.approx(math.log(1e-8), rel=1e-8)
    careless = torch.log(1 - logp.float().exp() + 1e-8)
    assert abs(float(careless) - math.log(1e-8)) < 1  # it looks right here, by accident of the 1e-8 ...
    off = torch.log(1 - torch.tensor(-3e-8).exp() + 1e-8)
    assert abs(float(off) / math.log(3e-8) - 1) > 0.02  # ... and is off where p differs
    assert float(log1mexp(torch.tensor(-3e-8, dtype=torch.float64))) == pytest.approx(math.log(3e-8), rel=1e-7)


def test_pitfall_6_a_recorded_mass_above_one_is_clamped_not_smoothed():
    """Rounded log-probs may sum to more than 1; the rest is then 0, not a small negative number, and no +1 smoothing."""
    logp = torch.tensor([[0.6, 0.4005]]).log()
    rollout = trustrl.RolloutTokens(
        behavior_logp=logp[:, 0], advantage=torch.ones(1), in_loss=torch.tensor([True]), token_ids=torch.tensor([0]),
        topk=trustrl.TopK(torch.tensor([[0, 1]]), logp),
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=logp[:, 0], topk_logp=logp)
    out = trustrl.policy_loss(policy, rollout, regions.DPPO(regions.TopKKL(k=2)), reduction=trustrl.TokenSum())
    assert trustrl.rates(out.sums)["trustrl/anchor_tail_mean"] == 0.0
    assert float(out.decision.divergence.lower) == 0.0


@pytest.mark.parametrize("name", ["dppo-binary-tv", "ppo", "ipo", "trm-sampled"])
def test_pitfall_7_advantage_zero_is_on_no_side(name):
    _, out = single(trustrl.preset(name), log(0.95), log(0.05), advantage=0.0)
    assert float(out.sums.added["masked"]) == 0
    assert float(out.sums.added["signed"]) == 0
    assert "trustrl/masked_share" not in trustrl.rates(out.sums)


def test_pitfall_8_thresholds_carry_their_unit():
    """clip_ratio = .2 read as nats; a PPO bound of 1.2 read as a probability gap."""
    assert trustrl.preset("dppo-binary-tv").divergence.bounds == (0.15, 0.15)
    assert trustrl.preset("dppo-binary-kl").divergence.bounds == (0.05, 0.05)
    assert trustrl.preset("dppo-binary-tv").max_ratio is None
    with pytest.raises(trustrl.errors.ConfigError, match="belongs to `ppo`"):
        regions.BinaryTV(max_increase=1.2)
    with pytest.raises(trustrl.errors.ConfigError, match=r"dppo.divergence must be a BinaryTV, .*, got Ratio"):
        regions.DPPO(regions.Ratio(max_increase=0.2))
    with pytest.raises(TypeError):
        regions.DPPO(clip_ratio=0.2)


def test_pitfall_9_a_missing_anchor_is_an_error_never_a_fallback():
    logp = torch.zeros(1, 1)
    only_proximal = trustrl.RolloutTokens(proximal_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool())
    with pytest.raises(trustrl.errors.MissingDataError, match="set the region's anchor"):
        trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp), only_proximal, regions.DPPO(), reduction=trustrl.TokenSum()
        )
    region = regions.DPPO(anchor="proximal")
    trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), only_proximal, region, reduction=trustrl.TokenSum())


@pytest.mark.parametrize("region", [regions.DPPO, regions.PPO, regions.CISPO, regions.TROLL, regions.GSPO])
def test_pitfall_10_the_mismatch_is_not_counted_twice(region):
    """π/μ already contains π'/μ."""
    with pytest.raises(trustrl.errors.ConfigError, match="apply the mismatch twice"):
        region(anchor="behavior", correction=regions.TIS())
    assert region(anchor="proximal", correction=regions.TIS()).correction is not None


def sampling(**settings):
    return trustrl.Sampling(**{"logprobs": "processed", **settings})


@pytest.mark.parametrize(
    ("rollout", "policy", "message"),
    [
        pytest.param(sampling(logprobs="raw", temperature=0.7), sampling(temperature=0.7), "not describe the distribution that was sampled", id="raw log-probs at a temperature"),
        pytest.param(sampling(logprobs="raw", truncated=True), sampling(), "not describe the distribution that was sampled", id="raw log-probs of a truncated sampler"),
        pytest.param(sampling(temperature=0.7), sampling(), "same temperature", id="temperature on one side only"),
        pytest.param(sampling(truncated=True), sampling(), "kept ids", id="top-p renormalised on one side only"),
        pytest.param(sampling(truncated=True, kept_known=True), sampling(truncated=True), "kept ids", id="kept ids known on one side only"),
        pytest.param(sampling(), sampling(logprobs="raw", temperature=0.7), "Divide the logits", id="the policy's side raw at a temperature"),
    ],
)  # fmt: skip
def test_pitfall_11_incompatible_log_probs_are_refused(rollout, policy, message):
    logp = torch.zeros(1, 1)
    record = trustrl.RolloutTokens(
        behavior_logp=logp, advantage=torch.ones(1), in_loss=torch.ones(1, 1).bool(), sampling=rollout
    )
    with pytest.raises(trustrl.errors.IncompatibleSamplingError, match=message):
        trustrl.policy_loss(
            trustrl.PolicyTokens(logp=logp, sampling=policy), record, regions.DPPO(), reduction=trustrl.TokenSum()
        )


@pytest.mark.parametrize(
    ("rollout", "policy"),
    [
        (sampling(), sampling()),
        (sampling(logprobs="raw"), sampling()),
        (sampling(temperature=0.7), sampling(temperature=0.7)),
        (sampling(truncated=True, kept_known=True), sampling(truncated=True, kept_known=True)),
    ],
)
def test_pitfall_11_compatible_log_probs_are_accepted(rollout, policy):
    rollout.must_match(policy)


def test_pitfall_11_truncated_sampling_is_renormalised_on_both_sides():
    """top-p .8: renormalised on one side only, most ratios leave [.9, 1.1]; on both, identical policies have ratio 1."""
    g = torch.Generator().manual_seed(0)
    logits = torch.randn(200, 50, generator=g, dtype=torch.float64) * 2
    logp = torch.log_softmax(logits, -1).requires_grad_()
    ordered, ids = logp.detach().sort(-1, descending=True)
    kept = ordered.exp().cumsum(-1) - ordered.exp() < 0.8
    token = ids[:, 0]
    behavior = (ordered - torch.logsumexp(ordered.masked_fill(~kept, -torch.inf), -1, keepdim=True))[:, 0]
    naive = logp.gather(-1, token.unsqueeze(-1)).squeeze(-1)
    assert (((naive - behavior).exp() - 1).abs() > 0.1).double().mean() > 0.4
    ours = within_kept(naive, logp.gather(-1, ids), kept)
    torch.testing.assert_close(ours, behavior)
    ours[0].backward()
    assert (logp.grad[0][ids[0][kept[0]]] != 0).any()  # gradient through both terms


def test_pitfall_11_the_argmax_recorded_as_the_sampled_token_is_found():
    """Asked for K log-probs, an engine's first one is the argmax, not the sampled token."""
    w = world(2)
    rollout = w.rollout()
    policy = w.policy_tokens(rollout)
    trustrl.check(policy, rollout)
    wrong = replace(rollout, behavior_logp=rollout.topk.logp.max(-1).values)
    with pytest.raises(trustrl.errors.RecordError, match="select the sampled token by its id"):
        trustrl.check(policy, wrong)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        pytest.param(
            lambda: regions.GSPO(regions.SequenceRatio(max_increase=0.2)), "500 times the published 4e-4", id="gspo"
        ),
        pytest.param(lambda: regions.DRPO(12.5), r"\[0.92, 1.08\]", id="drpo"),
    ],
)
def test_pitfall_12_settings_that_do_nothing_warn_with_the_arithmetic(build, message):
    with pytest.warns(trustrl.errors.TrustRLWarning, match=message):
        build()


def test_pitfall_13_counts_are_global():
    """The same tokens in two halves: local means would average to something else."""
    w = world(3)
    w.in_loss[:2] = False
    w.in_loss[0, 0] = True
    out, _ = run("dppo-binary-tv", w, reduction=trustrl.TokenMean(num_tokens=w.num_tokens))
    total, _ = run("dppo-binary-tv", w, reduction=trustrl.TokenSum())
    assert out.loss.item() == pytest.approx(total.loss.item() / w.num_tokens)
    with pytest.raises(TypeError, match="num_tokens"):
        trustrl.TokenMean()
    for wrong in (0, -1, 2.5, None, True):
        with pytest.raises(trustrl.errors.ConfigError, match="over the whole batch"):
            trustrl.TokenMean(num_tokens=wrong)


def test_pitfall_14_ratios_are_logged_before_and_after_truncation():
    logp = torch.tensor([[log(0.9), log(0.5)]])
    rollout = trustrl.RolloutTokens(
        behavior_logp=torch.tensor([[log(0.009), log(0.5)]]), advantage=-torch.ones(1), in_loss=torch.ones(1, 2).bool()
    )
    region = regions.DPPO(max_ratio=2.0)
    rates = trustrl.rates(
        trustrl.policy_loss(trustrl.PolicyTokens(logp=logp), rollout, region, reduction=trustrl.TokenSum()).sums
    )
    assert rates["trustrl/ratio_max"] == pytest.approx(100, rel=1e-4)
    assert rates["trustrl/ratio_mean"] == pytest.approx(50.5, rel=1e-4)
    assert rates["trustrl/weight_mean"] == pytest.approx(1.5, rel=1e-4)
    assert rates["trustrl/effective_sample_share"] == pytest.approx(101**2 / (2 * (100**2 + 1)), rel=1e-3)
    assert rates["trustrl/chi_square"] == pytest.approx((100**2 + 1) / 2 - 1, rel=1e-3)


def test_pitfall_17_registries_never_overwrite():
    @dataclass(frozen=True)
    class Mine(regions.Region):
        kind: ClassVar[str] = "dppo"

    with pytest.raises(trustrl.errors.DuplicateNameError, match="already registered"):
        regions.register_region(Mine)(lambda tokens, region: None)

    @dataclass(frozen=True)
    class Clash(regions.Region):
        kind: ClassVar[str] = "tis"  # a correction owns it

    with pytest.raises(trustrl.errors.DuplicateNameError, match="already registered"):
        regions.register_region(Clash)(lambda tokens, region: None)


def test_pitfall_18_the_ratio_is_one_before_the_first_step():
    """The invariant engines run at start-up, as the core reports it."""
    w = world(4, drift=0.0)
    out, _ = run("dppo-topk-tv", w)
    rates = trustrl.rates(out.sums)
    assert rates["trustrl/ratio_max"] == pytest.approx(1.0, abs=1e-12)
    assert rates["trustrl/ratio_mean"] == pytest.approx(1.0, abs=1e-12)
    assert rates["trustrl/divergence_max"] < 1e-12
    assert rates["trustrl/masked_share"] == 0.0


def test_pitfall_20_the_oracle_imports_nothing_of_ours():
    import support.oracle

    for module in (support, support.oracle):  # the package is imported with it
        source = Path(module.__file__).read_text()
        assert "import trustrl" not in source
        assert "from trustrl" not in source
