"""The evidence grid in miniature: `trustrl compare --arms` with the real TRL, two arms × two seeds, and one that fails."""

import json
import statistics

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

import torch

from support.trl_commands import run
from trustrl.recording import read
from trustrl.runner.directory import RunDirectory

pytestmark = pytest.mark.xdist_group("miniature grid")
UPDATES, SEEDS = 6, 2
SETTINGS = [
    f"schedule.steps={2 * UPDATES}", f"schedule.updates_per_batch={UPDATES}", f"schedule.checkpoint_every={UPDATES}",
    "evaluation.count=16", "optimiser.learning_rate=3e-3", "engine.settings.loss_type=dapo",
]  # fmt: skip
ARMS = """
[pg-is]
preset = "pg-is"

[tight]
preset = "dppo-binary-tv"

[tight.divergence]
max_increase = 0.01
max_decrease = 0.01

[too-wide]  # more ids than the model has, which only the run finds out
preset = "dppo-topk-tv"
k = 100_000
"""


@pytest.fixture(scope="module")
def grid(tmp_path_factory):
    """(folder, arguments, finished process) of the comparison."""
    folder = tmp_path_factory.mktemp("miniature")
    (folder / "arms.toml").write_text(ARMS)
    arguments = [*SETTINGS, "--arms", folder / "arms.toml", "--seeds", SEEDS, "--out", folder / "grid"]
    return folder / "grid", arguments, run("compare", *arguments)


def runs(folder, arm):
    return [RunDirectory(folder / arm / f"seed-{seed}") for seed in range(SEEDS)]


def test_every_arm_runs_with_every_seed_and_failures_are_counted(grid):
    folder, _, done = grid
    assert done.returncode == 1, done.stderr[-3000:]
    found = json.loads((folder / "table.json").read_text())
    assert [(one["region"], one["seed"], one["finished"]) for one in found["runs"]] == [
        ("pg-is", 0, True), ("tight", 0, True), ("too-wide", 0, False),
        ("pg-is", 1, True), ("tight", 1, True), ("too-wide", 1, False),
    ]  # fmt: skip
    counts = {name: (row["finished"], row["failed"]) for name, row in found["regions"].items()}
    assert counts == {"pg-is": (2, 0), "tight": (2, 0), "too-wide": (0, 2)}
    assert "top_k" in found["failures"][0]["said"]
    assert done.stdout == (folder / "table.md").read_text()
    assert "0 of 2, 2 failed" in done.stdout


def test_arms_of_one_seed_begin_with_the_same_batch_and_seeds_with_different_ones(grid):
    first = {arm: [read(one.path / "records") for one in runs(grid[0], arm)] for arm in ("pg-is", "tight")}
    tokens = {arm: [found["token_id"][found["step"] == 0] for found in each] for arm, each in first.items()}
    for seed in range(SEEDS):
        assert torch.equal(tokens["pg-is"][seed], tokens["tight"][seed])
    assert not torch.equal(*tokens["tight"])


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_tight_region_stops_tokens_and_moves_less_in_one_batch(grid, seed):
    """At this learning rate an unconstrained update moves further than one inside the region."""
    free, tight = (runs(grid[0], arm)[seed].rows()[:UPDATES] for arm in ("pg-is", "tight"))
    assert all(row["trustrl/masked_share"] == 0.0 for row in free)
    assert tight[0]["trustrl/masked_share"] == 0.0, "before the first update nothing has moved"
    assert statistics.fmean(row["trustrl/masked_share"] for row in tight) > 0.05
    assert tight[-1]["trustrl/gap_abs_mean"] < free[-1]["trustrl/gap_abs_mean"]


def test_a_second_comparison_of_the_finished_arms_trains_nothing(grid):
    _, arguments, _ = grid
    again = run("compare", *arguments, "--regions", "pg-is,tight")
    assert again.returncode == 0, again.stderr[-3000:]
    assert "4 runs, 4 of them already finished" in again.stderr


def test_an_arm_that_the_adapter_would_refuse_is_refused_before_anything_is_trained(tmp_path):
    (tmp_path / "arms.toml").write_text('[pg-is]\npreset = "pg-is"\n\n[per-sequence]\npreset = "gspo"\n')
    done = run("compare", *SETTINGS, "--arms", tmp_path / "arms.toml", "--seeds", 1, "--out", tmp_path / "grid")
    assert done.returncode == 2
    assert "loss_type must be 'grpo' with a region" in done.stderr
    assert not list((tmp_path / "grid").glob("*/seed-0/metrics.jsonl"))
