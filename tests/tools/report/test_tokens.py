"""Recorded tokens: what the region did to each, counted by plain loops beside the library's columns."""

import json
import math
import random
from collections import Counter

import pytest

pq = pytest.importorskip("pyarrow.parquet")

from support.run_folders import sealed, write_records
from trustrl.errors import RecordError
from trustrl.runs.run import Run, RunSettings
from trustrl.tools.report import token_sample as module
from trustrl.tools.report.shown_completions import choose_completions
from trustrl.tools.report.token_sample import read_tokens


def read(folder, max_points=10_000):
    return read_tokens([str(folder)], max_points=max_points)


def shown(folder, max_shown=10_000):
    run = Run(path=str(folder), name="a", source="records", settings=RunSettings(engine="trl"), rows=[])
    return choose_completions(run, read(folder), max_shown=max_shown).listed


def drawn(seed, count, sequences=5):
    """Tokens with everything that may happen to them."""
    draw = random.Random(seed)
    return {
        "sequence": sorted(draw.randrange(sequences) + 100 * seed for _ in range(count)),
        "token_id": [draw.randrange(6) for _ in range(count)],
        "advantage": [draw.choice([-1.0, 0.0, 1.0]) for _ in range(count)],
        "behavior_logp": [-draw.expovariate(1) for _ in range(count)],
        "policy_logp": [-draw.expovariate(1) for _ in range(count)],
        "kept": [draw.random() < 0.7 for _ in range(count)],
    }


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        pytest.param({}, "kept", id="nothing special"),
        pytest.param({"kept": False}, "stopped", id="stopped"),
        pytest.param({"kept": False, "advantage": 0.0}, "no gradient", id="nothing to stop"),
        pytest.param({"advantage": 0.0}, "no gradient", id="no advantage"),
        pytest.param({"weight": 0.0}, "no gradient", id="no weight"),
        pytest.param({"weight": 0.5}, "down-weighted", id="below its ratio"),
        pytest.param({"weight": -0.5}, "down-weighted", id="bent back"),
        pytest.param({"weight": 0.995}, "kept", id="rounding"),
        pytest.param({"weight": 1.5}, "up-weighted", id="above its ratio"),
        pytest.param({"policy_logp": math.log(0.5), "behavior_logp": math.log(0.25), "weight": 2.0}, "kept", id="the ratio itself"),
        pytest.param({"policy_logp": float("nan")}, "not finite", id="NaN"),
        pytest.param({"weight": float("inf")}, "not finite", id="an infinite weight"),
        pytest.param({"behavior_logp": None, "proximal_logp": -1.0, "weight": 0.5}, "down-weighted", id="only the trainer's record"),
        pytest.param({"behavior_logp": None}, "kept", id="no record to compare with"),
    ],
)  # fmt: skip
def test_a_row_has_one_verdict(row, verdict, tmp_path):
    write_records(tmp_path, {name: [value] for name, value in ({"token_id": 3} | row).items()})
    found = read(tmp_path)
    assert {name: count for name, count in found.verdicts.items() if count} == {verdict: 1}


def test_a_correction_is_held_against_the_samplers_ratio(tmp_path):
    """TIS weighs with π/π' · min(π'/μ, 2): below π/μ only where the cap acts."""
    columns = {"policy_logp": [0.0, 0.0], "proximal_logp": [0.0, 0.0], "behavior_logp": [-0.5, -1.0]}
    write_records(tmp_path, columns | {"weight": [math.exp(0.5), 2.0]}, region="tis")
    assert read(tmp_path).verdicts == Counter({"kept": 1, "down-weighted": 1}) | {
        "stopped": 0, "up-weighted": 0, "no gradient": 0, "not finite": 0, "no verdict": 0,
    }  # fmt: skip


@pytest.mark.parametrize(("region", "verdict"), [("gspo", "kept"), ("ppo", "down-weighted")])
def test_a_weight_of_the_whole_sequence_is_not_held_against_a_tokens_ratio(region, verdict, tmp_path):
    write_records(tmp_path, {"weight": [0.9]}, region=region)
    assert read(tmp_path).verdicts[verdict] == 1


