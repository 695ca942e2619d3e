"""The table of docs/reference/precision.md is made from the committed rows, and every row holds."""

import json

import precision

from support import self_divergence as own

ROWS = json.loads(precision.DATA.read_text())


def test_the_page_is_made_from_the_data():
    text = precision.PAGE.read_text()
    assert precision.page(text, ROWS) == text


def test_every_cell_is_within_its_bound_and_catches_the_faults_that_touch_it():
    own.check(ROWS)
    halves = [row for row in ROWS if row["precision"] != "fp32"]
    exact = [row for row in halves if row["kind"].startswith("exact") and "FSDP2" in row["layout"]]
    assert exact
    assert all("arguments" in row["planted"] for row in exact)


def test_a_new_row_replaces_that_of_its_kind_in_its_layout(tmp_path):
    fresh = {**ROWS[0], "tv": 0.5}
    (tmp_path / "rows.json").write_text(json.dumps([fresh]))
    rows = precision.merged(ROWS, [str(tmp_path / "rows.json")])
    assert fresh in rows
    assert [row for row in rows if row != fresh] == [row for row in ROWS if row != ROWS[0]]
    assert "| 0.5000 |" in precision.table(rows)
