"""The sequence and text tables, run.json, and records without a region."""

import json
import os
from dataclasses import fields
from importlib import metadata

import pytest

pytest.importorskip("pyarrow")

import torch

import trustrl
from support import recording_batches as batches
from support.recording_batches import sequence_rows as rows
from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.recording import (
    VERSION,
    Recorder,
    Recording,
    SequenceRows,
    read,
    read_run,
    read_sequences,
    read_texts,
    run_file,
    sequence_ids,
)  # fmt: skip

NAME = "step-00000003.rank-0001.parquet"


def recorder(folder, *, region=batches.REGION, rank=1, about=None, **more):
    usual = {"sample": 1.0, "ring_steps": 0, "triggers": ()}
    return Recorder(Recording(folder=folder, **usual | more), region, rank=rank, about=about)


def test_sequences_and_texts_come_back_as_they_were_given(tmp_path):
    made = recorder(tmp_path)
    given = rows()
    made.add_sequences(given, step=3)
    made.end_step(3, None)
    found = read_sequences(tmp_path).to_pydict()
    for name in (one.name for one in fields(SequenceRows) if one.name not in ("prompt", "completion", "rewards")):
        assert found[name] == list(getattr(given, name)), name
    assert [dict(one) for one in found["rewards"]] == given.rewards
    assert (found["step"], found["rank"], found["text"]) == ([3] * 3, [1] * 3, [NAME] * 3)
    expected = {"sequence": [5, 6, 7], "prompt": given.prompt, "completion": given.completion}
    assert read_texts(tmp_path).to_pydict() == expected
    assert sorted(os.listdir(tmp_path)) == ["sequences", "texts", "writers"]  # another rank's run.json


@pytest.mark.parametrize("how", ["switched off", "not given"])
def test_without_text_there_is_no_text_file_and_no_reference(how, tmp_path):
    made = recorder(tmp_path, text=how != "switched off")
    made.add_sequences(rows() if how == "switched off" else rows(prompt=None, completion=None), step=3)
    made.end_step(3, None)
    assert sorted(os.listdir(tmp_path)) == ["sequences", "writers"]
    assert read_sequences(tmp_path)["text"].null_count == 3
    assert len(read_texts(tmp_path)) == 0


def test_only_sampled_sequences_are_written_and_they_are_those_of_the_token_table(tmp_path):
    made = recorder(tmp_path, sample=0.3)
    ids = sequence_ids(step=0, rollout=0, rank=1, count=64)
    b = batches.batch(rows=64)
    made.add_sequences(rows(ids.tolist()), step=0)
    made.add(b.out, b.policy, b.rollout, sequences=ids, step=0)
    made.end_step(0, b.out.sums)
    wanted = ids[made.sampled(ids)].tolist()
    assert 8 < len(wanted) < 32
    assert read_sequences(tmp_path)["sequence"].to_pylist() == wanted
    assert set(read(tmp_path)["sequence"].tolist()) == set(wanted)


def test_unknown_values_are_null_and_a_later_row_replaces_an_earlier_one(tmp_path):
    made = recorder(tmp_path)
    made.add_sequences(SequenceRows(sequence=[5, 6], reward=[1.0, None]), step=3)
    made.add_sequences(SequenceRows(sequence=[6], rewards=[{"style": None}], completion=["\ud800x"]), step=3)
    made.end_step(3, None)
    found = read_sequences(tmp_path).to_pydict()
    assert found["sequence"] == [5, 6]
    assert found["reward"] == [1.0, None]
    assert found["rewards"] == [None, [("style", None)]]
    assert found["text"] == [None, NAME]
    assert read_texts(tmp_path)["completion"].to_pylist() == ["?x"]


def test_sequences_of_a_step_that_did_not_end_are_written_with_the_next(tmp_path):
    made = recorder(tmp_path)
    made.add_sequences(rows([1]), step=2)
    made.add_sequences(rows([2]), step=3)
    made.add_sequences(rows([3]), step=4)
    made.end_step(3, None)
    assert read_sequences(tmp_path)["step"].to_pylist() == [2, 3]


def test_a_resumed_process_takes_back_sequences_and_texts_too(tmp_path):
    for rank in (0, 1):
        made = recorder(tmp_path, rank=rank)
        for step in range(4):
            made.add_sequences(rows([10 * rank + step]), step=step)
            made.end_step(step, None)
    recorder(tmp_path).add_sequences(rows([99]), step=2)
    assert read_sequences(tmp_path)["sequence"].to_pylist() == [0, 10, 1, 11, 2, 3]
    assert read_texts(tmp_path)["sequence"].to_pylist() == [0, 10, 1, 11, 2, 3]


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(RecordError, match=r"SequenceRows\.group must have one entry per sequence, got 1 for 2"):
        SequenceRows(sequence=[1, 2], group=[3])