def test_counts_are_those_of_a_plain_loop(tmp_path):
    everything = []
    for step in range(4):
        columns = drawn(step, 200)
        write_records(tmp_path, columns | {"weight": [1.0] * 200}, step=step)
        everything += [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    found = read(tmp_path)
    stopped = [row for row in everything if not row["kept"] and row["advantage"] != 0]
    signed = [row for row in everything if row["advantage"] != 0]
    assert (found.num_rows, found.num_read, found.verdicts["stopped"]) == (800, 800, len(stopped))
    assert found.num_signed == len(signed) < 800
    by_token = Counter(row["token_id"] for row in stopped)
    assert {one["token_id"]: one["stopped"] for one in found.most_stopped} == by_token
    assert [one["stopped"] for one in found.most_stopped] == sorted(by_token.values(), reverse=True)
    for one in found.most_stopped:
        here = [row for row in stopped if row["token_id"] == one["token_id"]]
        assert one["signed"] == sum(row["token_id"] == one["token_id"] for row in signed)
        assert one["rising"] == sum(row["policy_logp"] > row["behavior_logp"] for row in here)
        assert one["mu"] == pytest.approx(sum(math.exp(row["behavior_logp"]) for row in here) / len(here), rel=1e-5)
    by_sequence = Counter(row["sequence"] for row in stopped)
    assert {sequence: one.stopped for sequence, one in found.scores.items()} == by_sequence


def test_the_sample_is_bounded_repeatable_and_of_all_files(tmp_path):
    for step in range(10):
        write_records(tmp_path, drawn(step, 300), step=step)
    first, again = (read(tmp_path, 500) for _ in range(2))
    assert first.points == again.points
    assert {len(column) for column in first.points.values()} == {500}
    by_step = Counter(first.points["step"])
    assert all(25 <= by_step[step] <= 80 for step in range(10)), by_step  # 50 ± 4 standard deviations


def test_a_sequence_is_shown_at_the_update_that_stopped_most(tmp_path):
    columns = {
        "sequence": [7] * 6, "update": [0, 0, 0, 1, 1, 1], "position": [2, 1, 0, 2, 1, 0],
        "kept": [True, True, False, False, True, False], "token_id": [12, 11, 10, 12, 11, 10],
    }  # fmt: skip
    write_records(tmp_path, columns)
    (one,) = shown(tmp_path)
    assert (one.score.update, one.score.stopped, one.score.tokens) == (1, 2, 3)
    assert one.columns["token_id"] == [10, 11, 12]


def test_text_is_bounded_and_no_sequence_is_cut(tmp_path):
    columns = {
        "sequence": [s for s in range(50) for _ in range(10)],
        "token_id": list(range(500)),
        "kept": [False] * 500,
    }
    write_records(tmp_path, columns)
    assert [len(one.columns["token_id"]) for one in shown(tmp_path, 95)] == [10] * 9


def test_the_same_text_is_shown_once(tmp_path):
    write_records(tmp_path, {"sequence": [1, 1, 2, 2], "token_id": [5, 6, 5, 6], "position": [0, 1, 0, 1]})
    assert len(shown(tmp_path)) == 1


def test_a_step_that_a_dump_has_in_full_is_read_from_there_alone(tmp_path):
    write_records(tmp_path, drawn(0, 10), step=3)
    write_records(tmp_path, drawn(1, 10), step=4)
    write_records(tmp_path / "dump-00000004", drawn(1, 40), step=4)
    cause = {"trigger": {"kind": "non-finite"}, "found": {"tokens": 2}}
    (tmp_path / "dump-00000004" / "trigger.rank-0000.json").write_text(json.dumps({"step": 4, "fired": [cause]}))
    found = read(tmp_path)
    assert found.num_rows == 50
    assert found.dumps == [{"name": "dump-00000004", "step": 4, "causes": [cause]}]


def test_a_dump_without_its_reason_is_still_listed(tmp_path):
    write_records(tmp_path / "dump-00000004", drawn(1, 4), step=4)
    assert read(tmp_path).dumps == [{"name": "dump-00000004", "step": None, "causes": []}]


def test_of_too_many_rows_some_files_are_read(tmp_path, monkeypatch):
    for step in range(6):
        write_records(tmp_path, drawn(step, 10), step=step)
    monkeypatch.setattr(module, "MAX_ROWS", 30)
    found = read(tmp_path)
    assert (found.num_rows, found.num_read) == (60, 30)
    assert set(found.points["step"]) == {0, 2, 4}


def in_groups(folder, steps, rows):
    """One file of several steps, in row groups."""
    write_records(folder, steps, step=0)
    (file,) = folder.glob("*.parquet")
    table = pq.read_table(file)
    file.unlink()
    file = folder / f"step-00000000-{max(steps['step']):08d}.rank-0000.parquet"
    pq.write_table(table, file, row_group_size=rows)
    sealed(file)


def test_of_one_large_file_some_row_groups_are_read(tmp_path, monkeypatch):
    rows = [drawn(step, 10) for step in range(6)]
    columns = {name: [value for one in rows for value in one[name]] for name in rows[0]}
    in_groups(tmp_path, columns | {"step": [step for step in range(6) for _ in range(10)]}, 10)
    whole = read(tmp_path)
    assert whole.num_read == 60
    monkeypatch.setattr(module, "MAX_ROWS", 30)
    found = read(tmp_path)
    assert (found.num_rows, found.num_read) == (60, 30)
    assert set(found.points["step"]) == {0, 2, 4}
    assert found.scores == {one: score for one, score in whole.scores.items() if score.step in {0, 2, 4}}


def test_a_shown_sequence_is_whole_though_row_groups_cut_it(tmp_path, monkeypatch):
    sequences = [number for number in range(4) for _ in range(15)]
    steps = [number // 2 for number in sequences]
    in_groups(tmp_path, {"sequence": sequences, "step": steps, "token_id": list(range(60))}, 10)
    from trustrl.tools.report import shown_completions

    groups = []
    decided = shown_completions.decided
    monkeypatch.setattr(shown_completions, "decided", lambda parts: groups.extend(parts) or decided(parts))
    listed = shown(tmp_path, max_shown=15)
    assert [one.columns and len(one.columns["token_id"]) for one in listed].count(15) == 1
    (sequence,) = (one.completion.sequence for one in listed if one.columns)
    assert [len(part.groups) for part in groups] == [2]
    assert all(
        one.columns["token_id"] == list(range(15 * sequence, 15 * sequence + 15)) for one in listed if one.columns
    )


def test_of_many_sequences_those_that_lead_by_a_measure_are_shown(tmp_path, monkeypatch):
    """Few of them become objects, and those are the ones that all of them as objects would give."""
    from trustrl.tools.report import shown_completions

    write_records(tmp_path, drawn(1, 900, sequences=300))
    monkeypatch.setattr(shown_completions, "MAX_SEQUENCES", 20)
    every = shown(tmp_path)
    monkeypatch.setattr(shown_completions, "MOST_TURNS", 40)
    made = []
    monkeypatch.setattr(
        shown_completions, "_other", lambda *about, other=shown_completions._other: made.append(1) or other(*about)
    )
    found = shown(tmp_path)
    # The worst by three measures in turn, and a drawn one, which differs with the number that is drawn.
    assert [one.score for one in found[:3]] == [one.score for one in every[:3]]
    assert len(found) == 20
    assert len(made) < 200 < 270 < len(read(tmp_path).scores)


def test_no_records_are_none(tmp_path):
    assert read(tmp_path / "nowhere") is None


def test_a_file_that_is_not_whole_is_an_error(tmp_path):
    write_records(tmp_path, drawn(0, 10))
    (file,) = tmp_path.glob("*.parquet")
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(RecordError, match="complete Parquet file"):
        read(tmp_path)


def test_a_region_that_is_not_known_here_has_verdicts_too(tmp_path, monkeypatch):
    write_records(tmp_path, {"kept": [False, True]})
    monkeypatch.setattr(module, "config_from_dict", lambda plain: (_ for _ in ()).throw(TypeError))
    assert read(tmp_path).verdicts["stopped"] == 1


def test_each_file_is_opened_once_for_its_rows_and_once_for_the_sample(tmp_path, monkeypatch):
    from trustrl.recording import storage

    for step in range(20):
        write_records(tmp_path, drawn(step, 30), step=step)
    opened, readable = Counter(), storage.readable

    def counted(file):
        opened[file.name] += 1
        return readable(file)

    monkeypatch.setattr(storage, "readable", counted)
    monkeypatch.setattr(module, "MAX_ROWS", 300)
    assert read(tmp_path).num_read == 300
    assert sorted(opened.values()) == [1] * 10 + [2] * 10  # rows of all, columns of every second


def test_small_files_share_a_table_and_large_ones_do_not(tmp_path, monkeypatch):
    for step in range(6):
        write_records(tmp_path, drawn(step, 30), step=step)
    whole = read(tmp_path)
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 1)
    alone = read(tmp_path)
    assert (alone.verdicts, alone.points, alone.scores) == (whole.verdicts, whole.points, whole.scores)
    assert len(list(module.decided([module.Part(file, [0]) for file in module.record_files([str(tmp_path)])]))) == 6
