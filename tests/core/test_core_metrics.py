"""The metrics that engines log by default, and the undecided share, which only Top-K TV reports."""

import re
from pathlib import Path

import pytest
import torch

import trustrl
from support.worlds import run, world
from trustrl import regions
from trustrl.config.statistics import TopKTV
from trustrl.core.metrics import CORE, FAULTS, METRICS, chosen
from trustrl.errors import ConfigError

TOOLS = Path(trustrl.__file__).parent / "tools"


def bare(found):
    return {name.removeprefix("trustrl/") for name in found}


def rates(region, metrics="all", *, faulty=False):
    """The metrics of one batch whose records hold everything that a region may read."""
    w = world(1)
    rollout = w.rollout(region.needs().anchor, k=region.needs().topk or 8)
    policy = w.policy_tokens(rollout)
    logp = torch.where(torch.arange(policy.logp.numel()).reshape(policy.logp.shape) == 0, torch.nan, policy.logp)
    policy = trustrl.PolicyTokens(
        logp=logp if faulty else policy.logp, topk_logp=policy.topk_logp, full_logp=policy.full_logp,
        entropy=policy.entropy,
    )  # fmt: skip
    out = trustrl.policy_loss(policy, rollout, region, reduction=trustrl.TokenSum())
    return trustrl.rates(out.sums, metrics)


EIGHT = {
    "masked_share", "kl_k3", "divergence_mean", "divergence_p99", "entropy", "mismatch_abs_mean", "mismatch_ratio_mean",
    "dropped_share",
}  # fmt: skip


def test_a_usual_run_logs_eight_of_about_sixty():
    every, core = (rates(trustrl.preset("dppo-binary-tv"), metrics) for metrics in ("all", "core"))
    assert bare(core) == EIGHT
    assert core.items() <= every.items()
    assert len(every) > 50


@pytest.mark.parametrize(
    ("region", "more"),
    [
        pytest.param(regions.TROLL(k=16), "projected_share", id="a projection"),
        pytest.param(trustrl.preset("dppo-topk-tv"), "undecided_share", id="an interval that k narrows"),
    ],
)
def test_a_metric_of_one_kind_of_region_joins_them(region, more):
    assert more in bare(rates(region, "core"))
    assert more not in EIGHT


def test_staleness_is_logged_if_the_sampler_reports_versions():
    w = world(1)
    rollout = w.rollout(version=torch.zeros(w.in_loss.shape, dtype=torch.long))
    policy = trustrl.PolicyTokens(logp=w.at_token(w.policy), version=3)
    out = trustrl.policy_loss(policy, rollout, trustrl.preset("ppo"), reduction=trustrl.TokenSum())
    assert trustrl.rates(out.sums, "core")["trustrl/staleness_mean"] == 3


def test_a_fault_is_counted_in_the_log_only_if_it_occurred():
    region = trustrl.preset("dppo-binary-tv")
    assert not [name for name in rates(region, "core") if "fault" in name]
    broken = rates(region, "core", faulty=True)
    assert broken["trustrl/fault_policy"] == 1
    assert broken["trustrl/dropped_share"] > 0
    assert [name for name in broken if "fault" in name] == ["trustrl/fault_policy"]


def test_a_regions_own_values_are_always_logged():
    found = {"trustrl/band_rise": 0.5, "trustrl/kl_k2": 0.1, "trustrl/kl_k3": 0.1}
    assert chosen(found, "core") == {"trustrl/band_rise": 0.5, "trustrl/kl_k3": 0.1}
    assert chosen(found, "all") == found


def test_another_choice_is_refused():
    with pytest.raises(ConfigError, match="metrics must be one of 'core', 'all', got 'some'"):
        rates(trustrl.preset("ppo"), "some")


def test_the_core_is_part_of_the_dictionary():
    assert set(CORE) < {metric.name for metric in METRICS}
    assert len(set(CORE)) == len(CORE)


def test_explain_and_report_read_core_metrics_only():
    """Otherwise they would find nothing in a run that logs by default."""
    files = [file for tool in ("explain", "report") for file in (TOOLS / tool).glob("*.py")]
    read = {name for file in files for name in re.findall(r"trustrl/([a-z_0-9]+)", file.read_text())}
    assert {"kl_k3", "masked_share", "fault_policy"} <= read
    of_replicas = {"stale_replicas", "replica_gap_max"}  # engines log them whatever the choice of metrics
    assert read - {f"fault_{fault}" for fault in FAULTS} <= {
        *CORE,
        *of_replicas,
        "kl_k1",
    }  # kl_k1 is read from verl's own metric, which verl always logs


@pytest.mark.parametrize("name", trustrl.presets())
def test_only_intervals_that_a_larger_k_narrows_have_an_undecided_share(name):
    """TV on more ids is known more exactly. A KL has no upper end at any K, and a binary one reads no further ids."""
    region = trustrl.preset(name)
    statistic = getattr(region, "divergence", None) or getattr(region, "statistic", None)
    reported = "trustrl/undecided_share" in trustrl.rates(run(name, world(1))[0].sums)
    assert reported == isinstance(statistic, TopKTV)


def test_a_larger_k_decides_more_tokens():
    w = world(1, drift=0.1, peak=4.0)
    shares = []
    for k in (1, 8, 32):
        rollout = w.rollout(k=k)
        out = trustrl.policy_loss(
            w.policy_tokens(rollout), rollout, regions.DPPO(regions.TopKTV(k=k, max_increase=0.15)),
            reduction=trustrl.TokenSum(),
        )  # fmt: skip
        shares.append(trustrl.rates(out.sums)["trustrl/undecided_share"])
    assert shares[0] > shares[1] > shares[2]
