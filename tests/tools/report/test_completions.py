"""Completions on a page: the worst by each measure, whole groups, with prompt, rewards and tokens."""

import random

import pytest

pytest.importorskip("pyarrow")

from support.run_folders import run_folder, write_groups, write_records
from trustrl.recording.run_file import run_description, write_run
from trustrl.recording.sequence_tables import write_sequences
from trustrl.regions.loading import config_to_dict
from trustrl.regions.presets import preset
from trustrl.runs.open_run import open_run
from trustrl.runs.readers import record_tables
from trustrl.runs.run import Completion, Run, RunSettings
from trustrl.tools.report import shown_completions as module
from trustrl.tools.report.reported_runs import reported
from trustrl.tools.report.shown_completions import choose_completions
from trustrl.tools.report.token_sample import read_tokens

GROUPS = {"1+1=": (1.0, 0.0), "2+2=": (0.0, 0.0, 1.0)}


def run_of(completions=(), records=()):
    """A run of plain TRL."""
    return Run(
        path="a", name="a", source="test", settings=RunSettings(engine="trl"), rows=[],
        completions=lambda: iter(completions), records=tuple(map(str, records)),
    )  # fmt: skip


def shown(run, max_shown=10_000):
    return choose_completions(run, read_tokens(run.records, max_points=0), max_shown=max_shown)


def test_a_recorded_sequence_has_its_prompt_rewards_and_tokens(tmp_path):
    found = shown(open_run(write_groups(tmp_path / "records", GROUPS)))
    assert found.num_known == len(found.listed) == 5
    by_sequence = {one.completion.sequence: one for one in found.listed}
    assert set(by_sequence) == {0, 1, 100, 101, 102}
    one = by_sequence[102]
    assert (one.completion.prompt, one.completion.text) == ("2+2=", "answer 102")
    assert (one.completion.reward, one.completion.rewards) == (1.0, {"correct": 1.0, "format": 1.0})
    assert (one.completion.stop_reason, one.completion.task_id, one.completion.step) == ("length", "sums", 1)
    assert one.columns["token_id"] == list(range(6))
    assert one.score.log_ratio == pytest.approx(0.2)
    assert one.score.gap == pytest.approx(0.01)
    assert by_sequence[100].score.stopped == 1
    assert len({one.completion.group for one in found.listed}) == 2


def test_texts_can_be_left_out_of_a_record(tmp_path):
    write_sequences(tmp_path, [{"sequence": 1, "prompt": "x", "completion": "y"}], step=0, rank=0, text=False)
    (one,) = record_tables.completions(str(tmp_path))
    assert (one.prompt, one.text) == (None, None)


def test_a_sequence_of_several_steps_is_one_completion(tmp_path):
    for step in range(3):
        write_sequences(tmp_path, [{"sequence": 7, "group": 2, "reward": 1.0}], step=step, rank=0, text=True)
    (one,) = record_tables.completions(str(tmp_path))
    assert one.step == 1


def test_numbers_that_are_not_finite_are_unknown(tmp_path):
    nan = float("nan")
    row = {"sequence": 1, "reward": nan, "rewards": {"a": nan, "b": 1.0}, "advantage": float("inf")}
    write_sequences(tmp_path, [row], step=0, rank=0, text=True)
    (one,) = record_tables.completions(str(tmp_path))
    assert (one.reward, one.rewards, one.advantage) == (None, {"a": None, "b": 1.0}, None)


def test_completions_of_a_reader_need_no_records():
    given = [Completion(step=1, prompt="p", text="t", reward=0.5, group="g")] * 3
    found = shown(run_of(given))
    assert [one.completion for one in found.listed] == given
    assert {(one.score, one.columns) for one in found.listed} == {(None, None)}


def test_a_readers_completions_are_joined_with_records_by_their_sequence(tmp_path):
    write_records(tmp_path, {"sequence": [3, 3, 4], "token_id": [1, 2, 3]})
    found = shown(run_of([Completion(step=1, text="t", sequence=3, reward=0.5)], [tmp_path]))
    assert [(one.completion.reward, one.score.tokens) for one in found.listed] == [(0.5, 2), (None, 1)]


