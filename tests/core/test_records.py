"""Records: what is refused when they are made, and what `check` finds in their values."""

from dataclasses import replace

import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl import regions
from trustrl.core.records import FullDivergence


@pytest.fixture
def healthy():
    w = world(0)
    rollout = w.rollout(with_tails=True, reference_logp=w.at_token(w.proximal))
    return w.policy_tokens(rollout, grad=False), rollout


def test_a_healthy_batch_passes(healthy):
    policy, rollout = healthy
    trustrl.check(policy, rollout)
    trustrl.check(policy, rollout, trustrl.preset("dppo-topk-kl"))
    trustrl.check(policy, replace(rollout, advantage=torch.ones(4)))


def poke(x, value, at=(1, 2)):
    x = x.clone()
    x[at] = value
    return x


POLICY_FIELDS = ["logp", "topk_logp", "tail_logp", "full_logp", "entropy"]
ROLLOUT_FIELDS = ["behavior_logp", "proximal_logp", "reference_logp", "advantage"]


@pytest.mark.parametrize("field", POLICY_FIELDS)
def test_check_names_a_bad_value_of_the_policy(healthy, field):
    policy, rollout = healthy
    in_loss = poke(rollout.in_loss, True)
    rollout = replace(rollout, in_loss=in_loss)
    with pytest.raises(trustrl.errors.NonFiniteError, match=rf"PolicyTokens.{field} must be .*got 1 .*\(1, 2\)"):
        trustrl.check(replace(policy, **{field: poke(getattr(policy, field), torch.nan)}), rollout)
    hidden = replace(rollout, in_loss=poke(in_loss, False))
    trustrl.check(replace(policy, **{field: poke(getattr(policy, field), torch.nan)}), hidden)


@pytest.mark.parametrize("field", ROLLOUT_FIELDS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_check_names_a_bad_value_of_the_rollout(healthy, field, value):
    policy, rollout = healthy
    rollout = replace(rollout, in_loss=poke(rollout.in_loss, True))
    with pytest.raises(trustrl.errors.NonFiniteError, match=rf"RolloutTokens.{field} must be"):
        trustrl.check(policy, replace(rollout, **{field: poke(getattr(rollout, field), value)}))


def test_check_names_every_fault_at_once(healthy):
    policy, rollout = healthy
    rollout = replace(
        rollout, in_loss=poke(rollout.in_loss, True), behavior_logp=poke(rollout.behavior_logp, torch.nan)
    )
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"(?s)PolicyTokens.logp.*RolloutTokens.behavior_logp"):
        trustrl.check(replace(policy, logp=poke(policy.logp, 1.0)), rollout)


@pytest.mark.parametrize("value", [torch.nan, 0.5])
def test_check_looks_into_the_support(healthy, value):
    policy, rollout = healthy
    rollout = replace(rollout, in_loss=poke(rollout.in_loss, True))
    topk = rollout.topk
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"RolloutTokens.topk.logp must be a log-prob"):
        trustrl.check(policy, replace(rollout, topk=replace(topk, logp=poke(topk.logp, value, (1, 2, 0)))))
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"RolloutTokens.topk.tail_logp must be a log-prob"):
        trustrl.check(policy, replace(rollout, topk=replace(topk, tail_logp=poke(topk.tail_logp, value))))
    full = trustrl.FullVocabulary(poke(rollout.full.logp, value, (1, 2, 0)))
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"RolloutTokens.full.logp must be a log-prob"):
        trustrl.check(policy, replace(rollout, full=full))


def test_check_looks_at_what_only_some_regions_read(healthy):
    policy, rollout = healthy
    rollout = replace(rollout, in_loss=poke(rollout.in_loss, True))
    ids = rollout.topk.ids
    own = trustrl.TopK(ids, poke(rollout.topk.logp, torch.nan, (1, 2, 0)))
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"PolicyTokens.topk.logp must be a log-prob"):
        trustrl.check(replace(policy, topk=own), rollout)
    anchor = poke(rollout.topk.logp, 0.5, (1, 2, 0))
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"PolicyTokens.topk_anchor_logp must be a log-prob"):
        trustrl.check(replace(policy, topk=rollout.topk, topk_anchor_logp=anchor), rollout)
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"full_divergence.kl must be ≥ 0"):
        trustrl.check(replace(policy, full_divergence=FullDivergence(kl=-torch.ones(4, 16))), rollout)


