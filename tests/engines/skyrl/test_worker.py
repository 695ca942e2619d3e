"""SkyRL's own workers on Ray: the loss reaches them through its registry actor, and its `forward_backward` calls it."""

import os

import pytest

pytest.importorskip("skyrl")

import ray
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import make_config

from support import regions_oracle as oracle, skyrl_world as world
from support.rendezvous import python_path
from trustrl.engines import skyrl as engine
from trustrl.regions.loading import config_to_dict

RANKS = 2
NAMES = ["binary on μ", "binary on π'", "both anchors"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return oracle.tiny_model(tmp_path_factory.mktemp("model"))


def algorithm(region):
    settings = config_to_dict(region)
    return engine.RegionAlgorithmConfig(
        policy_loss_type="trustrl", region=settings, temperature=oracle.TEMPERATURE, use_kl_loss=False, metrics="all"
    )


@pytest.fixture(scope="module")
def workers(model, tmp_path_factory):
    """Registered in this process before Ray runs, carried by SkyRL's `sync_registries`, as its `initialize_ray` does."""
    from support.skyrl_worker import Worker

    os.environ["PYTHONPATH"] = python_path()  # Ray's processes find test modules by what they inherit
    ray.init(
        address="local", num_cpus=RANKS, include_dashboard=False, _node_ip_address="127.0.0.1", log_to_driver=False
    )
    ppo_utils.sync_registries()
    settings = make_config(algorithm_cls=engine.RegionAlgorithmConfig)().trainer
    settings.algorithm = algorithm(oracle.CASES[NAMES[0]].region)
    settings.micro_train_batch_size_per_gpu = 2
    meeting = tmp_path_factory.mktemp("ranks") / "meeting"
    made = [
        ray.remote(Worker).remote(
            cfg=settings, world_size=RANKS, rank=rank, local_rank=rank, master_addr="127.0.0.1", master_port=1,
            sequence_parallel_size=1,
        )
        for rank in range(RANKS)
    ]  # fmt: skip
    ray.get([worker.init_model.remote(model, str(meeting)) for worker in made])
    yield made
    ray.shutdown()


def shards(model, reduction="token_mean"):
    """Each rank's part of one mini-batch, its advantages divided by SkyRL's trainer over all ranks."""
    parts = [oracle.batch(model, rank) for rank in range(RANKS)]
    advantages = torch.cat([part.advantages for part in parts])
    in_loss = torch.cat([part.in_loss for part in parts]).long()
    divided = ppo_utils.apply_loss_reduction_to_advantages_minibatch(advantages, in_loss, reduction, 2, 64)
    for part, its in zip(parts, divided.split(oracle.ROWS), strict=True):
        data = TrainingInputBatch(
            {
                "sequences": torch.cat([part.prompts, part.responses], 1),
                "attention_mask": torch.cat([torch.ones_like(part.prompts), part.in_sequence.long()], 1),
                "response_mask": part.in_sequence.long(), "loss_mask": part.in_loss.long(), "advantages": its,
                "action_log_probs": part.proximal_logp, "rollout_logprobs": part.behavior_logp,
            }
        )  # fmt: skip
        data.metadata = {"response_length": oracle.RESPONSE}
        yield data


@pytest.mark.parametrize("name", NAMES)
def test_skyrls_workers_reach_the_agreed_verdicts_and_the_whole_batchs_gradient(name, workers, model):
    """Three micro-batches on each of two ranks, one of them without a token; FSDP would average the gradients."""
    region = oracle.CASES[name].region
    found = ray.get(
        [worker.update.remote(data, algorithm(region)) for worker, data in zip(workers, shards(model), strict=True)]
    )
    assert {one["loss"] for one in found} == {"<RegionLoss trustrl>"}
    oracle.check_agreement(name, found[0]["keep"], found[0]["weight"])
    wanted = oracle.expected(model, RANKS, oracle.CASES[name])
    assert found[0]["keep"] + found[1]["keep"] == wanted.keep
    gradient = torch.stack([one["gradient"] for one in found]).mean(0)
    assert world.error(gradient, wanted.gradient) <= 3e-6
    metrics = found[0]["metrics"]
    assert metrics == found[1]["metrics"]
    assert metrics["loss_metrics/trustrl/ratio_max"] == pytest.approx(wanted.metrics["trustrl/ratio_max"], rel=1e-5)
    assert metrics["loss_metrics/trustrl/tokens"] == pytest.approx(len(wanted.keep) / 6)


def test_what_is_registered_while_ray_runs_reaches_workers_too(workers):
    @ray.remote
    def asked(name):
        return repr(ppo_utils.PolicyLossRegistry.get(name))

    for name in engine.registered():
        ppo_utils.PolicyLossRegistry.unregister(name)
    with pytest.raises(ray.exceptions.RayTaskError, match="Unknown policy loss 'trustrl-spo'"):
        ray.get(asked.remote("trustrl-spo"))
    engine.register()
    assert ray.get(asked.remote("trustrl-spo")) == "<RegionLoss trustrl-spo>"
    assert "trustrl-spo" in engine.registered()
