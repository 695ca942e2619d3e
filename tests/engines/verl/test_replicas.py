"""verl's worker on two ranks with sequences of three replicas: one that misses a weight sync is named in that step."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

import torch

from support import regions_oracle as oracle
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of
from trustrl.recording import read_sequences

FROZEN, STEPS = 3, 6

pytestmark = pytest.mark.xdist_group("replicas of a worker")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if version_of("verl") < (0, 9, 1):
        pytest.skip("verl 0.9.0's workers need flash-attention")
    folder = tmp_path_factory.mktemp("replicas")
    on_ranks("verl_replicas.py", 2, oracle.tiny_model(folder), folder)
    return folder


@pytest.fixture(scope="module")
def found(folder):
    return [torch.load(folder / f"found-{rank}", weights_only=False) for rank in range(2)]


def test_a_frozen_replica_is_named_one_step_later_by_one_rank_and_once(found):
    first, second = (rank["warn"] for rank in found)
    assert [len(step["said"]) for step in first] == [0] * FROZEN + [1] + [0] * (STEPS - FROZEN - 1)
    assert first[FROZEN]["said"][0].startswith("Replica b stands out at step 4: ")
    assert not any(step["said"] for step in second)


def test_metrics_count_it_in_every_step_and_tokens_that_say_that_they_are_old_are_not_compared(found):
    for rank in found:
        counts = [step["trustrl/stale_replicas"] for step in rank["warn"]]
        assert counts == [[0.0]] * FROZEN + [[1.0]] * (STEPS - FROZEN)
        gaps = [step["trustrl/replica_gap_max"][0] for step in rank["warn"]]
        assert max(gaps[:FROZEN]) < 0.005 < min(gaps[FROZEN:])


def test_every_rank_raises_in_the_same_step_if_asked_to(found):
    for rank in found:
        assert len(rank["raise"]) == FROZEN + 1
        said = rank["raise"][-1]["raised"]
        assert said.startswith("Replica b stands out at step 4: ")
        assert "policy_loss.on_stale_replica='warn'" in said


def test_the_record_names_the_replica_of_each_sequence(folder):
    rows = read_sequences(folder / "records").to_pylist()
    for rank, names in enumerate((("a", "b"), ("b", "c"))):
        here = [row["replica"] for row in rows if row["rank"] == rank]
        assert here.count(names[0]) == here.count(names[1]) == len(here) / 2 > 0
