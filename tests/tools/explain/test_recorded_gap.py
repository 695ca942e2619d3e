"""Recorded tokens: temperature or other weights, and the class of tokens that carries the gap."""

import math
import random
import sys

import pytest

from support.explained_runs import MISMATCH, names, run_of
from support.run_folders import sealed, write_records
from trustrl.errors import RecordError
from trustrl.tools.explain.explanation import explain
from trustrl.tools.explain.recorded_gap import FIRST_STEPS, tokens_of

pytest.importorskip("pyarrow")


def sampled(scale, *, count=400, ids=8, noise=0.0, seed=0):
    """Log-probs of tokens drawn from softmax(scale · logits), and the trainer's, whose logits may have noise of their own."""
    draw = random.Random(seed)
    sampler, trainer = [], []
    for _ in range(count):
        logits = [draw.gauss(0, 2) for _ in range(ids)]
        ours = [scale * one for one in logits]
        theirs = [one + draw.gauss(0, noise) for one in logits]
        mine, other = (math.log(sum(map(math.exp, side))) for side in (ours, theirs))
        token = draw.choices(range(ids), [math.exp(one - mine) for one in ours])[0]
        sampler.append(ours[token] - mine)
        trainer.append(theirs[token] - other)
    return {"behavior_logp": sampler, "proximal_logp": trainer}


def with_gap(folder, gap, **more):
    return run_of(lambda row: {MISMATCH: gap}, records=(str(folder),), **more)


@pytest.mark.parametrize("temperature", [0.6, 0.8, 1.4])
def test_records_show_a_temperature_of_any_size(tmp_path, temperature):
    write_records(tmp_path, sampled(1 / temperature))
    (found,) = explain(with_gap(tmp_path, 2.0)).causes
    assert found.name == "wrong temperature"
    assert found.confidence > 0.5


def test_records_show_a_temperature_below_the_noise_of_half_precision(tmp_path):
    assert names(run_of(lambda row: {MISMATCH: 0.03}, dtype="bfloat16")) == []
    write_records(tmp_path, sampled(1 / 0.9))
    assert names(with_gap(tmp_path, 0.03, dtype="bfloat16")) == ["wrong temperature"]


@pytest.mark.parametrize("noise", [0.5, 2.0])
def test_records_show_other_weights_of_any_size(tmp_path, noise):
    write_records(tmp_path, sampled(1.0, noise=noise))
    assert names(with_gap(tmp_path, 0.2)) == ["tied head not synced"]


def test_the_first_tokens_are_those_of_the_first_steps_of_a_merged_file(tmp_path):
    """The temperature is wrong at the start alone; later steps of the file do not count."""
    pq = pytest.importorskip("pyarrow.parquet")
    first, later = sampled(1 / 0.6, count=200), sampled(1.0, count=800, seed=1)
    columns = {name: first[name] + later[name] for name in first}
    write_records(tmp_path, columns | {"step": [0] * 200 + [FIRST_STEPS + 100] * 800})
    (file,) = tmp_path.glob("*.parquet")
    merged = tmp_path / f"step-00000000-{FIRST_STEPS + 100:08d}.rank-0000.parquet"
    pq.write_table(pq.read_table(file), merged, row_group_size=300)
    sealed(merged)
    file.unlink()
    assert len(tokens_of(with_gap(tmp_path, 2.0))["behavior_logp"]) == 200
    assert len(tokens_of(with_gap(tmp_path, 2.0), newest=True)["behavior_logp"]) == 100  # the last row group
    assert names(with_gap(tmp_path, 2.0)) == ["wrong temperature"]


def test_records_that_cannot_be_read_are_said(tmp_path):
    (tmp_path / "step-00000000.rank-0000.parquet").write_bytes(b"no Parquet")
    with pytest.raises(RecordError, match=r"step-00000000\.rank-0000\.parquet"):
        explain(with_gap(tmp_path, 0.2))


def test_without_pyarrow_records_leave_the_metrics_to_speak(tmp_path, monkeypatch):
    write_records(tmp_path, sampled(1 / 0.8))
    for name in [name for name in sys.modules if name.split(".")[0] == "pyarrow"]:
        monkeypatch.setitem(sys.modules, name, None)
    assert names(with_gap(tmp_path, 2.0)) == ["tied head not synced"]


def tokens(count=100, *, gap, **columns):
    """Tokens whose trainer differs from the sampler by `gap(i)` nats."""
    sampler = columns.pop("behavior_logp", [-1.0] * count)
    trainer = [one - gap(at) for at, one in enumerate(sampler)]
    return {"behavior_logp": sampler, "proximal_logp": trainer, **columns}


def classes(folder, columns):
    write_records(folder, columns)
    found = explain(with_gap(folder, 0.2))
    return {(one.by, one.name): one for one in found.gap}, found.causes[0].reason


def test_rare_tokens_that_carry_the_gap_are_named_with_their_shares(tmp_path):
    rare = [-6.0 if at % 10 == 0 else -0.1 for at in range(100)]
    found, reason = classes(tmp_path, tokens(gap=lambda at: 1.0 if at % 10 == 0 else 0.01, behavior_logp=rare))
    assert "Tokens with probability 0.001 to 0.01 carry 92% of the gap and are 10% of the tokens." in reason
    one = found["probability", "0.001 to 0.01"]
    assert (one.tokens, one.token_share) == (10, 0.1)
    assert one.gap_share == pytest.approx(10 / 10.9)
    assert one.mean == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("column", "values", "by", "name"),
    [
        pytest.param("token_id", [7 if at < 20 else at for at in range(100)], "token id", "7", id="special id"),
        pytest.param("position", [0 if at < 20 else 30 for at in range(100)], "position", "below 1", id="first token"),
        pytest.param("turn", [1 if at < 20 else 0 for at in range(100)], "turn", "1", id="second turn"),
        pytest.param("sampler_version", [3 if at < 20 else 5 for at in range(100)], "age", "2", id="old weights"),
    ],
)
def test_the_class_that_carries_the_gap_is_named(tmp_path, column, values, by, name):
    same = {"position": [5] * 100} | {column: values}
    _, reason = classes(tmp_path, tokens(gap=lambda at: 1.0 if at < 20 else 0.001, **same))
    assert f"Tokens with {by} {name} carry 100% of the gap and are 20% of the tokens." in reason


def test_a_gap_that_is_everywhere_is_laid_on_no_class(tmp_path):
    found, reason = classes(tmp_path, tokens(gap=lambda at: 0.3 if at % 2 else 0.2, token_id=list(range(100))))
    assert "No class of tokens" in reason
    assert len([one for one in found.values() if one.by == "token id"]) == 5
    assert sum(one.gap_share for one in found.values() if one.by == "position") == pytest.approx(1.0)


def test_stale_weights_are_shown_by_the_last_records(tmp_path):
    for step in range(20):
        gap = (lambda at: 1.0 if at < 20 else 0.0) if step >= 12 else (lambda at: 0.0)
        write_records(tmp_path, tokens(gap=gap, token_id=[7 if at < 20 else at for at in range(100)]), step=step)
    run = run_of(lambda row: {MISMATCH: 0.01 * ((row["step"] - 1) // 4)}, records=(str(tmp_path),))
    (found,) = explain(run).causes
    assert found.name == "stale weights"
    assert "Tokens with token id 7 carry 100% of the gap" in found.reason


def test_without_records_the_reason_says_so():
    (found,) = explain(run_of(lambda row: {MISMATCH: 0.2})).causes
    assert "Without token records" in found.reason
