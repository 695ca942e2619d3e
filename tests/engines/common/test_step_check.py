"""Steps that drop their tokens raise, and a region that masks nothing is reported once."""

import warnings

import pytest
import torch

import trustrl
from support.worlds import world
from trustrl.engines.common.step_check import StepCheck, check_initial_ratio, warn_if_it_cannot_act

REGION = trustrl.preset("dppo-binary-tv")


def step(dropped=0, *, drift=3.0, region=REGION):
    """The metrics of one step of 64 tokens, `dropped` of them NaN."""
    w = world(1, drift=drift)
    logp = w.at_token(w.policy)
    at = w.in_loss.nonzero()[:dropped]
    logp[at[:, 0], at[:, 1]] = torch.nan
    policy = trustrl.PolicyTokens(logp=logp)
    out = trustrl.policy_loss(policy, w.rollout(), region, reduction=trustrl.TokenSum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return (trustrl.rates(out.sums), out.sums), dropped / int(w.in_loss.sum())


def check(share=0.5, **more):
    return StepCheck(REGION, max_dropped_share=share, setting="max_dropped_share", **more)


def test_a_step_that_drops_more_than_allowed_raises_with_the_reason():
    metrics, share = step(dropped=30)
    assert share > 0.5
    with pytest.raises(
        trustrl.errors.NonFiniteError, match=r"at most 50% .* log π is NaN, infinite or above 0\. .*max_dropped"
    ):
        check().check(*metrics)


def test_the_allowed_share_can_be_set():
    metrics, share = step(dropped=10)
    with pytest.raises(trustrl.errors.NonFiniteError, match="at most 5%"):
        check(share=0.05).check(*metrics)
    with pytest.warns(trustrl.errors.TrustRLWarning, match="tokens were dropped: log π is NaN"):
        check(share=1.0).check(*metrics)


def test_dropped_tokens_are_reported_once():
    watch = check()
    with pytest.warns(trustrl.errors.TrustRLWarning, match="tokens were dropped"):
        watch.check(*step(dropped=10)[0])
    watch.check(*step(dropped=12)[0])  # warnings are errors here


def test_a_step_without_faults_says_nothing():
    check().check(*step()[0])


def test_other_ranks_are_silent_and_raise_all_the_same():
    check(warns=False).check(*step(dropped=10)[0])
    with pytest.raises(trustrl.errors.NonFiniteError):
        check(warns=False).check(*step(dropped=30)[0])


def test_a_region_that_masked_nothing_in_the_first_batch_is_reported_once():
    watch = check(updates_per_batch=2)
    idle = step(drift=0.0)[0]
    assert idle[0]["trustrl/masked_share"] == 0
    watch.check(*idle)
    with pytest.warns(
        trustrl.errors.TrustRLWarning, match=r"dppo masked no token in the first batch .*largest ratio 1\)"
    ):
        watch.check(*idle)
    for _ in range(3):
        watch.check(*idle)


def test_a_region_that_masked_once_in_the_first_batch_is_not_reported():
    watch = check(updates_per_batch=2)
    acting = step()[0]
    assert acting[0]["trustrl/masked_share"] > 0
    watch.check(*acting)
    watch.check(*step(drift=0.0)[0])


def test_a_region_without_thresholds_is_never_reported_as_idle():
    region = trustrl.preset("cispo")
    watch = StepCheck(region, max_dropped_share=0.5, setting="max_dropped_share")
    watch.check(*step(drift=0.0, region=region)[0])


@pytest.mark.parametrize("share", [0.0, -1.0, 1.5, "most", None, True])
def test_a_share_that_is_none_is_refused(share):
    with pytest.raises(trustrl.errors.ConfigError, match="max_dropped_share must be a share"):
        check(share=share)


def test_one_update_against_the_trainers_own_log_probs_is_reported_before_the_first_step():
    with pytest.warns(trustrl.errors.TrustRLWarning, match=r"dppo cannot act: .* every ratio is 1. Do this."):
        warn_if_it_cannot_act(REGION, updates_per_batch=1, remedy="Do this.")
    warn_if_it_cannot_act(REGION, updates_per_batch=2, remedy="")
    warn_if_it_cannot_act(trustrl.preset("pg-is"), updates_per_batch=1, remedy="")  # no region, nothing to act


def test_log_probs_that_the_trainer_rounded_are_reported():
    """verl's own, in bf16 without flash-attn."""
    logp = torch.tensor([-10.0, -0.5])
    everywhere = torch.tensor([True, True])
    check_initial_ratio(logp, logp, everywhere, "trainer", "")  # warnings are errors here
    with pytest.warns(trustrl.errors.TrustRLWarning, match=r"float32, got torch.bfloat16, .* multiple of 0.0625"):
        check_initial_ratio(logp.bfloat16(), logp, everywhere, "trainer", "")
