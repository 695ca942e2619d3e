"""π' of a batch's first update is its own forward pass: the same training as with a separate pass, on fewer sequences."""

from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from torch import nn
from transformers import LlamaConfig
from verl.utils import tensordict_utils as tu

from support import regions_oracle as oracle, verl_world as world
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl import first_update

CASES = ("binary on π', bypassed", "top-K on π'", "TROLL on π'", "exact TV on π'", "both anchors, bypassed",
         "TROLL on π', truncated")  # fmt: skip
ROWS = 24

pytestmark = pytest.mark.xdist_group("first update")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    if version_of("verl") < (0, 9, 1):
        pytest.skip("verl 0.9.0's workers need flash-attention")
    folder = tmp_path_factory.mktemp("first")
    on_ranks("verl_first_update.py", 2, oracle.tiny_model(folder / "model"), folder / "found")
    return torch.load(folder / "found", weights_only=False)


@pytest.mark.parametrize("mini_batches", [1, 2, 4])
@pytest.mark.parametrize("name", CASES)
def test_training_is_the_same_with_fewer_sequences_passed(found, name, mini_batches):
    ours, separate = found[name, mini_batches, "update"], found[name, mini_batches, "pass"]
    assert len(ours["gradients"]) == len(separate["gradients"]) == mini_batches
    for one, other in zip(ours["gradients"], separate["gradients"], strict=True):
        assert other.norm() > 0
        assert world.error(one, other) <= 1e-5
    assert all(torch.equal(*pair) for pair in zip(ours["keep"], separate["keep"], strict=True))
    told = {key: value for key, value in separate["metrics"].items() if "trustrl/" in key}
    assert told
    for key, value in told.items():
        assert ours["metrics"][key] == pytest.approx(value, rel=1e-4, abs=1e-5), key
    assert separate["seen"] == {"with gradient": ROWS, "without": ROWS}
    assert ours["seen"] == {"with gradient": ROWS, "without": ROWS - ROWS // mini_batches}


@pytest.mark.parametrize("name", CASES)
def test_later_updates_are_measured_from_the_weights_before_the_first(found, name):
    """The weights have moved by then: with their own forward pass as π', no ratio would differ from 1."""
    metrics = found[name, 4, "update"]["metrics"]
    (largest,) = metrics["trustrl/ratio_max"]
    assert largest > 1.001
    (alone,) = found[name, 1, "update"]["metrics"]["trustrl/ratio_max"]
    if "behavior" not in (oracle.CASES | oracle.TRUNCATED)[name].region.needs().anchors:
        assert alone == 1  # exactly


def test_a_pass_takes_whole_micro_batches():
    data = torch.zeros(12, 1)
    first = torch.tensor([7, 2, 5, 0])
    assert first_update.rows_to_record(data, first, 1).tolist() == [1, 3, 4, 6, 8, 9, 10, 11]
    assert first_update.rows_to_record(data, first, 3).tolist() == [1, 3, 4, 6, 7, 8, 9, 10, 11]
    assert first_update.rows_to_record(data, torch.arange(12), 3).tolist() == []


def engine(strategy="fsdp2", **config):
    module = nn.Linear(1, 1)
    module.config = LlamaConfig(**config)
    return SimpleNamespace(module=module, engine_config=SimpleNamespace(strategy=strategy))


def batch(**settings):
    return tu.get_tensordict({"x": torch.zeros(2, 1)}, non_tensor_dict=settings)


def test_it_applies_where_both_passes_are_the_same():
    assert first_update.applies(engine(), batch(epochs=1))
    assert first_update.applies(engine("fsdp"), batch())
    assert not first_update.applies(engine(), batch(epochs=2))  # the second epoch needs π' of every sequence
    assert not first_update.applies(engine("megatron"), batch())
    assert not first_update.applies(engine(attention_dropout=0.1), batch())
    with_dropout = engine()
    with_dropout.module = nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.1))
    assert not first_update.applies(with_dropout, batch())