def test_a_group_is_shown_whole(monkeypatch):
    monkeypatch.setattr(module, "MAX_SEQUENCES", 10)
    given = [Completion(step=1, text="t", reward=float(at != 37), group=str(at // 8)) for at in range(80)]
    groups = [one.completion.group for one in shown(run_of(given)).listed]
    assert groups == ["4"] * 8  # a second one would exceed the limit


def test_the_worst_by_each_measure_is_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_SEQUENCES", 30)
    draw, count = random.Random(0), 400
    kept = [True] * count
    kept[11] = False
    columns = {
        "sequence": list(range(count)), "token_id": list(range(count)), "kept": kept,
        "policy_logp": [-1.0 - (3.0 if at == 22 else draw.random() / 10) for at in range(count)],
        "proximal_logp": [-1.0 + (2.0 if at == 33 else 0.0) for at in range(count)],
    }  # fmt: skip
    write_records(tmp_path, columns)
    given = [
        Completion(
            step=1, text="t", sequence=at, reward=-5.0 if at == 44 else 1.0, num_tokens=900 if at == 55 else 5,
            stop_reason="length" if at == 66 else "stop",
        )
        for at in range(count)
    ]  # fmt: skip
    found = shown(run_of(given, [tmp_path]))
    assert {11, 22, 33, 44, 55, 66} <= {one.completion.sequence for one in found.listed}
    assert len(found.listed) == 30
    assert found.num_known == count


def test_some_of_the_chosen_are_random(monkeypatch):
    monkeypatch.setattr(module, "MAX_SEQUENCES", 50)
    given = [Completion(step=at, text="t", reward=1.0, num_tokens=5) for at in range(1000)]
    steps = [one.completion.step for one in shown(run_of(given)).listed]
    assert max(steps) > 500  # equal ones come in order
    assert steps == [one.completion.step for one in shown(run_of(given)).listed]


def test_completions_beyond_the_room_for_tokens_keep_their_text(tmp_path):
    found = shown(open_run(write_groups(tmp_path / "records", GROUPS)), 13)
    assert [one.columns is not None for one in found.listed].count(True) == 2
    assert {one.completion.text is not None for one in found.listed} == {True}


def test_only_so_many_candidates_are_read(monkeypatch):
    monkeypatch.setattr(module, "MOST_COMPLETIONS", 7)
    assert shown(run_of([Completion(step=1, text="t")] * 20)).num_known == 7


def test_without_room_there_are_counts_alone(tmp_path):
    found = shown(open_run(write_groups(tmp_path / "records", GROUPS)), 0)
    assert (found.listed, found.num_known) == ([], 5)


def test_records_without_a_region_have_no_verdicts(tmp_path):
    write_groups(tmp_path / "records", GROUPS, region=None)
    tokens = read_tokens([str(tmp_path / "records")], max_points=100)
    assert (tokens.verdicts, tokens.most_stopped, tokens.num_signed) == ({}, [], 30)
    assert {one.stopped for one in tokens.scores.values()} == {0}


def test_a_run_directory_is_read_with_its_groups(tmp_path):
    folder = run_folder(tmp_path / "a")
    write_groups(folder / "records", GROUPS)
    run = open_run(folder)
    assert len(shown(run).listed) == 5
    assert "completions" not in {one.what for one in run.missing}


def test_a_damaged_run_file_is_a_fault_and_not_the_end(tmp_path):
    folder = run_folder(tmp_path / "a")
    write_groups(folder / "records", GROUPS)
    (folder / "records" / "run.json").write_text("{")
    run = open_run(folder)
    assert run.records
    assert "run.json" in run.faults[0]


@pytest.mark.parametrize(("role", "observed"), [(None, False), ("observed", True)])
def test_the_settings_of_records_alone_come_from_their_run_file(role, observed, tmp_path):
    records = write_groups(tmp_path / "records", GROUPS)
    region = config_to_dict(preset("ppo"))
    about = {
        "engine": {"name": "trl", "version": "1.16", "settings": {"loss": "dapo"}},
        "dtypes": {"trainer": "float32"},
    }
    described = run_description(about, region=region, recording={}) | {"region_role": role}
    write_run(records, described)
    run = open_run(records)
    settings = run.settings
    assert (settings.engine, settings.engine_version, settings.loss) == ("trl", "1.16", "dapo")
    assert settings.trainer_dtype == "float32"
    assert settings.region == (None if observed else region)
    (found,) = reported([("a", run)])
    assert (found.observed, found.region) == (observed, preset("ppo"))
