"""The record and the words in which trainers ask a sampler for it. `tests/engines/vllm` has the adapter of vLLM."""

import pickle
import subprocess
import sys
from dataclasses import fields

import numpy as np
import pytest

from trustrl.engines.common.kept_columns import column_of
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.common.sampler_contract import Wanted, asking, wanted_in
from trustrl.engines.common.sampler_fields import KEPT, KEPT_COUNTS, KEPT_IDS, TOPK, TOPK_IDS, TOPK_LOGP
from trustrl.errors import EngineError


def record(length=3, k=2, **columns):
    return SampledRecord(**{
        "tokens": np.arange(length, dtype=np.int32), "logp": np.zeros(length, np.float32),
        "topk_ids": np.zeros((length, k), np.int32), "topk_logp": np.zeros((length, k), np.float32), **columns,
    })  # fmt: skip


def test_every_field_of_the_record_is_described():
    described = SampledRecord.fields()
    assert list(described) == [field.name for field in fields(SampledRecord)]
    assert all(text for column in described.values() for text in column)


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param("logp", np.zeros(2, np.float32), id="log-probs"),
        pytest.param("topk_logp", np.zeros((4, 2), np.float32), id="top-K"),
        pytest.param("version", np.zeros(2, np.int32), id="versions"),
        pytest.param("experts", np.zeros((1, 8), np.int16), id="experts"),
        pytest.param("kept", column_of([[1]]), id="kept ids"),
    ],
)
def test_a_column_of_another_length_is_refused_with_its_name(name, column):
    with pytest.raises(EngineError, match=rf"{name}.* for each of 3 tokens, got \d rows"):
        record(**{name: column})


def test_trainers_get_the_columns_that_were_asked_for():
    assert record(k=0).extra_fields() == {}
    full = record(kept=column_of([[1, 2], [3], [4]]))
    again = pickle.loads(pickle.dumps(full.extra_fields()))
    assert set(again) == {TOPK_IDS, TOPK_LOGP, KEPT_IDS, KEPT_COUNTS}
    assert (again[KEPT_IDS].tolist(), again[KEPT_COUNTS].tolist()) == ([1, 2, 3, 4], [2, 1, 1])
    assert set(record(k=0, kept=column_of([[1], [2], [3]])).extra_fields()) == {KEPT_IDS, KEPT_COUNTS}


@pytest.mark.parametrize(("largest", "size"), [(65_535, 2), (65_536, 4), (151_935, 4)])
def test_kept_ids_take_two_bytes_where_all_fit(largest, size):
    column = column_of([[1, largest], [], [7]])
    narrow = column.narrow()
    assert (narrow.ids.itemsize, narrow.ids.tolist()) == (size, [1, largest, 7])
    wide = column_of(narrow.rows())  # as trainers read it
    assert (wide.ids.dtype, wide.ids.tolist(), wide.counts.tolist()) == (np.int32, column.ids.tolist(), [2, 0, 1])
    joined = np.concatenate([narrow.ids, column_of([[151_935]]).narrow().ids])  # of two requests
    assert joined.tolist() == [1, largest, 7, 151_935]
    assert column_of([]).narrow().ids.itemsize == 2


def test_the_loop_adds_turn_and_replica():
    known = record().of(turn=2, replica="10.0.0.7:8000")
    assert (known.turn, known.replica, len(known)) == (2, "10.0.0.7:8000", 3)


def test_a_request_carries_what_is_wanted_and_nothing_else_changes():
    own = {"temperature": 0.7, "top_p": 0.9, "extra_args": {"theirs": 1}}
    sent = asking(Wanted(20, 512), own)
    assert sent == {**own, "extra_args": {"theirs": 1, TOPK: 20, KEPT: 512}}
    assert wanted_in(sent["extra_args"]) == (Wanted(20, 512), {"theirs": 1})
    assert own["extra_args"] == {"theirs": 1}


@pytest.mark.parametrize(
    ("wanted", "own", "extra"),
    [
        pytest.param(Wanted(0, 512), {"top_p": 1.0}, None, id="no truncation, so there are no kept ids"),
        pytest.param(Wanted(0, 512), {"top_k": 8}, {KEPT: 512}, id="kept ids alone"),
        pytest.param(Wanted(4, 512), {"top_k": -1}, {TOPK: 4}, id="top-K alone"),
        pytest.param(Wanted(), {"min_p": 0.1}, None, id="nothing"),
    ],
)
def test_only_what_is_needed_is_asked_for(wanted, own, extra):
    assert asking(wanted, own).get("extra_args") == extra


@pytest.mark.parametrize("extra_args", [None, {}, {TOPK: 0}, {KEPT: None}])
def test_a_request_that_asks_for_nothing_wants_nothing(extra_args):
    assert wanted_in(extra_args) == (Wanted(), {})


def test_the_contract_needs_neither_torch_nor_a_sampler():
    code = "import sys, trustrl.engines.common.sampler_contract; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"torch", "vllm", "sglang", "verl", "trl"} & set(loaded)
