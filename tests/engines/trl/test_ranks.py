"""Two processes, each with its share of a batch, give the gradients and the rates of one process with all of it.

DDP is tested as accelerate sets it up, FSDP2 by applying `fully_shard` to the model by hand: on a CPU accelerate runs
DDP where FSDP2 is asked for.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

from safetensors.torch import load_file

from support import trl_ranks_worker as work, trl_world as world
from support.devices import ON_GPU, need_ranks
from support.rendezvous import python_path
from trustrl.recording import read, read_sequences

LARGEST_ERROR = 1e-6
WORKER = Path(work.__file__)

pytestmark = pytest.mark.xdist_group("ranks")


class TwoRanks:
    """What both processes saved."""

    def __init__(self, folder):
        self.folder = folder

    def tensors(self, name, rank=0):
        return load_file(self.folder / f"{name}, rank {rank}.safetensors")

    def logged(self, name, rank=0):
        return json.loads((self.folder / f"{name}, rank {rank}.json").read_text())


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """One launch for all cases: most of its time is imports."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", WORKER, folder]
    # `accelerate launch --cpu --num_processes 2` would start one process; the worker asserts that there are two.
    environment = os.environ | {"PYTHONPATH": python_path()} | ({} if ON_GPU else {"ACCELERATE_USE_CPU": "true"})
    need_ranks(2)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-5000:]
    return TwoRanks(folder)


@pytest.fixture(scope="module")
def one_process():
    """(gradients, rates) of a region's loss on the whole batch."""
    found = {}

    def run(name, average):
        if (name, average) not in found:
            found[name, average] = work.run(name, average)
        return found[name, average]

    return run


def check_acts(name, rates):
    """The comparison means something only where the region does something."""
    acted = "trustrl/projected_share" if name == "troll" else "trustrl/masked_share"
    assert 0.05 < rates[acted] < 0.95, f"{acted} is {rates[acted]:.3g}"


@pytest.mark.parametrize("average", work.AVERAGES)
@pytest.mark.parametrize("name", work.REGIONS)
def test_ddp_gives_the_gradients_of_one_process(two_ranks, one_process, name, average):
    wanted, rates = one_process(name, average)
    check_acts(name, rates)
    for rank in (0, 1):
        error = world.error(two_ranks.tensors(f"{name}, {average}, ddp", rank), wanted)
        assert error <= LARGEST_ERROR, f"rank {rank} is off by {error:.2e}"


@pytest.mark.parametrize("average", work.AVERAGES)
@pytest.mark.parametrize("name", work.REGIONS)
def test_ddp_logs_the_rates_of_one_process_on_both_ranks(two_ranks, one_process, name, average):
    _, wanted = one_process(name, average)
    for rank in (0, 1):
        found = two_ranks.logged(f"{name}, {average}, ddp", rank)
        assert found.keys() == wanted.keys()
        wrong = {
            key: (found[key], wanted[key])
            for key in wanted
            if found[key] != pytest.approx(wanted[key], rel=1e-5, abs=1e-6)
        }
        assert not wrong, f"rank {rank}, (found, wanted): {wrong}"
    assert wanted["trustrl/tokens"] == sum(work.LENGTHS)
    assert wanted["trustrl/loss_weight"] == pytest.approx(1.0)
    assert wanted["trustrl/gap_max"] > 0 > wanted["trustrl/gap_min"]


@pytest.mark.parametrize("sharding", work.SHARDINGS)
@pytest.mark.parametrize("name", work.REGIONS)
def test_fully_shard_by_hand_gives_the_gradients_of_one_process(two_ranks, one_process, name, sharding):
    wanted, rates = one_process(name, "dapo")
    check_acts(name, rates)
    error = world.error(two_ranks.tensors(f"{name}, dapo, {sharding}"), wanted)
    assert error <= LARGEST_ERROR, f"off by {error:.2e}"


def test_ranks_keep_the_same_weights_through_trls_own_loop(two_ranks):
    """A forward pass beside DDP's hooks would let them drift apart."""
    first, second = (two_ranks.tensors("trained", rank) for rank in (0, 1))
    assert first.keys() == second.keys()
    assert all((first[name] == second[name]).all() for name in first)
    history = two_ranks.logged("trained")
    assert len(history) == 4
    assert [entry["trustrl/sequences"] for entry in history] == [8] * 4


def test_ranks_of_a_stock_run_record_their_shares_of_a_group(two_ranks):
    """Both ranks' files, and TRL's own log over both."""
    tokens, rows = read(two_ranks.folder / "stock"), read_sequences(two_ranks.folder / "stock").to_pylist()
    history = two_ranks.logged("recorded")
    assert sorted(row["rank"] for row in rows) == [0] * 4 + [1] * 4
    assert len({row["sequence"] for row in rows}) == 8
    assert len({row["group"] for row in rows}) == 1, "one prompt, on both ranks"
    assert sum(row["reward"] for row in rows) / 8 == pytest.approx(history[0]["reward"])
    for step, logged in enumerate(history):
        assert tokens["entropy"][tokens["step"] == step].mean().item() == pytest.approx(logged["entropy"], rel=1e-5)
    first, second = (two_ranks.tensors("recorded", rank) for rank in (0, 1))
    assert all((first[name] == second[name]).all() for name in first)
