"""The table of the papers' experiments is made from the recipes and the committed figures of their rehearsals."""

import json
from pathlib import Path

import papers
import pytest

from trustrl.runner.recipe import load
from trustrl.runner.rehearsal import rehearsed

ROOT = Path(__file__).parents[2]
ROWS = json.loads(papers.DATA.read_text())
RECIPES = {file.stem for kind in ("dppo", "troll") for file in (ROOT / "recipes").glob(f"{kind}-*.toml")}
NAMES = [recipe for _, recipe, _ in papers.EXPERIMENTS]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))


def test_the_page_is_made_from_the_recipes_and_the_figures():
    text = papers.PAGE.read_text()
    assert papers.page(text, ROWS) == text


def test_every_recipe_and_every_file_of_arms_has_a_row():
    arms = {f"arms/{file.name}" for file in (ROOT / "recipes/arms").glob("*.toml")}
    assert RECIPES | arms == {name for name in NAMES if "`" not in name}


def test_what_the_page_calls_composed_is_composed_by_a_test():
    test = (ROOT / "tests/engines/verl/test_paper_recipes.py").read_text()
    experiments = test[test.index("EXPERIMENTS = {") : test.index("REGIONS = {")]
    assert all(f'    "{name}": {{' in experiments for name in RECIPES)
    arms = [name.removeprefix("arms/").removesuffix(".toml") for name in NAMES if name.startswith("arms/")]
    assert all(f'("{name}", ' in test for name in arms)


@pytest.mark.parametrize("row", ROWS.values(), ids=list(ROWS))
def test_a_rehearsal_trained(row):
    assert 0 < row["reward"] < 1
    assert max(row["grad_norm"]) > 1e-3
    assert row["records"] > 0
    assert row["updates"] == 2 * min(2, load(row["recipe"]).schedule.updates_per_batch)


def test_figures_of_a_recipe_that_has_changed_are_not_shown():
    plain = rehearsed(load("dppo-dense"), vllm=False)[0].to_dict()
    changed = {**plain, "optimiser": {**plain["optimiser"], "learning_rate": 2e-6}}
    row = {"digest": papers.digest(changed)}
    assert "not since its last change" in papers.table({"dppo-dense": row})
    assert papers.digest(plain) != papers.digest(changed)
