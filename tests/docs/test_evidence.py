"""What the results pages claim, computed again from the committed data."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("matplotlib")
scipy = pytest.importorskip("scipy")

from trustrl.cli import main
from trustrl.runner import recipe_files
from trustrl.runner.directory import RunDirectory
from trustrl.runner.recipe import load, load_arms
from trustrl.runner.trl_arguments import grpo_fields
from trustrl.tools.explain.step_rules import KL_OF_A_BATCH

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def _evidence():
    """Imports the scripts and reads their data for the first test: both take seconds, which collecting should not."""
    global RUNS, answers, findings, holm, smollm2_clipping
    sys.path[:0] = [str(ROOT / "studies" / name) for name in ("01-which-region-wins", "03-which-tokens-masked")]
    import answers
    import findings
    import smollm2_clipping
    from holm import holm

    RUNS = [(*key, seed, run) for key, seeds in findings.runs().items() for seed, run in seeds.items()]


def test_holm_adjusts_as_computed_by_hand():
    # sorted: .005 × 4 = .02, .01 × 3 = .03, .03 × 2 = .06, and .04 × 1 is raised to the .06 before it
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


def test_the_p_value_is_that_of_the_paired_t_test():
    first, second = [0.2, 0.5, 0.9, 0.4, 0.3], [0.1, 0.6, 0.5, 0.2, 0.2]
    differences = [a - b for a, b in zip(first, second, strict=True)]
    assert findings.p_value(differences) == pytest.approx(scipy.stats.ttest_rel(first, second).pvalue)
    assert findings.p_value([0.0, 0.0]) == 1.0
    assert findings.p_value([0.5, 0.5]) == 0.0


def test_a_verdict_follows_the_adjusted_p_and_not_the_interval():
    found = findings.Difference(mean=0.05, low=0.02, high=0.08, seeds=5, p=0.014, holm=0.12)
    assert found.sign == 0
    assert "**undecided**" in answers.judged({("both", "a", "b"): found}, "both", "a", "b")
    found = findings.Difference(mean=-0.05, low=-0.08, high=-0.02, seeds=5, p=0.001, holm=0.01)
    assert "**no, the other way round**" in answers.judged({("both", "a", "b"): found}, "both", "a", "b")


def test_of_63_differences_12_are_below_5_percent_alone_3_within_their_question_and_1_over_all():
    said = answers.many()
    for words in ("have 63 different", "12 have p < 0.05", "leaves 3:", "Over all questions at once it leaves 1."):
        assert words in said


def test_no_verdict_puts_troll_ahead_of_dppo():
    found = findings.family(*answers.FAMILIES["e"])
    assert len(found) == 9
    assert {one.sign for one in found.values()} == {0}


def test_dppo_has_the_lower_mean_reward_in_every_setting_with_sixteen_updates():
    assert "is negative in 5 of 5 settings" in answers.slower("dppo-binary-tv", "ppo")


def test_a_rollout_s_reward_is_the_same_in_each_row_of_its_updates():
    for setting, arm, seed, _ in RUNS:
        rows, updates = findings.steps()[setting, arm][seed], findings.updates_per_batch(setting)
        for at in range(0, len(rows), updates):
            assert len({row["reward"] for row in rows[at : at + updates]}) == 1
    assert {len(one) for one in findings.rewards_of_rollouts("stale", "ppo").values()} == {8}


def test_no_run_that_ended_above_its_start_is_called_collapsed_and_every_clear_fall_is():
    for _, _, _, run in RUNS:
        assert not (run["collapsed"] and run["accuracy_after"] >= run["accuracy_before"])
        assert run["collapsed"] or run["accuracy_after"] > run["accuracy_before"] - 0.07
    assert sum(run["collapsed"] for *_, run in RUNS) == 21
    dppo = [
        run["collapsed"] for setting, arm, _, run in RUNS if arm == "dppo-binary-tv" and setting in ("stale", "both")
    ]
    assert dppo == [False] * 10


def test_the_evaluations_of_the_recipes_have_the_count_the_rule_uses():
    for setting in ("stale", "mismatch", "both"):
        recipe = load(ROOT / f"recipes/evidence/{setting}.toml")
        assert recipe.evaluation.count == findings.EVALUATED
        assert recipe.schedule.updates_per_batch == findings.updates_per_batch(setting)


def made_again(path, setting, arm, seed):
    """A run's folder, from what was collected of it."""
    settings = [f"schedule.updates_per_batch={findings.updates_per_batch(setting)}"]
    run = RunDirectory(path)
    run.begin(load(ROOT / f"recipes/evidence/{setting}.toml", settings), resume=False)
    for row in findings.steps()[setting, arm][seed]:
        run.append("metrics", {name: value for name, value in row.items() if isinstance(value, (int, float))})
    for row in findings.evaluations(findings.runs()[setting, arm][seed]):
        run.append("evaluation", row)
    return path


@pytest.mark.parametrize(
    ("setting", "arm", "first"),
    [("stale", "ipo", "1. too many updates per batch (cause, confidence"), ("mismatch", "ppo", "nothing found")],
)
def test_explain_names_the_cause_of_a_collected_collapse_and_none_of_a_healthy_run(
    tmp_path, capsys, setting, arm, first
):
    code = main(["explain", str(made_again(tmp_path / "run", setting, arm, 0))])
    assert code == (first != "nothing found")
    assert capsys.readouterr().out.startswith(first)


def test_a_dppo_run_with_one_bad_rollout_at_its_end_is_not_called_collapsed_by_the_report(tmp_path, capsys):
    assert main(["report", str(made_again(tmp_path / "run", "both", "dppo-binary-tv", 3))]) == 0
    assert "COLLAPSED" not in capsys.readouterr().out


def test_the_guide_of_explain_counts_the_runs_that_moved_far_and_did_not_collapse():
    moved = []
    for setting, arm, seed, run in RUNS:
        rows, last = findings.steps()[setting, arm][seed], findings.updates_per_batch(setting) - 1
        at = {
            update: [r["trustrl/kl_k3"] for r in rows if (r["step"] - 1) % (last + 1) == update] for update in (0, last)
        }
        if not run["collapsed"]:
            moved.append(median(at[last]) - median(at[0]) > KL_OF_A_BATCH)
    said = f"Of {len(moved)} runs that did not collapse, {sum(moved)} moved more than 0.05 nats"
    assert said in (ROOT / "docs/guides/explain.md").read_text()


@pytest.mark.parametrize(
    ("arm", "corrected"),
    [("dppo-binary-tv", False), ("dppo-binary-tv-proximal", True), ("troll-behavior", False), ("troll", True)],
)
def test_the_runs_on_anchors_had_trl_s_default_correction_where_the_anchor_is_the_trainer_s(tmp_path, arm, corrected):
    arms = tomllib.loads((ROOT / "recipes/evidence/arms.toml").read_text())
    (tmp_path / "arms.toml").write_text(recipe_files.dumps({arm: arms[arm]}))
    recipe = replace(load(ROOT / "recipes/evidence/both.toml"), region=load_arms(tmp_path / "arms.toml")[arm])
    fields = grpo_fields(recipe, "out")
    assert fields["vllm_importance_sampling_correction"] is corrected
    assert not {"vllm_importance_sampling_mode", "vllm_importance_sampling_clip_max"} & fields.keys()
