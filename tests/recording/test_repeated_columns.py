"""A record in which a column occurs twice is refused by every command, with a sentence."""

import pytest

pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

from support.run_folders import run_folder, sealed, write_records
from trustrl.cli import main


@pytest.mark.parametrize("column", ["step", "policy_logp", "topk_ids"])
@pytest.mark.parametrize("command", [["records", "check"], ["audit"], ["report"], ["calibrate"]])
def test_a_column_that_occurs_twice_is_refused(command, column, tmp_path, capsys):
    run = run_folder(tmp_path / "run")
    write_records(run / "records", {"sequence": [1] * 6, "topk_ids": [[1]] * 6, "topk_logp": [[-1.0]] * 6})
    file = run / "records/step-00000000.rank-0000.parquet"
    table = pq.ParquetFile(file).read()
    pq.write_table(table.append_column(table.schema.field(column), table[column]), file)
    sealed(file)
    assert main([*command, str(run)]) == 1
    said = "".join(capsys.readouterr())
    assert f"column '{column}' occurs 2 times, and must occur once" in said