def test_an_empty_cell_is_no_fault(healthy):
    policy, rollout = healthy
    trustrl.check(replace(policy, topk_logp=poke(policy.topk_logp, -torch.inf, (1, 2, 0))), rollout)


def test_check_finds_repeated_and_negative_ids(healthy):
    policy, rollout = healthy
    rollout = replace(rollout, in_loss=poke(rollout.in_loss, True))
    ids = rollout.topk.ids.clone()
    ids[1, 2, 1] = ids[1, 2, 0]
    with pytest.raises(trustrl.errors.RecordError, match="distinct"):
        trustrl.check(policy, replace(rollout, topk=trustrl.TopK(ids, rollout.topk.logp)))
    with pytest.raises(trustrl.errors.RecordError, match="must be ≥ 0"):
        trustrl.check(policy, replace(rollout, token_ids=poke(rollout.token_ids, -1)))
    two_empty = rollout.topk.ids.clone()
    two_empty[1, 2, :2] = -1
    trustrl.check(policy, replace(rollout, topk=trustrl.TopK(two_empty, rollout.topk.logp)))


def test_check_with_a_region_asks_for_what_it_needs(healthy):
    policy, rollout = healthy
    with pytest.raises(trustrl.errors.MissingDataError, match="token_ids"):
        trustrl.check(policy, replace(rollout, token_ids=None), trustrl.preset("dppo-topk-tv"))


def test_check_accepts_an_empty_batch():
    w = world(0, rows=0)
    rollout = w.rollout()
    trustrl.check(w.policy_tokens(rollout, grad=False), rollout)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: trustrl.TopK(torch.zeros(3, dtype=torch.long), torch.zeros(3)), "Add a last axis"),
        (lambda: trustrl.TopK(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 2)), "TopK.logp must be of shape"),
        (lambda: trustrl.TopK(torch.zeros(1, 3), torch.zeros(1, 3)), "TopK.ids must be an integer tensor"),
        (lambda: trustrl.TopK(torch.zeros(1, 3, dtype=torch.bool), torch.zeros(1, 3)), "TopK.ids must be an integer tensor"),
        (lambda: trustrl.TopK(torch.zeros(1, 3, dtype=torch.long), torch.zeros(1, 3), tail_logp=torch.zeros(2)), "tail_logp must be of shape"),
        (lambda: trustrl.PolicyTokens(logp=torch.zeros(2, 3), topk_logp=torch.zeros(2, 3)), "one axis longer"),
        (lambda: trustrl.PolicyTokens(logp=torch.zeros(2, 3), entropy=torch.zeros(2)), "entropy must be of shape"),
        (lambda: trustrl.PolicyTokens(logp=torch.zeros(2, 3), full_divergence=FullDivergence(tv=torch.zeros(2))), "full_divergence.tv must be of shape"),
        (lambda: trustrl.FullVocabulary([0.0]), "FullVocabulary.logp must be a tensor"),
    ],
)  # fmt: skip
def test_a_wrong_record_is_refused_when_it_is_made(make, message):
    with pytest.raises(trustrl.errors.RecordError, match=message):
        make()


@pytest.mark.parametrize("record", [lambda of: trustrl.TopK(torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1), of), lambda of: trustrl.FullVocabulary(torch.zeros(1, 2), of), lambda of: FullDivergence(of=of)])  # fmt: skip
def test_a_record_says_whose_it_is(record):
    with pytest.raises(trustrl.errors.ConfigError, match="one of 'behavior', 'proximal'"):
        record("reference")


