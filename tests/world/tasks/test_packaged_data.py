"""GSM8K and SVAMP from a package on PyPI: counts, columns, splits, and scores by both engines' ways."""

import re
import warnings

import pytest

from trustrl.errors import TrustRLWarning
from trustrl.world.tasks import OwnData, packaged_data

GSM8K = {"package": "gsm8k", "held_out_split": "test", "prompt": "question"}
SVAMP = {"package": "svamp", "split": "test", "use": "held_out", "prompt": "question"}
EXACT = [{"function": "exact"}]

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("name", "split", "count"), [
    ("gsm8k", "train", 7473), ("gsm8k", "test", 1319), ("svamp", "test", 1000),
])  # fmt: skip
def test_a_split_has_its_published_number_of_rows(name, split, count):
    rows = list(packaged_data.rows(name, split))
    assert len(rows) == count
    assert all(set(row) == {"question", "answer"} and row["question"] and row["answer"] for row in rows)
    final = r"#### -?[\d,.]+" if name == "gsm8k" else r"-?\d+(\.\d+)?"
    assert all(re.search(rf"{final}$", row["answer"]) for row in rows)


def test_the_test_split_is_what_is_held_out_whatever_the_seed():
    task = OwnData(data=[GSM8K, SVAMP], reward=EXACT)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TrustRLWarning)
        train, held_out = task.rows("train", seed=1), task.rows("held_out", seed=2)
    tests = {row["question"] for name in ("gsm8k", "svamp") for row in packaged_data.rows(name, "test")}
    assert {row["prompt"] for row in held_out} == tests
    assert not tests & {row["prompt"] for row in train}
    assert {row["data_set"] for row in held_out} == {"gsm8k", "svamp"}


def test_a_published_solution_scores_one():
    task = OwnData(data=[GSM8K], reward=EXACT)
    rows = task.rows("held_out", 50)
    assert task.scores([row["answer"] for row in rows], rows) == [1.0] * 50
    assert task.scores([rows[0]["answer"] + "0"] * 50, rows).count(0.0) == 50
