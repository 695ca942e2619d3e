"""Pieces of a file: nothing lost, no sequence cut, whatever the size asked for."""

import pytest

pytest.importorskip("pyarrow")

import torch
from hypothesis import given, settings, strategies as st

import trustrl
from support import recording_batches as batches
from trustrl.recording import Recorder, Recording, read, stream


def recorded(folder, *added):
    """One step of these (micro-batch, update) pairs."""
    recorder = Recorder(Recording(folder=folder, sample=1.0, ring_steps=0, triggers=()), batches.REGION, rank=0)
    for b, update in added:
        recorder.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=0, update=update)
    recorder.end_step(0, trustrl.merge([b.out.sums for b, _ in added]))
    return next(folder.glob("*.parquet"))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    first, second = batches.batch(seed=1), batches.batch(seed=2, first=100)
    return recorded(tmp_path_factory.mktemp("records"), (first, 0), (second, 0), (first, 1), (second, 1))


@given(rows=st.integers(1, 300))
@settings(max_examples=25, deadline=None)
def test_pieces_are_the_file_and_end_with_a_sequence(file, rows):
    whole, pieces = read(file), list(stream(file, rows=rows))
    for name in whole:
        joined = torch.cat([piece.columns[name] for piece in pieces])
        assert torch.equal(joined.nan_to_num(7.0), whole[name].nan_to_num(7.0)), name
    ends = [(int(p.columns["update"][-1]), int(p.columns["sequence"][-1])) for p in pieces]
    begins = [(int(p.columns["update"][0]), int(p.columns["sequence"][0])) for p in pieces]
    assert not set(zip(ends, begins[1:], strict=False)) & {(end, end) for end in ends}
    assert max(map(len, pieces)) <= rows + 16  # a sequence has up to 16 tokens


def test_the_same_sequence_at_two_updates_is_two_runs(file):
    (piece,) = stream(file)
    updates = torch.stack([piece.columns["update"].long(), piece.columns["sequence"]], 1)
    assert len(updates.unique(dim=0)) == piece.run[-1] + 1 == 32
    for run in piece.run.unique():
        assert len(updates[piece.run == run].unique(dim=0)) == 1


@pytest.mark.parametrize("rows", [2, 100])
def test_interleaved_sequences_are_brought_together_in_their_order(tmp_path, rows):
    ids = torch.tensor([7, 7, 9, 7, 9])
    rollout = trustrl.RolloutTokens(
        advantage=torch.arange(5.0), in_loss=torch.ones(5, dtype=torch.bool), behavior_logp=-torch.ones(5),
        sequence_ids=ids,
    )  # fmt: skip
    policy = trustrl.PolicyTokens(logp=-torch.ones(5))
    out = trustrl.policy_loss(policy, rollout, batches.REGION, reduction=trustrl.TokenSum())
    file = recorded(tmp_path, (batches.Batch(out, policy, rollout, ids), 0))
    pieces = list(stream(file, rows=rows))
    assert torch.cat([piece.columns["sequence"] for piece in pieces]).tolist() == [7, 7, 7, 9, 9]
    assert torch.cat([piece.columns["advantage"] for piece in pieces]).tolist() == [0, 1, 3, 2, 4]
    assert [len(piece.run.unique()) for piece in pieces] in ([2], [1, 1])


def test_only_columns_that_were_asked_for_are_read(file):
    (piece,) = stream(file, columns=["kept"])
    assert set(piece.columns) == {"kept", "step", "update", "sequence"}


def test_small_files_come_together_and_their_sequences_stay_apart(tmp_path):
    """Two runs with one seed give their sequences the same names."""
    b = batches.batch(seed=3, rows=1)
    files = [recorded(tmp_path / name, (b, 0)) for name in ("a", "b")]
    (piece,) = stream(files)
    assert len(piece) == 2 * int(b.rollout.in_loss.sum())
    assert piece.run.unique().tolist() == [0, 1]
