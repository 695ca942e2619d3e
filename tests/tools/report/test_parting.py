"""Where two runs part: settings, the prompts of each step, and each metric beyond the noise."""

import random
import re

import pytest

from support.explained_runs import run_of
from support.run_folders import run_folder, steps
from trustrl.cli import main
from trustrl.runs.open_run import open_runs
from trustrl.runs.run import Completion
from trustrl.tools.report.html_page import page
from trustrl.tools.report.page_data import page_data
from trustrl.tools.report.report_contents import gather, summary_of, text


def noisy(seed, gain=0.0, start=0):
    """Changes a run's entropy and KL: noise from a seed, and a slope from a step on."""
    draw = random.Random(seed)
    return lambda row: {
        "trustrl/entropy": 0.5 + draw.gauss(0, 0.02) - gain * max(0, row["step"] - start),
        "trustrl/kl_k3": 0.001 + abs(draw.gauss(0, 1e-4)),
    }


def compared(*runs):
    report = gather([(letter, run) for letter, run in zip("abc", runs, strict=False)], max_points=0, max_shown=0)
    return report, report.partings


def parted(*runs):
    _, (apart,) = compared(*runs)
    return {metric.key: metric.step for metric in apart.metrics}


def test_a_metric_parts_where_it_leaves_the_noise():
    first, other = (run_of(noisy(seed, gain, 60), updates=1, batches=120) for seed, gain in ((1, 0.0), (2, 0.01)))
    found = parted(first, other)
    assert {*found} == {"entropy"}
    assert 61 <= found["entropy"] <= 75


@pytest.mark.parametrize("seed", range(8))
def test_two_seeds_of_one_run_are_alike(seed):
    runs = [run_of(noisy(2 * seed + other), updates=4, batches=60) for other in (0, 1)]
    _, (apart,) = compared(*runs)
    assert apart.metrics == []
    assert {"Entropy", "KL to the anchor", "Reward"} <= {*apart.alike}


def test_a_single_odd_batch_is_no_parting():
    def odd(row):
        return {"grad_norm": 50.0} if row["step"] == 20 else {}

    assert parted(run_of(updates=1, batches=40), run_of(odd, updates=1, batches=40)) == {}


def test_runs_with_other_updates_per_batch_are_compared_by_batch():
    first = run_of(updates=1, batches=20)
    other = run_of(lambda row: {"reward": 0.3 + 0.5 * row["step"] / 80}, updates=4, batches=20)
    assert "reward" not in parted(first, other)


def test_too_short_runs_are_not_compared():
    _, (apart,) = compared(run_of(updates=1, batches=5), run_of(lambda row: {"loss": 9.0}, updates=1, batches=5))
    assert (apart.metrics, apart.alike) == ([], [])


def asked(order):
    made = [Completion(step=step, prompt=f"{prompt}?") for step in range(1, 9) for prompt in order(step)]
    return {"completions": lambda: iter(made)}


@pytest.mark.parametrize(
    ("order", "step"),
    [
        pytest.param(lambda step: (step, step + 1), None, id="the same"),
        pytest.param(lambda step: (step + 1, step), None, id="another order within the step"),
        pytest.param(lambda step: (step, step + 1 + (step > 4)), 5, id="others from a step on"),
        pytest.param(lambda step: (step, step, step + 1), 1, id="one prompt more often"),
    ],
)
def test_the_data_parts_at_the_first_step_with_other_prompts(order, step):
    _, (apart,) = compared(run_of(**asked(lambda step: (step, step + 1))), run_of(**asked(order)))
    assert (apart.data_step, apart.data_steps) == (step, 8)


def test_without_prompts_the_data_is_not_compared():
    _, (apart,) = compared(run_of(**asked(lambda step: (step,))), run_of())
    assert "not compared" in apart.data_words()


def test_settings_that_differ_are_listed():
    _, (apart,) = compared(run_of(), run_of(settings={"learning_rate": 3e-3, "loss": "grpo"}))
    assert {(x.name, x.first, x.other) for x in apart.settings} == {
        ("learning_rate", 1e-4, 3e-3), ("loss", None, "grpo"),
    }  # fmt: skip


def test_each_further_run_is_compared_with_the_first():
    _, partings = compared(run_of(), run_of(), run_of())
    assert [apart.run for apart in partings] == [1, 2]
    assert compared(run_of())[1] == []


def test_text_json_and_page_show_it(tmp_path, capsys):
    a = run_folder(tmp_path / "a", rows=steps(40))
    late = [row | ({"grad_norm": 5.0} if row["step"] > 20 else {}) for row in steps(40)]
    b = run_folder(tmp_path / "b", rows=late, region="ppo")
    assert main(["report", str(a), str(b)]) == 0
    out = capsys.readouterr().out
    assert " parts from " in out
    assert "settings: region.kind dppo → ppo\n" in out
    assert "Gradient norm from step 21 (0.5 → 5)" in out
    assert "Divergence" not in out.partition(" parts from ")[2]  # another statistic, in another unit
    report = gather(open_runs([a, b]))
    assert summary_of(report)["partings"][0]["metrics"][0]["step"] == 21
    marks = {chart["key"]: chart["marks"] for chart in page_data(report)["charts"] if chart["marks"]}
    assert marks == {"grad_norm": [{"step": 21, "run": 1, "text": "B parts"}]}
    html = page(report)
    assert re.search(r"<b>B</b> parts from <b>A</b>: Gradient norm from step 21; setting region.kind dppo → ppo<", html)
    assert html.index("parts from") < html.index('id="causes-0"')
    assert "parts from" not in text(gather(open_runs([a])), unicode=True)
