"""Comparisons: bookkeeping of the grid, its statistics, its pictures."""

import json
import math
import sys

import pytest

from support.recipes import small
from trustrl import preset
from trustrl.errors import ConfigError, MissingDataError, UnknownNameError
from trustrl.runner.comparison import markdown, spread, t_975, table
from trustrl.runner.directory import RunDirectory
from trustrl.runner.figures import draw, draw_run, shares_by_probability
from trustrl.runner.grid import cells, chosen, prepare, run_all
from trustrl.runner.recipe import load_arms

FAKE_RUN = """
import json, pathlib, sys
folder, region, seed = pathlib.Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
folder.mkdir(parents=True, exist_ok=True)
(folder / "started").write_text(str(int((folder / "started").read_text()) + 1) if (folder / "started").exists() else "1")
if region == sys.argv[4] and seed == int(sys.argv[5]):
    sys.exit("broken on purpose")
top = .9 if region == "ppo" else .7
rows = [{"step": s, "reward": top * s / 20 + .01 * seed, "loss": None if seed == 1 else 0.,
         "trustrl/masked_share": .1} for s in range(1, 21)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in rows))
(folder / "result.json").write_text(json.dumps({
    "accuracy_before": .3, "accuracy_after": top + .01 * seed, "collapsed": "by another rule"}))
seen = [{"step": 0, "accuracy": .3, "count": 500}, {"step": 20, "accuracy": top + .01 * seed, "count": 500}]
(folder / "evaluation.jsonl").write_text("".join(json.dumps(row) + "\\n" for row in seen))
"""


def fake_command(breaks=("none", 0)):
    """Not a run: a process that writes what one would write."""
    return lambda cell: [
        sys.executable, "-c", FAKE_RUN, str(cell.folder), cell.region, str(cell.seed), breaks[0], str(breaks[1]),
    ]  # fmt: skip


def compared(out, seeds=3, breaks=("none", 0), workers=2):
    found = prepare(small(), chosen(["ppo", "troll"], {}), seeds, out)
    said = []
    failures = run_all(found, workers, said.append, command=fake_command(breaks))
    return found, failures, said


def test_the_last_words_of_a_run_are_read_from_a_log_of_any_size(tmp_path):
    grid = prepare(small(), chosen(["ppo"], {}), 1, tmp_path)
    log = grid[0].folder.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as opened:
        opened.truncate(2_000_000_000)  # takes no room on the disk
    failures = run_all(grid, 1, lambda _: None, command=fake_command(("ppo", 0)))
    assert failures[0].said.endswith("broken on purpose")


def test_the_grid_has_every_region_with_every_seed(tmp_path):
    found = cells(small("schedule.seed=5"), chosen(["ppo", "troll"], {}), 3, tmp_path)
    assert [(cell.region, cell.seed) for cell in found] == [
        ("ppo", 5), ("troll", 5), ("ppo", 6), ("troll", 6), ("ppo", 7), ("troll", 7),
    ]  # fmt: skip
    assert all(cell.recipe.region.kind == cell.region for cell in found)
    assert [cell.recipe.schedule.seed for cell in found] == [5, 5, 6, 6, 7, 7]
    assert len({cell.folder for cell in found}) == 6


@pytest.mark.parametrize(
    ("regions", "error"),
    [(["ppo", "ppo"], ConfigError), ([], ConfigError), (["pppo"], UnknownNameError)],
    ids=["twice", "none", "unknown"],
)
def test_wrong_regions_are_refused(regions, error):
    with pytest.raises(error):
        chosen(regions, {})


ARMS = """
[ppo]
preset = "ppo"
ratio.max_increase = 0.5

[troll-mu]
preset = "troll"
anchor = "behavior"
"""


def test_arms_are_regions_of_their_own_and_win_over_presets_of_their_name(tmp_path):
    (tmp_path / "arms.toml").write_text(ARMS)
    arms = load_arms(tmp_path / "arms.toml")
    assert arms["ppo"].ratio.max_increase == 0.5
    assert arms["troll-mu"].anchor == "behavior"
    assert list(chosen([], arms)) == ["ppo", "troll-mu"]
    some = chosen(["cispo", "ppo"], arms)
    assert some == {"cispo": preset("cispo"), "ppo": arms["ppo"]}
    found = cells(small(), some, 1, tmp_path)
    assert [cell.recipe.region for cell in found] == list(some.values())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[ppo]\npreset = 'ppo'\nratoi = 1", "ratoi"),
        ("['../x']\npreset = 'ppo'", "It names a directory"),
        ("[ppo]", "ppo must have a preset or a kind"),
        ("ppo = 3", "ppo must be a table"),
        ("[ppo", "must be TOML"),
    ],
    ids=["unknown key", "a path", "empty", "no table", "not TOML"],
)
def test_wrong_arms_are_refused(tmp_path, text, said):
    (tmp_path / "arms.toml").write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_arms(tmp_path / "arms.toml")


