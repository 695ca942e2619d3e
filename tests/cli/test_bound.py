"""`trustrl bound`: exit codes, stdout for data, stderr for talk."""

import json
import math

import pytest

pytest.importorskip("pyarrow")

from support import recorded, run_folders as folders
from trustrl.cli import main
from trustrl.recording.sequence_tables import write_sequences
from trustrl.tools.bound.bound_report import HEADER, text


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    recorded.add_rewards(recorded.record(folder / "records"))
    return folder


def test_a_bound_is_one_object_on_stdout(run_folder, capsys):
    assert main(["bound", str(run_folder), "--json"]) == 0
    said = capsys.readouterr()
    found = json.loads(said.out)
    assert said.err == ""
    assert [(one["step"], one["update"]) for one in found["updates"]] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [one["published"]["says"] for one in found["updates"]][::2] == ["unchanged"] * 2
    assert found["rewards"] == [0.0, 1.0]


def test_for_people_it_is_a_table_with_a_line_for_each_update(run_folder, capsys):
    assert main(["bound", str(run_folder)]) == 0
    said = capsys.readouterr()
    lines = said.out.splitlines()
    assert said.err == ""
    assert max(map(len, lines)) <= 100
    (head,) = (at for at, line in enumerate(lines) if line.startswith("step"))
    assert lines[head].split("  ")[-1] == HEADER[-1]
    assert [line.split()[0] for line in lines[head + 2 : head + 6]] == ["0.0", "0.1", "1.0", "1.1"]
    assert "μ is behavior_logp; δ = 0.15 in TV" in said.out
    assert "estimates, not a guarantee" in said.out


@pytest.mark.parametrize("size", [1.234e-4, 9.876e5])
def test_a_line_is_never_cut(size, run_folder, capsys):
    assert main(["bound", str(run_folder), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    one = found["updates"][-1]
    one["max_tv"] = [size, 1.0]
    one["step"], one["update"] = 12_345, 7
    at = one["published"]
    at |= dict.fromkeys(("surrogate", "bound"), -size) | dict.fromkeys(("max_form", "sum_form", "over"), size)
    at |= {"surrogate_error": size, "positive_below": {"max_tv": size, "sum_tv": size}}
    (line,) = (line for line in text(found).splitlines() if line.startswith("12345.7"))
    assert line.endswith(f" {-size:.2g}")


def test_mu_may_be_the_trainers(run_folder, capsys):
    """Whose log-probs are 0.01 lower in these records, so every ratio is e^0.01 before the first update."""
    assert main(["bound", str(run_folder), "--json", "--anchor", "proximal"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["anchor"] == "proximal"
    one = found["updates"][0]
    assert one["sum_tv"] == pytest.approx(math.expm1(0.01) / 2 * one["tokens"] / one["sequences"], rel=1e-3)


def test_the_horizon_is_the_longest_completion_also_where_tokens_are_not_in_the_loss(tmp_path, capsys):
    recorded.record(tmp_path, seeds=(0,))
    rows = [{"sequence": at, "reward": 1.0, "completion_tokens": 20 + at} for at in range(8)]
    write_sequences(tmp_path, rows, step=0, rank=0, text=False)
    assert main(["bound", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["horizon"] == 27


def test_two_processes_print_the_same(run_folder, capsys):
    tables = []
    for workers in ("1", "2"):
        assert main(["bound", str(run_folder), "--workers", workers]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        pytest.param([], 2, "RECORDS", id="no records named"),
        pytest.param(["nowhere"], 2, "must be existing folders or files", id="no such folder"),
        pytest.param(["RUN", "RUN"], 2, "unrecognized arguments", id="two runs"),
        pytest.param(["FILE"], 2, "RECORDS must be a folder", id="a file, which has no rewards"),
        pytest.param(["EMPTY"], 1, "No records found", id="a folder without records"),
        pytest.param(["SILENT"], 1, "this run has no records", id="a run that recorded nothing"),
        pytest.param(["REWARDLESS"], 1, "must have rewards in its sequence table", id="no rewards"),
        pytest.param(["UNANCHORED"], 1, "must have behavior_logp", id="no log-probs of the sampler"),
        pytest.param(
            ["PROXIMAL", "--anchor", "behavior"],
            1,
            "pass --anchor proximal",
            id="the trainer's alone, and the sampler's asked",
        ),
        pytest.param(["SAMPLED", "--anchor", "proximal"], 1, "pass --anchor behavior", id="the sampler's alone"),
        pytest.param(["RUN", "--anchor", "policy"], 2, "invalid choice", id="no anchor"),
        pytest.param(["RUN", "--horizon", "5"], 2, "--horizon must be at least 1", id="a horizon below the longest"),
        pytest.param(["RUN", "--horizon", "0"], 2, "--horizon", id="no horizon"),
        pytest.param(["RUN", "--delta", "1.5"], 2, "--delta must be a TV in (0, 1]", id="no TV"),
        pytest.param(["RUN", "--rewards", "0", "0.5"], 2, "contains every recorded reward", id="a range too narrow"),
        pytest.param(["RUN", "--rewards", "1", "0"], 2, "contains every recorded reward", id="a range upside down"),
        pytest.param(["RUN", "--rewards", "0", "nan"], 2, "contains every recorded reward", id="no range"),
        pytest.param(["RUN", "--rewards", "0", "inf"], 2, "must be a finite range", id="an open range"),
        pytest.param(["RUN", "--workers", "0"], 2, "--workers", id="no worker"),
    ],
)
def test_what_cannot_be_done_is_a_sentence(arguments, code, said, run_folder, tmp_path, capsys):
    recorded.record(tmp_path / "rewardless")
    columns = {"position": [0, 1], "behavior_logp": [None, None], "sequence": [1, 1]}
    folders.write_records(tmp_path / "unanchored", columns)
    folders.write_records(tmp_path / "proximal", columns | {"proximal_logp": [-1.0, -2.0]})
    recorded.record(tmp_path / "sampled", proximal=False)
    for name in ("unanchored", "proximal", "sampled"):
        recorded.add_rewards(tmp_path / name)
    (tmp_path / "empty").mkdir()
    places = {
        "RUN": run_folder, "FILE": next((run_folder / "records").glob("*.parquet")), "EMPTY": tmp_path / "empty",
        "SILENT": folders.run_folder(tmp_path / "a"), "REWARDLESS": tmp_path / "rewardless",
        "UNANCHORED": tmp_path / "unanchored", "PROXIMAL": tmp_path / "proximal", "SAMPLED": tmp_path / "sampled",
    }  # fmt: skip
    assert main(["bound", *(str(places.get(one, one)) for one in arguments)]) == code
    found = capsys.readouterr()
    assert said in found.err
    assert "Traceback" not in found.err
    assert found.out == ""
