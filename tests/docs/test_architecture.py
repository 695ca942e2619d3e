"""The page about the architecture: its picture is what the imports say, its rules and files are there."""

import importlib.util
import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()


def load():
    spec = importlib.util.spec_from_file_location("architecture", ROOT / "scripts/architecture.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


architecture = load()


def test_the_picture_is_what_the_imports_say():
    assert architecture.draw() == architecture.PICTURE.read_text(encoding="utf-8"), (
        "The imports between packages have changed. If that is meant, run `python scripts/architecture.py`."
    )


def test_an_import_anywhere_in_a_file_counts(tmp_path):
    (tmp_path / "high").mkdir()
    (tmp_path / "high/inner.py").write_text("def call():\n    from trustrl.low.deep import thing\n")
    (tmp_path / "mid.py").write_text("from trustrl import high\nimport torch, trustrl.low.deep\n")
    (tmp_path / "low.py").write_text("import trustrl\nfrom trustrl import a_public_name\nfrom trustrl.low import x\n")
    (tmp_path / "__init__.py").write_text("from trustrl.mid import everything\n")
    assert architecture.imports(tmp_path) == {"high": {"low"}, "mid": {"high", "low"}, "low": set()}


def test_only_what_follows_from_other_imports_is_left_out():
    graph = {"a": {"b", "c", "d"}, "b": {"c"}, "c": set(), "d": set()}
    assert architecture.reduced(graph) == {"a": {"b", "d"}, "b": {"c"}, "c": set(), "d": set()}


def test_no_two_lines_run_on_top_of_each_other():
    order = [package for layer in architecture.layers() for package in layer]
    row = {package: at for at, package in enumerate(order)}
    placed = architecture.lanes(architecture.reduced(architecture.imports()), row)
    spans = [(lane.column, row[lane.importers[0]], row[lane.target]) for lane in placed]
    assert all(start < end for _, start, end in spans), "lines lead down"
    for one, (column, start, end) in enumerate(spans):
        for other, begins, ends in spans[one + 1 :]:
            assert column != other or end <= begins or ends <= start


def test_the_page_has_every_rule_in_its_own_words():
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    rules = PAGE.partition("## Import rules")[2]
    assert re.findall(r"^- \*\*(.+?)\.\*\*", rules, re.M)[: len(contracts)] == [one["name"] for one in contracts]


def test_every_file_the_page_names_is_there():
    named = re.findall(r"`((?:src|tests|scripts|environments)/[\w./]*|\w+\.(?:py|toml))`", PAGE)
    assert len(named) > 20
    for name in named:
        assert (ROOT / name).exists(), name