@pytest.mark.parametrize("kind", ["tv", "kl"])
def test_a_divergence_made_elsewhere_gives_the_same_verdict(kind):
    """What a fused pass hands over instead of two full distributions."""
    w = world(2)
    name = f"dppo-full-{kind}"
    want, _ = run(name, w)
    given = FullDivergence(**{kind: want.decision.divergence.lower.float()})
    rollout = replace(w.rollout(), full=None, topk=None, token_ids=None)
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy), full_divergence=given)
    got = trustrl.policy_loss(policy, rollout, trustrl.preset(name), reduction=trustrl.TokenSum())
    assert torch.equal(got.decision.keep, want.decision.keep)
    broken = replace(given, **{kind: torch.where(w.in_loss, torch.nan, 0.0)})
    out = trustrl.policy_loss(
        replace(policy, full_divergence=broken), rollout, trustrl.preset(name), reduction=trustrl.TokenSum()
    )
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most of its tokens: a log-prob of the top-K"):
        assert trustrl.rates(out.sums)["trustrl/fault_support"] == w.num_tokens


def test_a_total_variation_above_1_is_a_fault():
    """As when it was measured against the wrong weights."""
    w = world(2)
    rollout = replace(w.rollout(), full=None, topk=None)
    policy = trustrl.PolicyTokens(
        logp=w.at_token(w.policy), full_divergence=FullDivergence(tv=torch.full((4, 16), 1.4))
    )
    out = trustrl.policy_loss(policy, rollout, trustrl.preset("dppo-full-tv"), reduction=trustrl.TokenSum())
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most of its tokens: a log-prob of the top-K"):
        assert trustrl.rates(out.sums)["trustrl/fault_support"] == w.num_tokens
    with pytest.raises(trustrl.errors.NonFiniteError, match=r"full_divergence.tv must be in \[0, 1\]"):
        trustrl.check(policy, rollout)


@pytest.mark.parametrize(
    ("given", "region", "message"),
    [
        (FullDivergence(tv=torch.zeros(4, 16)), "dppo-full-kl", "full_divergence.kl must be given"),
        (FullDivergence(), "dppo-full-kl", "must hold tv or kl"),
        (FullDivergence(kl=torch.zeros(4, 16), of="proximal"), "dppo-full-kl", "must be the behavior policy's"),
    ],
)
def test_a_divergence_made_elsewhere_must_fit_the_region(given, region, message):
    w = world(2)
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy), full_divergence=given)
    with pytest.raises(trustrl.errors.MissingDataError, match=message):
        trustrl.policy_loss(policy, w.rollout(), trustrl.preset(region), reduction=trustrl.TokenSum())


def test_a_projection_needs_distributions_not_a_divergence():
    w = world(2)
    given = FullDivergence(kl=torch.zeros(4, 16), of="proximal")
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy), full_divergence=given)
    with pytest.raises(trustrl.errors.MissingDataError, match="full_logp must be given"):
        trustrl.policy_loss(policy, w.rollout("proximal"), regions.TROLL(support="full"), reduction=trustrl.TokenSum())


def test_more_columns_than_k_use_the_k_most_probable():
    w = world(3)
    narrow, _ = run(regions.DPPO(regions.TopKTV(k=5)), w)
    rollout = w.rollout(k=30)
    wide = trustrl.policy_loss(
        w.policy_tokens(rollout), rollout, regions.DPPO(regions.TopKTV(k=5)), reduction=trustrl.TokenSum()
    )
    torch.testing.assert_close(wide.decision.divergence.lower, narrow.decision.divergence.lower)
    torch.testing.assert_close(wide.decision.divergence.upper, narrow.decision.divergence.upper)


def test_a_recorded_tail_is_used_only_when_both_sides_have_one():
    """Unlike representations differ where policies do not."""
    w = world(4, drift=0.0)
    rollout = w.rollout(dtype=torch.float32, with_tails=True, k=4)
    policy = w.policy_tokens(rollout, dtype=torch.float32)
    region = regions.DPPO(regions.TopKTV(k=4))

    def tails(policy, rollout):
        out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
        rates = trustrl.rates(out.sums)
        return rates["trustrl/anchor_tail_mean"], rates["trustrl/policy_tail_mean"]

    shifted = replace(rollout, topk=replace(rollout.topk, tail_logp=rollout.topk.tail_logp - 1.0))
    recorded = tails(policy, shifted)
    assert recorded[0] == pytest.approx(recorded[1] / 2.718281828, rel=1e-5)
    derived = tails(replace(policy, tail_logp=None), shifted)
    assert derived[0] == pytest.approx(derived[1], rel=1e-5)
