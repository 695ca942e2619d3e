"""Every kind of region in a real verl training worker: its gradient and its metrics against plain models."""

import json
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("verl")

import torch
from verl.workers.utils.losses import ppo_loss

import trustrl
from support import recording_batches as batches, regions_oracle as oracle, verl_world as world
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl import RegionWorker
from trustrl.recording import Recorder, Recording, read

pytestmark = pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")

SETUPS = {
    "one rank": (1, {}),
    "two ranks": (2, {}),
    "no padding, recomputed activations": (1, {"remove_padding": True, "checkpointing": True}),
    "FSDP1": (2, {"strategy": "fsdp"}),
    "Ulysses": (2, {"remove_padding": True, "ulysses": 2}),
    "LoRA": (2, {"lora_rank": 4, "checkpointing": True}),
}

BYTES = {
    "binary on π', bypassed": 4,
    "both anchors, bypassed": 4,
    "top-K on π'": 8 * oracle.K + 8,
    "TROLL on π'": 8 * oracle.K + 8,
    "exact TV on π'": 4 * oracle.HIDDEN + 8,
    "TROLL on π', truncated": 8 * oracle.K + 8,
    "both anchors, truncated": 4,
}
"""What a rank keeps for each response token it has, on any number of ranks; nothing of it leaves the rank."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


def run(model, folder, ranks, how):
    on_ranks("verl_regions.py", ranks, model, folder / "found", json.dumps(how))
    return torch.load(folder / "found", weights_only=False)


@pytest.mark.parametrize("setup", [name for name in SETUPS if name != "LoRA"])
def test_a_worker_trains_with_every_kind_of_region(setup, model, tmp_path):
    """Micro-batches, one of them without a token in the loss; ranks; both anchors; verl's KL and entropy terms."""
    ranks, how = SETUPS[setup]
    found = run(model, tmp_path, ranks, how)
    ranks //= how.get("ulysses", 1)  # the others hold the same sequences
    cases = oracle.CASES | oracle.TRUNCATED
    refused = {name for name, case in cases.items() if setup == "FSDP1" and case.region.needs().full}
    assert found.keys() == cases.keys() - refused
    for name, ours in found.items():
        wanted = oracle.expected(model, ranks, cases[name])
        metrics = wanted.metrics
        assert world.error(ours["gradient"], wanted.gradient) <= (5e-6 if "ulysses" in how else 1e-5), name
        reported = {key: value for key, value in metrics.items() if key in ours["metrics"]}
        assert {"trustrl/tokens", "trustrl/masked_share", "trustrl/gap_max", "trustrl/log_ratio_p99"} <= reported.keys()
        for key, value in reported.items():
            assert ours["metrics"][key] == [pytest.approx(value, rel=1e-4, abs=1e-5)], (name, key)
        assert ours["metrics"]["actor/pg_clipfrac"] == [pytest.approx(_stopped(metrics), abs=1e-6)]
        if cases[name].settings.get("use_kl_loss"):
            assert {"kl_loss", "kl_coef", "actor/entropy_loss"} <= ours["metrics"].keys()
        assert ours["bytes_per_token"] == BYTES.get(name, 0), name
        if ranks == 1 and name in oracle.AGREEING:
            oracle.check_agreement(name, ours["keep"], ours["weight"])  # the same as in TRL


def _stopped(metrics):
    return metrics["trustrl/masked_share_increase"] + metrics["trustrl/masked_share_decrease"]


def test_an_adapter_gets_the_same_gradient_from_verls_forward_pass_and_ours(model, tmp_path):
    ranks, how = SETUPS["LoRA"]
    found = run(model, tmp_path, ranks, how)
    sampled, topk, proximal = (found[name]["gradient"] for name in ("sampled", "top-K", "top-K on π'"))
    assert len(sampled) < 10_000  # the adapters alone are trained
    assert sampled.norm() > 0
    assert world.error(topk, sampled) <= 1e-5
    assert world.error(proximal, sampled) > 1e-3  # another anchor has other ratios: the comparison can fail


def test_a_checkpoint_knows_its_region(model, tmp_path):
    on_ranks("verl_checkpoint.py", 2, model, tmp_path)
    assert json.loads((tmp_path / "trustrl_region.json").read_text()) == trustrl.config_to_dict(
        trustrl.preset("dppo-binary-tv")
    )
    said = json.loads((tmp_path / "said.json").read_text())
    assert said["the same"] == said["none"] == []
    (another,) = said["another"]
    assert '"kind": "binary-tv"' in another
    assert "training resumes with" in another


@pytest.mark.parametrize(
    ("preset", "engine", "says"),
    [
        ("dppo-topk-tv", {"strategy": "torchtitan"}, "strategy must be fsdp2, fsdp, veomni or megatron"),
        ("dppo-topk-tv", {"strategy": "megatron", "use_megatron_fsdp": True}, "use_megatron_fsdp must be False"),
        (
            "dppo-binary-tv",
            {"strategy": "megatron", "dynamic_context_parallel": True},
            "dynamic_context_parallel must be False",
        ),
        ("troll", {"use_fused_kernels": True}, "use_fused_kernels must be False"),
        ("dppo-full-tv", {}, "region.anchor must be proximal"),
    ],
)
def test_a_worker_refuses_what_the_launcher_would_have_refused(preset, engine, says):
    """For runs that were started without it; the engine is made by hand, since none of these runs here."""
    worker = object.__new__(RegionWorker)
    worker._rank = 0  # verl's own __init__ sets it, and starts a process group
    worker.engine = SimpleNamespace(is_mp_src_rank_with_outputs=lambda: True, get_data_parallel_rank=lambda: 0)
    worker.engine_config = SimpleNamespace(**{"strategy": "fsdp2", "use_fused_kernels": False} | engine)
    worker.model_config = SimpleNamespace()
    with pytest.raises(trustrl.errors.ConfigError, match=says):
        worker.set_loss_fn(partial(ppo_loss, config=world.actor(f"trustrl-{preset}")))


def test_a_worker_that_records_no_more_after_a_change_of_layout_ends_its_record(tmp_path, monkeypatch):
    recorder = Recorder(Recording(folder=tmp_path, sample=1.0, triggers=()), batches.REGION, rank=3)
    for step in range(1, 5):
        batches.give(recorder, batches.batch(seed=step, first=8 * step), step=step)
    worker = object.__new__(RegionWorker)
    worker._rank, worker._region, worker._num_steps = 3, None, 2
    worker.engine = SimpleNamespace(is_mp_src_rank_with_outputs=lambda: False)
    monkeypatch.setattr(RegionWorker, "_train_as_verl", lambda self, data: None)
    assert worker._recorder_of(Recording(folder=tmp_path), {}) is None
    for _ in range(2):
        worker.train_mini_batch(None)
    assert sorted(set(read(tmp_path)["step"].tolist())) == [1, 2]
