"""verl's asynchronous trainers on Ray: each recorded token against the sampler's own log, and stale ratios that are seen.

The sampler draws slowly, so that weight updates find responses unfinished: verl aborts them, and the new weights
continue. `colocate_async` pauses one sampler while it trains. `separate_async` has a second sampler that does not pause,
and with one update per sync it is verl's one-step-off-policy mode.
"""

import json
from collections import defaultdict
from pathlib import Path

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

from support.verl_cpu_runs import ROLLOUT, SEPARATE, STEPS, logged_run, sequences_of
from trustrl.cli import main
from trustrl.engines.common.sampler_fields import TOPK_IDS, TOPK_LOGP
from trustrl.engines.common.seam import version_of
from trustrl.runner.directory import RunDirectory

COMMON = [
    "region.preset=dppo-topk-tv", "records.topk=true", f"{ROLLOUT}.max_num_seqs=8",
    "engine.settings.algorithm.rollout_correction.bypass_mode=true",
]  # fmt: skip
RUNS = {"colocate_async": [], "separate_async": SEPARATE}

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")


MARKS = {"colocate_async": (), "separate_async": (pytest.mark.long,)}
CASES = [pytest.param(mode, marks=[pytest.mark.xdist_group(mode), *MARKS[mode]]) for mode in RUNS]


@pytest.fixture(scope="module", params=CASES)
def run(request, tmp_path_factory):
    """The folder of a run, with the sampler's log next to it."""
    folder = tmp_path_factory.mktemp(request.param)
    server = Path(__file__).with_name("verl_logged_server.py")
    return logged_run(folder, request.param, [*COMMON, *RUNS[request.param]], server)


def said_by_the_sampler(run):
    with open(run.parent / "sampler.jsonl") as log:
        return [json.loads(line) for line in log]


def told_as(rows, log, prompt=None):
    """Whether answers in the log, each to the prompt and answers before it, say exactly what was recorded."""
    if not rows:
        return True
    for one in log:
        size = len(one["tokens"])
        if not size or (prompt is not None and one["prompt"] != prompt):
            continue
        part = rows[:size]
        if (
            [row["token_id"] for row in part] == one["tokens"]
            and [row["behavior_logp"] for row in part] == one["logp"]
            and all(row["sampler_version"] == one["version"] + 1 for row in part)  # on-policy in the next step
            and [row["topk_ids"] for row in part] == one[TOPK_IDS]
            and [row["topk_logp"] for row in part] == one[TOPK_LOGP]
            and told_as(rows[size:], log, one["prompt"] + one["tokens"])
        ):
            return True
    return False


def test_every_recorded_token_is_what_the_sampler_said_at_the_version_it_had(run):
    log = [one for one in said_by_the_sampler(run) if TOPK_IDS in one]
    sequences = sequences_of(run)
    assert len(sequences) == STEPS * 32
    assert all(told_as(rows, log) for rows in sequences)
    damaged = [dict(row) for row in sequences[0]]
    damaged[-1]["sampler_version"] += 1
    assert not told_as(damaged, log)


def test_a_response_continued_after_a_weight_update_has_the_version_of_each_part(run):
    versions = [[row["sampler_version"] for row in rows] for rows in sequences_of(run)]
    mixed = [one for one in versions if len(set(one)) > 1]
    assert mixed, "no weight update found an unfinished response"
    assert all(one == sorted(one) for one in mixed)
    assert any(one["stop"] == "aborted" and one["tokens"] for one in said_by_the_sampler(run))


def test_the_region_sees_the_ratio_of_stale_tokens_and_metrics_tell_their_age(run):
    rows = RunDirectory(run).rows()
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert rows[0]["trustrl/staleness_max"] == 0
    assert abs(rows[0]["trustrl/ratio_mean"] - 1) < 1e-4
    ages = defaultdict(list)
    for one in (row for rows in sequences_of(run) for row in rows):
        ages[one["step"]].append(one["step"] - one["sampler_version"])
    for row in rows:
        assert row["trustrl/staleness_mean"] == pytest.approx(sum(ages[row["step"]]) / len(ages[row["step"]]))
        assert row["trustrl/staleness_max"] == max(ages[row["step"]])
        if row["trustrl/staleness_max"] == 0:
            assert row["trustrl/gap_abs_mean"] < 1e-5
    oldest = max(rows, key=lambda row: row["trustrl/staleness_mean"])
    assert oldest["trustrl/staleness_mean"] > 0  # how many depends on the machine's speed
    assert oldest["trustrl/gap_abs_mean"] > 1e-4
    assert oldest["trustrl/kl_k3"] > 1e-4


def test_the_audit_counts_stale_tokens_by_age(run, capsys):
    assert main(["audit", str(run), "--json"]) == 0
    audited = json.loads(capsys.readouterr().out)
    counted = {one["bin"]: one["regions"]["recorded"]["tokens"] for one in audited["by"]["age"]["bins"]}
    signed = [row for rows in sequences_of(run) for row in rows if row["advantage"] != 0]
    fresh = sum(row["step"] == row["sampler_version"] for row in signed)
    assert counted["0"] == fresh
    assert sum(counted.values()) == len(signed) > fresh
