"""Top-K and TROLL on the sampler's record, through prime-rl's packing, wire, loader, sharded output layer and loss."""

import pytest

pytest.importorskip("prime_rl.trainer.rl.loss")

import msgspec
import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from support import prime_rl_on_cpu, regions_oracle as oracle

prime_rl_on_cpu.install()

from prime_rl.configs.trainer import CustomLossConfig
from prime_rl.trainer.models.layers import lm_head
from prime_rl.trainer.rl import loss
from prime_rl.trainer.rl.data import DataLoader
from prime_rl.transports.rollouts.types import MicroBatch

from support.fsdp2_shardings import whole
from support.prime_rl_world import packed, samples
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.prime_rl.sampled_topk import table_of, topk_of
from trustrl.engines.prime_rl.vocabulary import _TRAINER
from trustrl.errors import ConfigError, EngineError, MissingDataError
from trustrl.regions.loading import config_to_dict

PATH = "trustrl.engines.prime_rl.vocabulary.region_loss"
CASES = {name: oracle.CASES[name] for name in ("top-K on μ", "top-K KL on μ", "TROLL on μ")}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    store = tmp_path_factory.mktemp("group") / "store"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield oracle.tiny_model(tmp_path_factory.mktemp("model"))
    torch.distributed.destroy_process_group()


def loaded(samples):
    """prime-rl's micro-batches, packed, sent, and made tensors of."""
    (only,) = packed(samples)
    sent = msgspec.msgpack.Encoder().encode(only)
    loader = object.__new__(DataLoader)  # its __init__ connects to an orchestrator
    received = msgspec.msgpack.Decoder(type=list[MicroBatch]).decode(sent)
    return [loader._micro_batch_to_tensor(micro_batch) for micro_batch in received]


def sharded(folder):
    """The moved policy with prime-rl's output layer, sharded as its `setup_fsdp` does."""
    model = oracle.model_of(folder, oracle.GROWTH)
    lm_head.get_logger = lambda: type("Logger", (), {"info": staticmethod(lambda *args: None)})
    lm_head.inject_prime_lm_head(model, chunk_size=16)
    mesh = init_device_mesh("cpu", (1,))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard([model.lm_head, model.model.norm], mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    return model


def step(model, micro_batches, rl_loss_fn):
    """The lines of prime-rl's `train` from a batch to its gradient. Returns the loss."""
    total, scale = 0.0, sum(int(x["loss_mask"].sum()) for x in micro_batches)
    for x in micro_batches:
        assert x["routed_experts"] is None  # nothing for the router
        out = model(
            input_ids=x["input_ids"], position_ids=x["position_ids"], use_cache=False,
            labels=loss.shift_tensor_left(x["input_ids"]), temperature=x["temperatures"],
        )  # fmt: skip
        out = lm_head.cast_float_and_contiguous(out)
        logp = loss.shift_tensor_right(out["logprobs"], pad_value=-4.0)

        lengths = x["sequence_lengths"]

        def split(tensor, lengths=lengths):
            return tensor.squeeze().split(lengths)

        value, metrics = loss.compute_loss(
            trainer_logprobs=split(logp), inference_logprobs=split(x["inference_logprobs"]), ref_logprobs=None,
            advantages=split(x["advantages"]), loss_mask=split(x["loss_mask"]), rl_weights=None, ce_weights=None,
            ref_kl_weights=None, rl_loss_fn=rl_loss_fn, rl_scale=scale, ce_scale=1, ref_kl_scale=1,
        )  # fmt: skip
        value.backward()
        total += value.item()
        assert {"is_masked", "trustrl/masked_share"} <= set(metrics)
    return total


def chosen(**kwargs):
    return loss.setup_rl_loss_fn(CustomLossConfig(import_path=PATH, kwargs=kwargs))


@pytest.mark.parametrize("name", CASES)
def test_prime_rls_step_has_the_loss_and_gradient_of_a_direct_computation(name, model):
    case = CASES[name]
    loss_fn = chosen(**config_to_dict(case.region))
    micro_batches = loaded(samples(model))
    assert len(micro_batches) > 1
    assert max(len(x["sequence_lengths"]) for x in micro_batches) > 1
    policy = sharded(model)
    total = step(policy, micro_batches, loss_fn)
    wanted = oracle.expected(model, 1, case)
    assert total == pytest.approx(wanted.loss, rel=0, abs=2e-6)  # tokens' terms of up to 4 cancel
    largest = max(x.abs().max() for x in wanted.by_name.values())
    errors = {
        parameter: ((whole(p.grad) - wanted.by_name[parameter]).abs().max() / largest).item()
        for parameter, p in policy.named_parameters()
    }
    assert not _TRAINER.loaded
    assert max(errors.values()) <= 1e-5


def test_the_table_keeps_every_bit():
    g = np.random.default_rng(0)
    logp = -np.sort(g.exponential(5, (7, 4)).astype(np.float32))
    record = SampledRecord(
        tokens=np.arange(7, dtype=np.int32), logp=logp[:, 0], topk_ids=g.integers(0, 150_000, (7, 4)), topk_logp=logp
    )
    table = table_of(record, 3)
    assert (table.shape, table.dtype) == ((10, 2, 4), np.int32)
    ids, found = topk_of(torch.from_numpy(table))
    assert np.array_equal(ids[3:], record.topk_ids)
    assert np.array_equal(found[3:].numpy().view(np.int32), logp.view(np.int32))
    assert not ids[:3].any()


def test_experts_in_the_field_are_refused():
    experts = torch.randint(1, 200, (6, 2, 8), dtype=torch.int32)
    with pytest.raises(EngineError, match="enable_return_routed_experts=false"):
        topk_of(experts)
    with pytest.raises(EngineError, match="enable_return_routed_experts=false"):
        topk_of(torch.zeros(6, 24, 8, dtype=torch.int32))


def test_a_batch_without_the_samplers_top_k_is_refused(model):
    loss_fn = chosen(**config_to_dict(CASES["top-K on μ"].region))
    with pytest.raises(MissingDataError, match="must hold the sampler's top K, got none"):
        step(sharded(model), loaded(samples(model, lambda record, before: None)), loss_fn)
    _TRAINER.loaded.clear()


def test_another_k_than_the_samplers_is_refused(model):
    loss_fn = chosen(preset="dppo-topk-tv", divergence={"k": 20})
    with pytest.raises(ConfigError, match="with k = 8, which the sampler recorded, got 20"):
        step(sharded(model), loaded(samples(model)), loss_fn)
    _TRAINER.loaded.clear()


@pytest.mark.parametrize(
    "kwargs",
    [
        {"preset": "dppo-binary-tv"},
        {"preset": "dppo-topk-tv", "anchor": "proximal"},
        {"preset": "troll"},
        {"preset": "troll", "anchor": "behavior", "rest": "fill"},
        {"preset": "dppo-full-tv"},
    ],
    ids=lambda kwargs: " ".join(kwargs.values()),
)
def test_regions_that_this_loss_cannot_feed_are_refused(kwargs, model):
    with pytest.raises(ConfigError, match="must describe a Top-K region or TROLL anchored on the sampler alone"):
        step(sharded(model), loaded(samples(model)), chosen(**kwargs))
    _TRAINER.loaded.clear()
