"""The rule that finds a replica which does not follow the trainer: what it finds, and what it leaves alone."""

import math
import random

import pytest

pytest.importorskip("torch")

import torch

import trustrl
from trustrl.engines.common.replica_gaps import ReplicaGaps
from trustrl.engines.common.replica_watch import LARGEST, STALE, ReplicaWatch
from trustrl.errors import ConfigError, EngineError, TrustRLWarning

TOKENS = 500


def step_of(draw, names, *, gap=0.02, sequences=32, **factors):
    """Gaps of one step in bf16: means over sequences whose own gaps differ by half of their mean."""
    return {
        name: (
            factors.get(name, 1.0) * sum(gap * math.exp(draw.gauss(-0.11, 0.47)) for _ in range(sequences)) / sequences,
            TOKENS,
        )
        for name in names
    }


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("sequences", [8, 128])
def test_the_noise_of_half_precision_names_nobody(count, sequences):
    draw, gaps = random.Random(0), ReplicaGaps()
    names = [str(number) for number in range(count)]
    for step in range(400):
        drift = 0.02 * (1 + step / 200)  # the gap of all grows as the policy sharpens
        assert gaps.stale(step_of(draw, names, gap=drift, sequences=sequences)) == [], step


@pytest.mark.parametrize("count", [2, 8, 64])
@pytest.mark.parametrize("before", [0, 3, 50])
def test_a_replica_with_four_times_the_gap_is_the_one_that_is_named(count, before):
    draw, gaps = random.Random(1), ReplicaGaps()
    names = [str(number) for number in range(count)]
    for _ in range(before):
        assert gaps.stale(step_of(draw, names)) == []
    for _ in range(20):  # its own steps must not become what is usual
        (found,) = gaps.stale(step_of(draw, names, **{"1": 4.0}))
        assert (found.name, found.against) == ("1", "the other replicas")


def test_a_smaller_gap_is_named_once_the_scatter_of_the_run_is_known():
    draw, gaps = random.Random(2), ReplicaGaps()
    for _ in range(20):
        gaps.stale(step_of(draw, "abcd", sequences=512))
    assert [one.name for one in gaps.stale(step_of(draw, "abcd", sequences=512, c=1.7))] == ["c"]


def test_a_replica_on_other_hardware_is_compared_with_its_own_multiple_of_the_others():
    draw, gaps = random.Random(3), ReplicaGaps()
    for _ in range(60):
        assert gaps.stale(step_of(draw, "abcd", sequences=128, b=2.0)) == []
    assert [one.name for one in gaps.stale(step_of(draw, "abcd", sequences=128, b=6.0))] == ["b"]


@pytest.mark.parametrize("names", ["a", "abc"], ids=["a single replica", "all at once"])
def test_without_a_healthy_one_beside_it_a_replicas_own_history_tells(names):
    draw, gaps = random.Random(4), ReplicaGaps()
    for _ in range(12):
        assert gaps.stale(step_of(draw, names)) == []
    found = gaps.stale(step_of(draw, names, gap=0.2))
    assert [(one.name, one.against) for one in found] == [(name, "its own earlier steps") for name in names]


def test_few_tokens_and_gaps_of_float32_are_left_alone():
    gaps = ReplicaGaps()
    assert gaps.stale({"a": (0.01, TOKENS), "b": (0.5, 63)}) == []
    assert gaps.stale({"a": (1e-7, TOKENS), "b": (9e-4, TOKENS)}) == []
    assert [one.name for one in gaps.stale({"a": (1e-7, TOKENS), "b": (2e-3, TOKENS)})] == ["b"]


def batch(*, b_gap, version=(3, 3, 3, 3)):
    """Four sequences of 100 tokens: two of `a`, one of `b`, one of nobody."""
    behavior = torch.full((4, 100), -1.0)
    policy = behavior + torch.tensor([0.02, 0.02, b_gap, 9.0]).unsqueeze(1)
    rollout = trustrl.RolloutTokens(
        advantage=torch.ones(4), in_loss=torch.ones(4, 100, dtype=torch.bool), behavior_logp=behavior,
        version=torch.tensor(version).unsqueeze(1).expand(4, 100), replica=torch.tensor([0, 0, 1, -1]),
    )  # fmt: skip
    return trustrl.PolicyTokens(logp=policy, version=3), rollout


def watch(on_stale="warn", **more):
    return ReplicaWatch(on_stale, warns=True, names=("a", "b"), **more)


def test_sums_are_those_of_each_replicas_fresh_tokens():
    policy, rollout = batch(b_gap=0.5, version=(3, 2, 3, 3))
    sums = watch().sums(policy, rollout).added
    assert sums["replica/tokens"].tolist() == [100, 100]
    torch.testing.assert_close(sums["replica/gap"], torch.tensor([2.0, 50.0]).double(), atol=1e-5, rtol=0)


def test_the_setting_decides_between_a_warning_an_error_and_a_metric_alone():
    policy, rollout = batch(b_gap=0.5)
    with pytest.warns(
        TrustRLWarning,
        match=r"Replica b stands out at step 7.*0\.5 nats at 100 tokens, where the other replicas suggest 0\.02",
    ):
        found = watch().check(watch().sums(policy, rollout), 7)
    assert found[STALE] == 1
    assert found[LARGEST] == pytest.approx(0.5)
    stop = watch("raise", setting="policy_loss.on_stale_replica")
    with pytest.raises(EngineError, match=r"Replica b.*Set policy_loss\.on_stale_replica='warn' to train on"):
        stop.check(stop.sums(policy, rollout), 7)
    assert watch("ignore").check(watch().sums(policy, rollout), 7)[STALE] == 1
    with pytest.raises(ConfigError, match="on_stale_replica must be"):
        watch("stop")


def test_later_steps_do_not_repeat_a_warning(recwarn):
    seen = watch()
    for step, gap in enumerate((0.5, 0.5, 0.02, 0.5)):
        seen.check(seen.sums(*batch(b_gap=gap)), step)
    assert [str(one.message).split(":")[0] for one in recwarn] == [
        "Replica b stands out at step 0", "Replica b stands out at step 3",
    ]  # fmt: skip


def test_nothing_is_compared_without_replicas_or_without_the_samplers_log_probs():
    policy, rollout = batch(b_gap=0.5)
    empty = ReplicaWatch("warn", warns=True)
    assert empty.check(empty.sums(policy, rollout), 1) == {}
