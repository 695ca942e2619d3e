"""Verdicts on the paper's figures, on runs and records with known answers."""

import json
import math

import pytest

pytest.importorskip("matplotlib")

from support import recorded
from trustrl.cli import main
from trustrl.errors import MissingDataError
from trustrl.runs.run import Run, RunSettings
from trustrl.tools import reproduce as tool
from trustrl.tools.reproduce import FEWEST_UPDATES, fresh_tokens, reproduce, spread

DPPO = {"kind": "dppo", "anchor": "behavior"}
PROXIMAL = {"kind": "dppo", "anchor": "proximal"}
NONE = {"kind": "pg-is"}


def run(region, *, falls=False, updates=FEWEST_UPDATES, masked=None, path="run"):
    """Returns a run whose reward rises to .9, and then falls to 0 if it `falls`."""
    rows = []
    for step in range(1, updates + 1):
        reward = 0.9 * step / updates
        if falls and step > updates / 2:
            reward = 0.01
        rows.append(
            {
                "step": step, "loss": 0.1, "reward": reward, "trustrl/mismatch_gap_abs_mean": 0.001,
                "entropy": 1.0, "trustrl/masked_probability_mean": masked,
            }
        )  # fmt: skip
    settings = RunSettings(region=region, updates_per_batch=1)
    return Run(path=path, name=path, source="test", settings=settings, rows=rows)


@pytest.mark.parametrize(
    ("figure", "runs", "verdict"),
    [
        ("dppo-3", [run(DPPO), run(NONE, falls=True)], "reproduced"),
        ("dppo-3", [run(DPPO, falls=True), run(NONE, falls=True)], "not reproduced"),
        ("dppo-3", [run(DPPO), run(NONE)], "too short to tell"),
        ("dppo-3", [run(DPPO, updates=100), run(NONE, falls=True)], "too short to tell"),
        ("dppo-3", [run(DPPO), run(NONE, falls=True, updates=100)], "reproduced"),
        ("dppo-3", [run({"kind": "ppo"}), run(NONE, falls=True)], "too short to tell"),
        ("dppo-4", [run(DPPO), run(PROXIMAL, falls=True)], "reproduced"),
        ("dppo-4", [run(DPPO), run(NONE, falls=True)], "too short to tell"),
        ("dppo-5", [run(DPPO), run(NONE, falls=True)], "reproduced"),
        ("dppo-6", [run(DPPO, masked=0.5), run({"kind": "ppo"}, masked=0.1)], "reproduced"),
        ("dppo-6", [run(DPPO, masked=0.1), run({"kind": "ppo"}, masked=0.5)], "not reproduced"),
        ("dppo-6", [run(DPPO, masked=0.1)], "too short to tell"),
        ("dppo-7", [run({"kind": "ppo"})], "no claim"),
    ],
)
def test_each_claim_has_its_verdict(figure, runs, verdict, tmp_path):
    labelled = [(f"run {index}", chosen) for index, chosen in enumerate(runs)]
    reproduction = reproduce(figure, labelled, tmp_path / "figure.png")
    assert reproduction.verdict == verdict, reproduction.evidence
    assert (tmp_path / "figure.png").stat().st_size > 5000


def test_a_run_whose_sampler_records_nothing_is_named(tmp_path):
    """A gap of exactly 0 is not measured, and is not evidence of a small one."""
    none, measured = run(DPPO), run(NONE)
    for row in none.rows:
        row["trustrl/mismatch_gap_abs_mean"] = 0.0
    evidence = reproduce("dppo-3", [("none", none), ("measured", measured)], tmp_path / "figure.png").evidence
    (sentence,) = (text for text in evidence if "trainer's own" in text)
    assert sentence.startswith("none: mean |π' − μ| is 0 at every step")
    assert "at first" not in evidence[0]
    assert "0.001 at first" in evidence[1]


def tokens(rare_noise, common_noise):
    """Returns log μ and log π' of 10,000 tokens, half at μ = .05 and half at .95."""
    sampler = [math.log(0.05), math.log(0.95)] * 5000
    return sampler, [mu + (rare_noise, common_noise)[index % 2] for index, mu in enumerate(sampler)]


def test_figure_2_asks_for_ratios_that_spread_where_probabilities_do_not():
    assert spread({"a": tokens(0.05, 0.004)}).verdict == "reproduced"
    assert spread({"a": tokens(0.05, 0.04)}).verdict == "not reproduced"
    assert spread({"a": tokens(0.9, 0.004)}).verdict == "not reproduced"
    assert spread({"a": tuple(values[:9000] for values in tokens(0.05, 0.004))}).verdict == "too short to tell"


def test_a_token_counts_once_for_all_updates(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    folder = recorded.record(tmp_path / "records")
    rows = [row for file in folder.glob("*.parquet") for row in parquet.read_table(file).to_pylist()]
    drawn = {(row["sequence"], row["position"]) for row in rows if row["proximal_logp"] is not None}
    assert 0 < len(drawn) < len(rows)
    chosen = Run(path="run", name="run", source="test", settings=RunSettings(), rows=[], records=(str(folder),))
    assert len(fresh_tokens(chosen)[0]) == len(drawn)
    with pytest.raises(MissingDataError, match="token records with log-probs of sampler and trainer"):
        fresh_tokens(Run(path="run", name="run", source="test", settings=RunSettings(), rows=[]))


def test_the_command_prints_claim_verdict_and_evidence(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("trustrl.runs.open_run.open_runs", lambda paths: [("dppo", run(DPPO)), ("none", run(NONE))])
    command = ["reproduce", "dppo", "none", "--figure", "dppo-3", "--out", str(tmp_path / "figure.png")]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert tool.FIGURES["dppo-3"].claim in said
    assert "verdict: too short to tell" in said
    assert f"none: did not collapse in {FEWEST_UPDATES} updates" in said
    assert main([*command, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["verdict"] == "too short to tell"
    monkeypatch.setattr("trustrl.runs.open_run.open_runs", lambda paths: [("dppo", run(DPPO, falls=True))])
    assert main(command) == 1
    assert main(["reproduce", "x", "--figure", "dppo-12", "--out", "x.png"]) == 2