def test_a_value_of_the_wrong_kind_costs_its_step_and_not_the_training(tmp_path):
    made = recorder(tmp_path)
    made.add_sequences(rows(reward=["much"] * 3), step=0)
    with pytest.warns(TrustRLWarning, match=r"SequenceRows\.reward must contain float or None"):
        made.end_step(0, None)
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name == "sequences"]
    made.add_sequences(rows(), step=1)
    with pytest.warns(TrustRLWarning, match=r"lack 0 tokens and 3 sequences of 1 steps, 0 to 0, until step 1"):
        made.end_step(1, None)
    assert read_sequences(tmp_path)["step"].to_pylist() == [1, 1, 1]


def test_a_run_without_a_region_has_no_verdicts(tmp_path):
    made = recorder(tmp_path, region=None, ring_steps=2)
    b = batches.batch()
    made.add(None, b.policy, b.rollout, sequences=b.sequences, step=0)
    assert made.end_step(0, None) == []
    found = read(tmp_path)
    assert found.region is None
    assert not {"kept", "weight", "divergence_lower", "divergence_upper"} & {*found}
    assert torch.equal(found["policy_logp"], b.policy.logp.detach()[b.rollout.in_loss])


def test_files_with_and_without_a_region_are_not_mixed(tmp_path):
    b = batches.batch()
    batches.give(recorder(tmp_path), b, step=0)
    made = recorder(tmp_path, region=None)
    made.add(None, b.policy, b.rollout, sequences=b.sequences, step=1)
    made.end_step(1, None)
    with pytest.raises(RecordError, match=r"one region, got .* and None"):
        read(tmp_path)


ABOUT = {
    "engine": {"name": "trl", "version": "1.16.0"}, "model": "tiny", "tokenizer": "tiny",
    "dtypes": {"trainer": "float32", "sampler": "bfloat16"}, "packages": {"peft": "1.0"},
    "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None},
}  # fmt: skip


def test_a_rank_that_is_told_about_the_run_describes_it(tmp_path):
    """With pipeline stages, rank 0 records nothing."""
    recorder(tmp_path, rank=3, about=ABOUT)
    assert read_run(tmp_path)["engine"] == ABOUT["engine"]


def test_rank_0_describes_the_run_once_and_a_resumed_run_again(tmp_path):
    recorder(tmp_path, rank=1)
    assert read_run(tmp_path) is None
    recorder(tmp_path, rank=0, about=ABOUT, sample=0.5)
    found = read_run(tmp_path)
    assert {name: found[name] for name in ABOUT if name != "packages"} == {
        name: value for name, value in ABOUT.items() if name != "packages"
    }
    assert found["packages"]["peft"] == "1.0"
    assert found["packages"]["torch"] == metadata.version("torch")
    assert trustrl.config_from_dict(found["region"]) == batches.REGION
    assert (found["version"], found["trustrl"]) == (VERSION, trustrl.__version__)
    assert found["recording"]["sample"] == 0.5
    assert "folder" not in found["recording"]  # an address may contain keys
    recorder(tmp_path, rank=0, region=None)
    again = read_run(tmp_path)
    assert (again["region"], again["engine"]) == (None, None)


@pytest.mark.parametrize(
    ("about", "says"),
    [
        ({"modle": "x"}, r"about must have keys in engine, .* got modle"),
        ({"engine": "trl"}, r"about\.engine must be of type object or null, got 'trl'"),
        ({"engine": {}}, r"about\.engine\.name must be present"),
        ({"sampling": {"top_k": 0.5}}, r"about\.sampling\.top_k must be of type integer or null, got 0\.5"),
        ({"packages": {"x": 1}}, r"about\.packages\.x must be of type string, got 1"),
        ({"model": True}, r"about\.model must be of type string or null, got True"),
    ],
)
def test_facts_that_do_not_fit_the_schema_are_refused_at_the_start(about, says, tmp_path):
    with pytest.raises(ConfigError, match=says):
        recorder(tmp_path, rank=0, about=about)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda run: run | {"version": VERSION + 1}, "Install a newer trustrl"),
        (lambda run: run | {"version": 2}, "at least 3, got 2"),
        (lambda run: {k: v for k, v in run.items() if k != "engine"}, r"run\.engine that is present"),
        (lambda run: [run], "no object"),
    ],
)
def test_a_run_file_that_breaks_the_schema_is_refused(change, says, tmp_path):
    recorder(tmp_path, rank=0)
    file = tmp_path / "run.json"
    plain = {name: value for name, value in json.loads(file.read_text()).items() if name != "checksum"}
    file.write_text(json.dumps(change(plain)))
    with pytest.raises(RecordError, match=says):
        read_run(tmp_path)
    file.write_text("{")
    with pytest.raises(RecordError, match="must be a JSON file"):
        read_run(tmp_path)


def test_the_schema_uses_only_the_rules_that_are_checked():
    known = {"$schema", "title", "description", "type", "required", "properties", "additionalProperties", "minimum"}

    def rules(schema):
        yield from schema
        inner = [*schema.get("properties", {}).values(), *filter(None, [schema.get("additionalProperties")])]
        for one in inner:
            yield from rules(one)

    assert {*rules(run_file.RUN_SCHEMA)} == known
