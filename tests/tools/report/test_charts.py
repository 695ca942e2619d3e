"""Lines over the steps: gaps, missing metrics, long runs, units that must not share an axis."""

import random

import pytest

from support.run_folders import run_folder, steps
from trustrl.runs.open_run import open_runs
from trustrl.runs.run import RunSettings
from trustrl.tools.report.charts import MAX_POINTS, band_of, charts, interval_means, thinned
from trustrl.tools.report.reported_runs import reported


def of(charts_, key):
    return next(chart for chart in charts_ if chart.key == key)


def lines(chart):
    return {line.run: line.points for line in chart.lines}


def test_a_number_that_was_not_finite_breaks_the_line_and_a_missing_one_does_not(tmp_path):
    rows = steps(5)
    rows[1]["grad_norm"] = None
    del rows[2]["grad_norm"]
    rows[3]["grad_norm"] = float("nan")  # we write null, others may write this
    found = charts(reported(open_runs([run_folder(tmp_path / "a", rows=rows)])))
    assert lines(of(found, "grad_norm"))[0] == [(1, 0.5), (2, None), (4, None), (5, 0.5)]


def test_runs_of_other_lengths_and_metrics_share_the_charts_they_have(tmp_path):
    short = [{"step": 1, "reward": 0.5}]
    runs = reported(
        open_runs([run_folder(tmp_path / "a", name="s-a"), run_folder(tmp_path / "b", name="s-b", rows=short)])
    )
    found = charts(runs)
    assert {run: len(points) for run, points in lines(of(found, "reward")).items()} == {0: 8, 1: 1}
    assert list(lines(of(found, "entropy"))) == [0]


def test_a_run_that_logs_once_a_batch_keeps_its_own_steps(tmp_path):
    found = charts(reported(open_runs([run_folder(tmp_path / "a", rows=steps(64, every=16))])))
    assert [step for step, _ in lines(of(found, "reward"))[0]] == [16, 32, 48, 64]


def test_the_reward_of_a_rollout_is_one_point_however_many_updates_were_made_on_it(tmp_path):
    rows = [row | {"reward": (row["step"] - 1) // 16 / 10} for row in steps(128)]
    found = charts(reported(open_runs([run_folder(tmp_path / "a", rows=rows, updates=16)])))
    assert lines(of(found, "reward"))[0] == [(1 + 16 * at, at / 10) for at in range(8)]
    assert len(lines(of(found, "kl_k3"))[0]) == 128


def test_stopped_and_projected_tokens_are_one_share(tmp_path):
    rows = steps(2, **{"trustrl/projected_share": 0.2})
    found = charts(reported(open_runs([run_folder(tmp_path / "a", rows=rows)])))
    assert lines(of(found, "acted"))[0] == [(1, pytest.approx(0.21)), (2, pytest.approx(0.21))]


def test_divergences_in_other_units_are_in_other_charts(tmp_path):
    names = ("ppo", "dppo-binary-tv", "dppo-topk-tv", "dppo-binary-kl", "cispo")
    found = charts(reported(open_runs([run_folder(tmp_path / name, name=f"s-{name}", region=name) for name in names])))
    where = {chart.key: list(lines(chart)) for chart in found if chart.key.startswith("divergence_mean")}
    assert where == {"divergence_mean-ratio": [0], "divergence_mean-probability": [1, 2], "divergence_mean-nats": [3]}
    assert of(found, "divergence_mean-probability").bound == 0.15
    assert of(found, "divergence_mean-ratio").bound is None  # two bounds, .28 and .2


def test_no_metrics_no_charts(tmp_path):
    assert charts(reported(open_runs([run_folder(tmp_path / "a", rows=[], evaluations=(), finished=False)]))) == []


def test_a_long_line_keeps_its_extremes_and_its_gaps():
    draw = random.Random(0)
    points = [(step, draw.random()) for step in range(50_000)]
    points[12_345] = (12_345, 100.0)
    points[33_333] = (33_333, None)
    kept = thinned(points)
    assert len(kept) <= MAX_POINTS
    assert (12_345, 100.0) in kept
    assert (33_333, None) in kept
    assert min(value for _, value in kept if value is not None) == min(
        value for _, value in points if value is not None
    )
    assert [step for step, _ in kept] == sorted({step for step, _ in kept})


def test_only_a_line_that_was_thinned_has_the_means_of_its_intervals():
    points = [(step, float(step % 2)) for step in range(2 * MAX_POINTS)]
    assert interval_means(points[:MAX_POINTS]) == []
    means = interval_means(points)
    assert len(means) <= MAX_POINTS
    assert all(0.3 < value < 0.7 for _, value in means)
    assert {value for _, value in thinned(points)} == {0.0, 1.0}


def test_every_known_chart_has_an_explanation_and_every_band_the_words_it_comes_from(tmp_path):
    found = charts(reported(open_runs([run_folder(tmp_path / "a")])))
    assert [chart.key for chart in found if chart.explanation is None] == []
    assert of(found, "kl_k3").band.high == 0.01
    assert of(found, "kl_k3").band.source == "below 0.01"
    assert of(found, "entropy").band is None


@pytest.mark.parametrize(
    ("sampler", "trainer", "high"),
    [("bfloat16", "float32", 4e-2), ("float32", "float32", 1e-5), (None, None, None), ("int8", "float32", None)],
)
def test_the_band_of_the_mismatch_follows_the_dtypes(sampler, trainer, high):
    band = band_of("mismatch_abs_mean", RunSettings(sampler_dtype=sampler, trainer_dtype=trainer))
    assert (band and band.high) == high


def test_metrics_that_the_report_does_not_know_get_folded_charts(tmp_path):
    rows = [{"step": 1, "reward": 0.5, "perf/throughput": 3.0, "loss": 0.1}, {"step": 2, "perf/throughput": None}]
    found = charts(reported(open_runs([run_folder(tmp_path / "a", rows=rows, evaluations=())])))
    assert [(chart.title, chart.other) for chart in found] == [
        ("Reward", False),
        ("loss", True),
        ("perf/throughput", True),
    ]
    assert lines(found[-1])[0] == [(1, 3.0), (2, None)]
