"""The table of sums: both implementations are written from it, and a new sum is a row."""

import pytest
import sums as writer

from trustrl.core import sum_table as table
from trustrl.core.eager_sums import SumInputs
from trustrl.core.metrics import METRICS


@pytest.mark.parametrize("name", writer.FILES)
def test_the_written_files_are_the_tables(name):
    assert (writer.ROOT / name).read_text(encoding="utf-8") == writer.FILES[name](), "run `python scripts/sums.py`"


def test_names_are_unique():
    for group in (table.ROWS, table.COLUMNS, table.SHARED):
        names = [member.name for member in group]
        assert len(names) == len(set(names))


@pytest.mark.parametrize("reductions", [("count", "sum"), ("max",), ("histogram",)], ids=str)
def test_rows_share_a_slot_if_and_only_if_they_are_the_same(reductions):
    rows = {row.name: (row.expression, row.over) for row in table.ROWS}
    places = writer.slots(*reductions)
    assert set(places.values()) == set(range(len(set(places.values()))))
    for a in places:
        for b in places:
            assert (places[a] == places[b]) == (rows[a] == rows[b])


def test_binned_sums_follow_the_others_without_overlap():
    first = max(writer.slots("count", "sum").values()) + 1
    assert list(writer.binned_slots().values()) == [first, first + 24]


def test_rows_need_the_optional_columns_that_they_read():
    optional = {column.name for column in table.COLUMNS if column.optional}
    shared = {entry.name: entry.expression.rpartition(" or ")[2] for entry in table.SHARED}
    for row in table.ROWS:
        names = writer.read_by([row.expression])
        while unfolded := names & shared.keys():
            names = names - unfolded | writer.read_by(shared[name] for name in unfolded)
        assert names & optional <= set(row.needs), row.name
        assert set(row.needs) <= optional, row.name


def test_inputs_are_the_columns():
    assert SumInputs._fields == tuple(column.name for column in table.COLUMNS)


def test_a_row_in_the_middle_moves_the_slots_after_it_in_both(monkeypatch):
    row = table.Row("advantage/abs", "abs(advantage)", "advantage")
    before = writer.slots("count", "sum")
    monkeypatch.setattr(table, "ROWS", (*table.ROWS[:5], row, *table.ROWS[5:]))
    after = writer.slots("count", "sum")
    assert all(slot == before[name] + (before[name] >= 5) for name, slot in after.items() if name != row.name)
    assert 'totals.sum("advantage/abs", x.advantage.abs())' in writer.eager()
    assert "put(out, 5, tl.where(_usable, tl.abs(_advantage), 0.0))  # advantage/abs" in writer.kernel()
    assert '"advantage/abs": 5,' in writer.kernel()
    assert "| `advantage/abs` | `abs(advantage)` | advantage | sum | – |" in writer.metrics_page()


def test_a_number_that_float32_rounds_is_float64_in_the_kernel():
    assert writer.translated("gap > 0.5", writer.TRITON, {"gap": "gap"}) == "gap > 0.5"
    assert writer.translated("gap > 0.3", writer.TRITON, {"gap": "gap"}) == "gap > tl.full((ROWS,), 0.3, tl.float64)"
    assert writer.translated("gap > 0.3", writer.EAGER, {"gap": "gap"}) == "gap > 0.3"


def test_metrics_read_sums_of_the_table():
    known = {row.name for row in table.ROWS} | {"sequences", "loss_weight"}
    read = {name for metric in METRICS for name in metric.reads}
    assert {name for name in read if not name.startswith(("extra/", "fault/", "loss/"))} <= known


def test_a_method_applies_to_its_whole_argument():
    assert writer.translated("abs(a - b)", writer.EAGER, {"a": "x", "b": "y"}) == "(x - y).abs()"
    assert writer.translated("abs(a - b)", writer.TRITON, {"a": "x", "b": "y"}) == "tl.abs(x - y)"


@pytest.mark.parametrize(
    "expression", ["__import__('os')", "gap ** 2", "gap if keep else 0", "gap.abs()", "0 < gap < 1", "typo", "'a'"]
)
def test_other_python_is_refused(expression):
    with pytest.raises(SystemExit, match="must not use"):
        writer.translated(expression, writer.EAGER, {"gap": "gap", "keep": "keep"})
