"""The pages about recipes: every key is listed, every command parses, every recipe exists."""

import json
import re
import shlex
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
import recipe_page

from trustrl.cli import main, parser_of
from trustrl.recording import Recording
from trustrl.regions.loading import config_to_dict
from trustrl.runner.evaluation_tables import EvaluationSet
from trustrl.runner.recipe import DATA_TABLES, RECORD_KEYS
from trustrl.runner.recipe_files import file_of
from trustrl.runner.recipe_tables import TABLES

ROOT = Path(__file__).parents[2]
GUIDE, REFERENCE = ROOT / "docs/guides/run.md", ROOT / "docs/reference/recipe.md"


def default(field):
    if field.default_factory is not MISSING:
        return "`{}`"
    if field.default is MISSING:
        return "–"
    return "none" if field.default is None else f"`{json.dumps(field.default)}`"  # a tuple is a list in TOML


def test_the_reference_lists_every_key_with_its_default():
    listed = dict(re.findall(r"^\| `([\w.]+)` \| (.+?) \|", REFERENCE.read_text(), re.M))
    tables = TABLES | DATA_TABLES | {"evaluation.sets": EvaluationSet}
    keys = {f"{name}.{field.name}": default(field) for name, table in tables.items() for field in fields(table)}
    recording = config_to_dict(Recording(folder="anywhere"))
    keys |= {f"records.{key}": f"`{json.dumps(recording[key])}`" for key in RECORD_KEYS}
    assert listed == {"name": "–", **keys}


def test_the_reference_is_written_from_the_docstrings():
    assert recipe_page.page() == REFERENCE.read_text(encoding="utf-8"), "Run `python scripts/recipe_page.py`."


COMMANDS = re.findall(r"^trustrl (.+?)(?: > .+)?$", GUIDE.read_text(), re.M)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_the_guide_parses_and_names_a_recipe_that_exists(command, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    verb, *rest = shlex.split(command)
    options = parser_of(verb).parse_intermixed_args(rest)
    if verb == "recipes":
        assert main([verb, options.name]) == 0
    elif options.recipe is not None:
        assert file_of(options.recipe).is_file()
        # What a plan accepts, a run of the same recipe and settings begins with.
        assert main(["plan", options.recipe, *options.settings]) == 0
    if verb == "plan":
        assert main([verb, *rest]) == 0


def test_the_guide_shows_the_plan_that_the_command_prints(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    (shown,) = re.findall(r"<!-- begin plan -->\n```text\n(.*?)\n```\n<!-- end plan -->", GUIDE.read_text(), re.S)
    assert main(["plan", "qwen3-moe-megatron"]) == 0
    printed = capsys.readouterr().out
    assert shown.startswith("Layout\n")
    assert shown == printed[printed.index("Layout\n") : printed.index("\nCommand\n")].rstrip("\n")
    (exact,) = re.findall(r"dppo-full-tv, proximal +\S+ KB +(\S+ GB)", shown)
    assert f"exact divergences need {exact} of records" in GUIDE.read_text()


def test_the_guide_lists_every_shipped_recipe():
    text = GUIDE.read_text() + (ROOT / "docs/guides/papers.md").read_text()
    for file in (ROOT / "recipes").glob("*.toml"):
        assert f"`{file.stem}`" in text, file.stem
