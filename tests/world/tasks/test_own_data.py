"""Problems from files: columns, splits, templates, filters, several sets, and what is refused."""

import datetime
import decimal
import json
import warnings
from pathlib import Path

import pytest

from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.world import tasks
from trustrl.world.rewards import RewardFunction
from trustrl.world.tasks import OwnData
from trustrl.world.tasks.own_data import DataSet
from trustrl.world.verl_dataset import write_parquet

EXACT = [{"function": "exact"}]


def written(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.fixture
def sums(tmp_path):
    rows = [{"q": f"{a}+{b}=", "meta": {"truth": a + b}, "level": a % 3} for a in range(20) for b in range(10)]
    return written(tmp_path / "sums.jsonl", rows)


def test_rows_have_the_named_columns(sums):
    table = {"files": sums, "prompt": "q", "answer": "meta.truth", "columns": ["level", "meta.truth"]}
    task = OwnData(data=[table], reward=EXACT)
    rows = task.rows("train") + task.rows("held_out")
    assert len(rows) == 200
    assert 5 < len(task.rows("held_out")) < 40
    assert {(row["prompt"], row["answer"]) for row in rows} == {
        (f"{a}+{b}=", str(a + b)) for a in range(20) for b in range(10)
    }
    assert all(json.loads(row["columns"])["truth"] == int(row["answer"]) for row in rows)
    assert {row["data_set"] for row in rows} == {"sums"}
    assert task.score("#### " + rows[0]["answer"], rows[0]) == 1.0
    assert task.rows("train", seed=1) != task.rows("train", seed=2)
    assert sorted(row["prompt"] for row in task.rows("held_out", seed=1)) == sorted(
        row["prompt"] for row in task.rows("held_out", seed=2)
    )


def test_parquet_is_read_as_jsonl_is(sums, tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(
        pa.Table.from_pylist(list(map(json.loads, Path(sums).read_text().splitlines()))), tmp_path / "sums.parquet"
    )
    named = {"prompt": "q", "answer": "meta.truth", "columns": ["level"]}
    both = [
        OwnData(data=[{"files": file, **named}], reward=EXACT).rows("train")
        for file in (sums, str(tmp_path / "sums.parquet"))
    ]
    assert both[0] == both[1]
    assert both[0]


def test_values_of_parquet_that_json_lacks_become_text(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    day = datetime.date(2025, 2, 15)
    row = {"prompt": "a", "answer": decimal.Decimal("3.50"), "day": day, "about": {"days": [day], "level": 2}}
    pq.write_table(pa.Table.from_pylist([row] * 20), tmp_path / "days.parquet")
    table = {"files": str(tmp_path / "days.parquet"), "columns": ["day", "about"], "use": "train"}
    task = OwnData(data=[table], reward=EXACT)
    task.check()
    made = task.rows("train", 1)[0]
    assert made["answer"] == "3.50"
    assert json.loads(made["columns"]) == {"day": "2025-02-15", "about": {"days": ["2025-02-15"], "level": 2}}
    assert task.score("#### 3.50", made) == 1.0


def test_data_for_verl_appear_when_they_are_complete(sums, tmp_path, monkeypatch):
    """A resumed run takes the file that is there: half of one could not be read, however often it is resumed."""
    pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    def half(table, where):
        Path(where).write_bytes(b"PAR1")
        raise OSError("No space left on device")

    task = {"data": [{"files": sums, "prompt": "q", "answer": "level"}], "reward": EXACT}
    file = tmp_path / "data" / "train.parquet"
    monkeypatch.setattr(pq, "write_table", half)
    with pytest.raises(OSError, match="No space"):
        write_parquet(file, "data", "train", **task)
    monkeypatch.undo()
    assert list(file.parent.iterdir()) == []
    assert pq.read_metadata(write_parquet(file, "data", "train", **task)).num_rows > 100
    assert [path.name for path in file.parent.iterdir()] == ["train.parquet"]


def test_chats_templates_and_filters(sums):
    table = {
        "files": sums, "prompt": "q", "answer": "meta.truth", "where": {"level": [1, 2]}, "chat": True,
        "system": "Be brief.", "template": "{prompt}\nPut the answer in \\boxed{}.",
    }  # fmt: skip
    task = OwnData(data=[table], reward=EXACT)
    rows = task.rows("train", chat=True) + task.rows("held_out", chat=True)
    assert len(rows) == 130  # of a % 3 in 1, 2
    assert [message["role"] for message in rows[0]["prompt"]] == ["system", "user"]
    assert rows[0]["prompt"][1]["content"].endswith("=\nPut the answer in \\boxed{}.")


def test_held_out_files_are_not_trained_on(tmp_path, sums):
    apart = written(tmp_path / "test.jsonl", [{"q": "1+1=", "meta": {"truth": 2}}, {"q": "new", "meta": {"truth": 0}}])
    table = {"files": sums, "held_out_files": apart, "prompt": "q", "answer": "meta.truth"}
    with pytest.warns(TrustRLWarning, match="1 training problems are left out"):
        rows = OwnData(data=[table], reward=EXACT).rows("train")
    assert len(rows) == 199
    assert "1+1=" not in {row["prompt"] for row in rows}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        held_out = OwnData(data=[table], reward=EXACT).rows("held_out")
    assert {row["prompt"] for row in held_out} == {"1+1=", "new"}


def test_a_problem_held_out_by_one_set_is_not_trained_on_through_another(tmp_path, sums):
    apart = written(tmp_path / "test.jsonl", [{"q": "1+1=", "meta": {"truth": 2}}])
    first = written(tmp_path / "first.jsonl", [{"q": "a", "meta": {"truth": 2}}])
    named = {"prompt": "q", "answer": "meta.truth"}
    sets = [{"files": sums, **named, "held_out": 1e-9}, {"files": first, "held_out_files": apart, **named}]
    with pytest.warns(TrustRLWarning, match="1 training problems"):
        prompts = {row["prompt"] for row in OwnData(data=sets, reward=EXACT).rows("train")}
    assert "1+1=" not in prompts
    assert {"a", "2+2="} <= prompts


def test_a_set_may_be_for_training_or_for_the_evaluation_alone(tmp_path, sums):
    other = written(tmp_path / "other.jsonl", [{"q": "1+1=", "meta": {"truth": 2}}, {"q": "b", "meta": {"truth": 0}}])
    named = {"prompt": "q", "answer": "meta.truth"}
    sets = [{"files": sums, "use": "train", **named}, {"files": other, "use": "held_out", **named}]
    task = OwnData(data=sets, reward=EXACT)
    with pytest.warns(TrustRLWarning, match="1 training problems are left out"):
        held_out = task.rows("held_out")
    assert {row["prompt"] for row in held_out} == {"1+1=", "b"}
    assert len(task.rows("train")) == 199
    with pytest.raises(ConfigError, match=r"data\.use must be 'both'"):
        DataSet(files="a.jsonl", held_out_files="b.jsonl", use="train")


def test_rewards_add_up_by_weight(sums, tmp_path):
    (tmp_path / "short.py").write_text("def score(completion, limit):\n    return float(len(completion) < limit)\n")
    functions = [
        {"function": "exact", "weight": 2.0},
        {"function": f"{tmp_path / 'short.py'}:score", "weight": 0.5, "settings": {"limit": 4}},
    ]
    task = OwnData(data=[{"files": sums, "prompt": "q", "answer": "meta.truth"}], reward=functions)
    row = {"prompt": "2+2=", "answer": "4", "columns": "{}"}
    completions = ["4", "#### 4", "5", "a long text"]
    assert task.reward(["2+2="] * 4, completions, answer=["4"] * 4, columns=["{}"] * 4) == [2.5, 2.0, 0.5, 0.0]
    assert task.scores(completions, [row] * 4) == [2.5, 2.0, 0.5, 0.0]


@pytest.mark.parametrize(("table", "sentence"), [
    ({}, "must have one of files, hub and package, got none"),
    ({"files": "a.jsonl", "hub": "b"}, "must have one of files, hub and package, got files and hub"),
    ({"files": "a.csv"}, "must end with .jsonl or .parquet"),
    ({"files": "a.jsonl", "template": "no place"}, "must contain {prompt}"),
    ({"files": "a.jsonl", "system": "x"}, "without chat = true"),
    ({"files": "a.jsonl", "held_out_split": "test"}, "Write held_out_files"),
    ({"files": "a.jsonl", "subset": "main"}, "without data.hub"),
    ({"package": "math"}, "data.package must be"),
    ({"package": "svamp"}, "data.split must be"),
    ({"files": "a.jsonl", "held_out": 1.0}, "held_out must be"),
    ({"files": "a.jsonl", "promt": "x"}, "has no setting 'promt'"),
])  # fmt: skip
def test_a_table_is_checked(table, sentence):
    with pytest.raises(ConfigError) as raised:
        OwnData(data=[table], reward=EXACT)
    assert sentence in str(raised.value)


def test_files_and_columns_are_checked_before_a_model_is_loaded(sums, tmp_path):
    def check(**table):
        OwnData(data=[table], reward=EXACT).check()

    check(files=sums, prompt="q", answer="level")
    with pytest.raises(ConfigError, match="must exist"):
        check(files=str(tmp_path / "absent.jsonl"))
    with pytest.raises(ConfigError, match=r"got 'prompt'. A row has q, meta, level"):
        check(files=sums)
    with pytest.raises(ConfigError, match="at least one problem"):
        check(files=sums, prompt="q", answer="level", where={"level": 9})
    with pytest.raises(RecordError, match="line 1"):
        check(files=written(tmp_path / "list.jsonl", [[1, 2]]))
    (tmp_path / "damaged.jsonl").write_text("{")
    with pytest.raises(RecordError, match="line 1"):
        check(files=str(tmp_path / "damaged.jsonl"))
    table = {"files": sums, "prompt": "q", "answer": "level"}
    with pytest.raises(ConfigError, match=r"reward\.function must be loadable"):
        OwnData(data=[table], reward=[{"function": str(tmp_path / "no.py:score")}]).check()


def test_a_check_finds_a_function_and_runs_none_of_its_code(sums, tmp_path):
    table = {"files": sums, "prompt": "q", "answer": "level"}
    (tmp_path / "own.py").write_text(f"open({str(tmp_path / 'written')!r}, 'w')\ndef score(completion): return 1.0\n")

    def task(function):
        return OwnData(data=[table], reward=[{"function": function}])

    task(str(tmp_path / "own.py:score")).check()
    task("json:loads").check()
    assert not (tmp_path / "written").exists()
    with pytest.raises(ConfigError, match="does not name 'absent'"):
        task(str(tmp_path / "own.py:absent")).check()
    with pytest.raises(ConfigError, match=r"no module 'no_such_package\.at_all'"):
        task("no_such_package.at_all:score").check()
    with pytest.raises(ConfigError, match=r"no module '\.mine'"):
        task(".mine:score").check()
    (tmp_path / "broken.py").write_text("def score(:")
    with pytest.raises(ConfigError, match="must be loadable"):
        task(str(tmp_path / "broken.py:score")).check()
    task(str(tmp_path / "own.py:score")).start()
    assert (tmp_path / "written").exists()


def test_paths_do_not_depend_on_the_directory_of_a_process(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert DataSet(files="a.jsonl").files == (str(tmp_path / "a.jsonl"),)
    assert RewardFunction(function="mine.py:score").function == str(tmp_path / "mine.py:score")
    assert RewardFunction(function="package.mine:score").function == "package.mine:score"


def test_the_task_is_known_by_name(sums):
    task = tasks.load("data", data=[{"files": sums, "prompt": "q", "answer": "level"}], reward=EXACT)
    assert isinstance(task, OwnData)