def test_a_region_whose_name_is_a_path_is_not_compared(tmp_path):
    with pytest.raises(ConfigError, match="A region's name must be one name without '/'"):
        cells(small(), {"../x": preset("ppo")}, 1, tmp_path / "out")


def test_fake_runs_that_finished_are_skipped_and_the_failed_one_is_run_again(tmp_path):
    found, failures, said = compared(tmp_path, breaks=("ppo", 1))
    assert [(one.region, one.seed, one.code) for one in failures] == [("ppo", 1, 1)]
    assert "broken on purpose" in failures[0].said
    assert any("failed" in line for line in said)
    _, failures, said = compared(tmp_path)
    assert not failures
    assert said[0] == "6 runs, 5 of them already finished"
    starts = {(cell.region, cell.seed): (cell.folder / "started").read_text() for cell in found}
    assert starts.pop(("ppo", 1)) == "2"
    assert set(starts.values()) == {"1"}


def test_a_folder_with_fake_runs_of_another_recipe_is_refused(tmp_path):
    compared(tmp_path, seeds=1)
    with pytest.raises(ConfigError, match=r"optimiser\.learning_rate changed"):
        prepare(small("optimiser.learning_rate=0.5"), chosen(["ppo"], {}), 1, tmp_path)


def test_the_table_counts_failures_and_does_not_hide_them(tmp_path):
    found, failures, _ = compared(tmp_path, breaks=("ppo", 2))
    made = table(found, failures, threshold=0.5)
    ppo = made["regions"]["ppo"]
    assert (ppo["runs"], ppo["finished"], ppo["failed"]) == (3, 2, 1)
    assert ppo["accuracy_after"]["mean"] == pytest.approx(0.905)
    assert ppo["collapse_rate"] == 0.5
    assert made["regions"]["troll"]["collapse_rate"] == pytest.approx(1 / 3)
    text = markdown(made)
    assert "2 of 3, 1 failed" in text
    assert "broken on purpose" in text
    assert "Student's t" in text
    assert "collapsed if" in text


def test_steps_to_the_threshold_and_how_many_reached_it(tmp_path):
    found, failures, _ = compared(tmp_path)
    made = table(found, failures, threshold=0.8)["regions"]
    assert (made["ppo"]["reached_threshold"], made["troll"]["reached_threshold"]) == (3, 0)
    assert made["ppo"]["steps_to_threshold"]["mean"] == pytest.approx((19 + 19 + 18) / 3, abs=0.7)
    assert made["troll"]["steps_to_threshold"]["mean"] is None


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 30, 31, 40, 200])
def test_the_quantile_of_student_s_t(freedom):
    scipy = pytest.importorskip("scipy.stats")
    assert t_975(freedom) == pytest.approx(scipy.t.ppf(0.975, freedom), abs=1e-4)


def test_the_interval_is_the_textbook_s():
    scipy = pytest.importorskip("scipy.stats")
    values = [0.2, 0.5, 0.9, 0.4]
    found = spread(values)
    low, high = scipy.t.interval(0.95, 3, loc=scipy.tmean(values), scale=scipy.tsem(values))
    assert (found["low"], found["high"]) == (pytest.approx(low, abs=1e-4), pytest.approx(high, abs=1e-4))
    assert spread([0.5]) == {"mean": 0.5, "sd": None, "low": None, "high": None, "n": 1}
    assert spread([])["mean"] is None


def test_pictures_are_drawn_from_the_table_alone(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    found, failures, _ = compared(tmp_path / "runs", breaks=("troll", 0))
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "table.json").write_text(json.dumps(table(found, failures, threshold=0.5)))
    for file in draw(alone):
        pixels = image.imread(file)
        assert min(pixels.shape[:2]) > 200
        assert not math.isclose(float(pixels.std()), 0.0), "an empty picture"


def test_a_folder_without_a_table_is_refused(tmp_path):
    with pytest.raises(MissingDataError, match=r"table\.json"):
        draw(tmp_path)


def test_a_run_is_drawn_with_its_bins_in_order_and_without_what_was_not_measured(tmp_path):
    image = pytest.importorskip("matplotlib.image")
    run = RunDirectory(tmp_path)
    with pytest.raises(MissingDataError, match="metrics of at least one step"):
        draw_run(run)
    bins = {f"trustrl/masked_share_probability_{name}": 0.2 for name in ("from_0.99", "below_0.0001", "from_0.1")}
    for step in range(1, 5):
        run.append("metrics", {"step": step, "reward": None if step == 2 else 0.1 * step, **(bins if step > 1 else {})})
    run.append("evaluation", {"step": 0, "accuracy": 0.3})
    pixels = image.imread(draw_run(run))
    assert min(pixels.shape[:2]) > 200
    assert not math.isclose(float(pixels.std()), 0.0), "an empty picture"
    found = shares_by_probability(run.rows())
    assert list(found)[::7] == ["0 – 0.0001", "0.99 – 1"]
    known = {label: share for label, share in found.items() if share is not None}
    assert known == pytest.approx({"0 – 0.0001": 0.2, "0.1 – 0.5": 0.2, "0.99 – 1": 0.2})
