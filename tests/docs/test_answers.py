"""README, engines' pages, recipes, guides, bands and the plan have the regions and values that the project recommends."""

import json
import re
from pathlib import Path

import pytest

import trustrl
from trustrl.core.metrics import METRICS
from trustrl.engines.catalogue import ENGINES
from trustrl.regions.recommended import MASKED_SHARE, SAMPLED_TOKEN, TOP_K, recommended
from trustrl.runner.plan import plan, text
from trustrl.runner.recipe import load
from trustrl.runner.region_costs import COMPARED
from trustrl.runs.run import RunSettings
from trustrl.tools.report.charts import band_of

ROOT = Path(__file__).parents[2]
GUIDES = ("your-own-trainer", "your-own-data", "record")
PAGES = [
    ROOT / "README.md", ROOT / "docs/index.md", *(ROOT / f"docs/guides/{name}.md" for name in GUIDES),
    *sorted(page for page in (ROOT / "docs/engines").glob("*.md") if not page.stem.endswith("-results")),
]  # fmt: skip
RECIPES = sorted(file for file in (ROOT / "recipes").glob("*.toml") if not file.stem.startswith(("dppo-", "troll-")))
OTHERS = {"verl-tour": "troll", "qwen3-128gpu": "troll"}
"""Recipes that show another region, TROLL."""

REGION = trustrl.preset(TOP_K)
VALUES = {"max_increase": REGION.divergence.max_increase, "max_ratio": REGION.max_ratio}


def snippets(page):
    """Fenced code that is not output, and rows of tables with a trainer's command or setting."""
    fenced = re.findall(r"^```(\w*)[^\n]*\n(.*?)^```$", page, re.S | re.M)
    code = [one for language, one in fenced if language != "text"]
    return [one for one in [*code, *re.findall(r"^\| \[(?!DPPO).+`.*$", page, re.M)] if re.search(r"DPPO\(|dppo-", one)]


def differences(page):
    """DPPO's presets and values of a page's snippets that differ from the recommended ones."""
    other = []
    for snippet in snippets(page):
        stated = {key: re.findall(rf'{key}"?[=:] ?([\d.]+)', snippet) for key in VALUES}
        other += [f"{key}={x}" for key, xs in stated.items() for x in xs if float(x.rstrip(".")) != VALUES[key]]
        if not all(stated.values()):  # a snippet may state the recommended values on another preset
            names = re.findall(r"dppo-(?:binary|topk)-(?:tv|kl)[\w-]*", snippet)
            other += [name for name in names if name not in (SAMPLED_TOKEN, TOP_K)]
    return other


def test_both_presets_have_the_same_values_and_read_what_their_names_say():
    sampled = trustrl.preset(SAMPLED_TOKEN)
    assert (sampled.divergence.bounds, sampled.max_ratio) == (REGION.divergence.bounds, REGION.max_ratio)
    assert recommended(sampled.needs()) == SAMPLED_TOKEN
    assert recommended(REGION.needs()) == TOP_K


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_s_snippets_have_the_recommended_region(page):
    assert differences(page.read_text()) == []


@pytest.mark.parametrize("page", [page for page in PAGES if "-capped" in page.read_text()], ids=lambda page: page.stem)
def test_a_planted_preset_is_found(page):
    planted = re.sub(r"(dppo-(?:binary|topk)-tv)-capped", r"\1-scaling", page.read_text())
    assert any(name.endswith("-scaling") for name in differences(planted))


def test_a_planted_value_is_found():
    readme = PAGES[0].read_text()
    assert differences(readme.replace("max_ratio=2.0", "max_ratio=3.0")) == ["max_ratio=3.0"]
    assert differences(readme.replace("max_increase=0.3", "max_increase=0.15")) == ["max_increase=0.15"]


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_a_recipe_of_ours_has_the_recommended_region(file):
    recipe = load(file)
    expected = OTHERS.get(file.stem) or recommended(recipe.region.needs())
    assert recipe.region == trustrl.preset(expected)


def test_the_plan_and_the_engines_name_the_recommended_region():
    assert list(COMPARED)[:2] == [SAMPLED_TOKEN, TOP_K]
    line = f"{SAMPLED_TOKEN}, a bound of {VALUES['max_increase']:g} and weights of at most {VALUES['max_ratio']:g}"
    assert line in text(plan(load("tour", ["region.preset=ppo"])))
    assert "Recommended" not in text(plan(load("tour", [f"region.preset={SAMPLED_TOKEN}"])))
    assert [name for one in ENGINES for name in differences(f"```\n{one.start}\n```")] == []


def test_the_table_of_thresholds_has_the_recommended_values():
    rows = (ROOT / "docs/guides/choosing-delta.md").read_text().split("\n")
    ours = [re.findall(r"ours: ([\d.]+)", row) for row in rows if "choosing-a-region.md" in row and row.startswith("|")]
    assert ours == [[f"{VALUES['max_increase']:g}"], [f"{VALUES['max_ratio']:g}"]]


def test_the_healthy_band_holds_what_the_recommended_regions_masked():
    runs = [json.loads(line) for line in (ROOT / "docs/results/data/evidence2-cap.jsonl").open()]
    for arm in (SAMPLED_TOKEN, TOP_K):
        shares = [run["masked_last"] for run in runs if run["name"] == arm]
        assert len(shares) == 40
        assert sum(shares) / 40 < MASKED_SHARE[16]
    healthy = next(metric.healthy for metric in METRICS if metric.name == "masked_share")
    stated = dict(zip((4, 16), [int(x) / 100 for x in re.findall(r"below (\d+)%", healthy)], strict=True))
    assert stated == MASKED_SHARE
    assert {n: band_of("masked_share", RunSettings(updates_per_batch=n)).high for n in MASKED_SHARE} == MASKED_SHARE
