"""Short form of the fuzzer that repairs checksums, and the cases of the long form that found something."""

import json
import sqlite3
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")
pytest.importorskip("torch")

from fuzz.repaired import FAULTS, FORMATS, _compare, _their_table, cases, table
from support.run_files import unpacked
from trustrl.runs.open_run import open_run

CASES = 160


def test_damage_behind_valid_checksums_is_named_or_changes_nothing():
    found = cases(range(CASES), 0)
    assert [case for case in found if case[2] in FAULTS] == []
    assert len(found) == CASES
    assert {name for _, name, _, _ in found} == set(FORMATS)
    kinds = [kind for _, _, kind, _ in found]
    assert min(kinds.count(kind) for kind in ("same", "said", "refused")) > 5


@pytest.mark.parametrize("config", ["0.5", "[1]", '"s"', "null", "not json"])
def test_a_configuration_of_trackio_that_is_no_object_is_left_out(config, tmp_path):
    """Cases 252 and 260 of seed 1."""
    file = unpacked("trackio-0.43.0", tmp_path) / "tiny-project.db"
    with sqlite3.connect(file) as database:
        database.execute("update configs set config = ?", (config,))
    database.close()
    run = open_run(file)
    assert run.rows
    assert run.settings.learning_rate is None


def test_the_page_has_the_figures_of_the_last_long_run():
    root = Path(__file__).parents[2]
    figures = json.loads((root / "docs/data/fuzz_repaired.json").read_text())
    page = (root / "docs/reference/run-formats.md").read_text(encoding="utf-8")
    shown = page.split("<!-- repaired: begin (nox -s fuzz) -->\n")[1].split("<!-- repaired: end -->")[0]
    assert shown.strip() == table(figures["counts"])
    assert figures["cases"] >= 20_000
    assert not any(row.get(fault) for row in figures["counts"].values() for fault in FAULTS)


@pytest.mark.parametrize(("ours", "theirs"), [(1, True), (1, 2), ([1], [1, 2]), ({"a": 1}, {"b": 1}), (0.5, None)])
def test_the_comparison_tells_values_apart(ours, theirs):
    from fuzz.repaired import Different

    with pytest.raises(Different):
        _compare(ours, theirs, "x")
    _compare({"a": [float("nan")]}, {"a": [float("nan")]}, "x")


def test_the_other_reader_refuses_a_damaged_table(tmp_path):
    (tmp_path / "a.parquet").write_bytes(b"PAR1" * 20)
    assert _their_table(tmp_path / "a.parquet") is None


def test_the_page_has_the_costs_of_hostile_files():
    from fuzz.hostile import MEMORY, SECONDS, table as costs
    from support.hostile_files import FILES

    root = Path(__file__).parents[2]
    rows = json.loads((root / "docs/data/hostile.json").read_text())
    page = (root / "docs/reference/run-formats.md").read_text(encoding="utf-8")
    shown = page.split("<!-- hostile: begin -->\n")[1].split("<!-- hostile: end -->")[0]
    assert shown.strip() == costs(rows)
    assert [row["name"] for row in rows] == list(FILES)
    assert all(row["sentence"] and not row["traceback"] for row in rows)
    assert max(row["peak"] for row in rows) < MEMORY
    assert max(row["cpu"] for row in rows) < SECONDS
