"""Top-K, TROLL and penalties in SkyRL's own trainer, dispatch, FSDP2 workers and model wrapper, on Ray."""

import os

import pytest

pytest.importorskip("skyrl")

import ray
import torch
from skyrl.backends.skyrl_train.training_batch import TrainingInputBatch
from skyrl.train.config import make_config
from skyrl.train.config.config import MixedPrecisionConfig

import trustrl
from support import regions_oracle as oracle, skyrl_world
from support.regions_oracle import Case, _tight
from support.rendezvous import python_path
from support.skyrl_region_worker import Trainer
from trustrl import regions
from trustrl.engines import skyrl as engine
from trustrl.regions.loading import config_to_dict

RANKS = 2
PADDING = 2
"""Columns of padding before every prompt."""

CASES = {
    "top-K TV": oracle.CASES["top-K on π'"],
    "top-K TV, mean of sequences": Case(_tight(regions.TopKTV, anchor="proximal", k=oracle.K), "seq-mean-token-mean"),
    "top-K KL": Case(_tight(regions.TopKKL, anchor="proximal", k=oracle.K)),
    "TROLL": oracle.CASES["TROLL on π'"],
    "TROLL, fills": Case(trustrl.preset("troll", k=oracle.K, bound=0.01, rest="fill")),
    "TROLL, mean of sequences": Case(trustrl.preset("troll", k=oracle.K, bound=0.01), "seq-mean-token-mean"),
    "a penalty on μ": Case(trustrl.preset("ipo", log_ratio_penalty=0.3)),
}
LAYOUTS = {
    "rows": {},
    "tokens": {"max_tokens_per_microbatch": 24},
    "packed": {"remove_microbatch_padding": True},
}


def settings(model, case=None, **layout):
    config = make_config(algorithm_cls=engine.RegionAlgorithmConfig)()
    trainer = config.trainer
    trainer.policy.model.path = model
    trainer.policy.fsdp_config.mixed_precision = MixedPrecisionConfig(param_dtype="fp32")
    trainer.policy.optimizer_config.lr = 1e-3
    trainer.placement.colocate_all = False
    trainer.placement.policy_num_gpus_per_node = RANKS
    trainer.flash_attn, trainer.remove_microbatch_padding = False, False
    trainer.micro_train_batch_size_per_gpu, trainer.micro_forward_batch_size_per_gpu = 2, 4
    case = case or CASES["top-K TV"]
    trainer.algorithm = engine.RegionAlgorithmConfig(
        policy_loss_type="trustrl", region=config_to_dict(case.region), temperature=oracle.TEMPERATURE,
        use_kl_loss=False, loss_reduction="token_mean" if case.mode == "token-mean" else "sequence_mean",
    )  # fmt: skip
    for name, value in layout.items():
        setattr(trainer, name, value)
    return config


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    # SkyRL's micro-batches of padding hold ids below 100.
    return oracle.tiny_model(tmp_path_factory.mktemp("model"), vocab_size=128)


@pytest.fixture(scope="module")
def trainer(model):
    """SkyRL's trainer with the workers of two ranks built; nothing samples."""
    from transformers import AutoTokenizer

    os.environ["PYTHONPATH"] = python_path()  # Ray's processes find test modules by what they inherit
    ray.init(
        address="local", num_cpus=4, num_gpus=2, include_dashboard=False, _node_ip_address="127.0.0.1",
        log_to_driver=False,
    )  # fmt: skip
    from skyrl.backends.skyrl_train.utils import ppo_utils

    assert skyrl_world.engine is engine  # its import registered the regions
    ppo_utils.sync_registries()
    trainer = Trainer(settings(model), None, AutoTokenizer.from_pretrained(model), None, None, None)
    trainer.total_training_steps = 10
    trainer.build_models(None, None, None)
    yield trainer
    ray.shutdown()


def training_input(model):
    """All ranks' sequences as SkyRL's trainer has them."""
    parts = [oracle.batch(model, rank) for rank in range(RANKS)]
    rows = [
        {
            "sequences": torch.nn.functional.pad(torch.cat([part.prompts, part.responses], 1), (PADDING, 0)),
            "attention_mask": torch.nn.functional.pad(
                torch.cat([torch.ones_like(part.prompts), part.in_sequence.long()], 1), (PADDING, 0)
            ),
            "response_mask": part.in_sequence.long(), "loss_mask": part.in_loss.long(),
            "rollout_logprobs": part.behavior_logp, "advantages": part.advantages.contiguous(),
        }
        for part in parts
    ]  # fmt: skip
    data = TrainingInputBatch({name: torch.cat([row[name] for row in rows]) for name in rows[0]})
    data.metadata = {"response_length": oracle.RESPONSE, "policy_mini_batch_boundaries": [(0, len(data))]}
    return data


def told(trainer, method, *args):
    return ray.get(trainer.policy_model.async_run_ray_method("pass_through", method, *args))


def prepared(trainer, model, case, **layout):
    """A mini-batch after SkyRL's pass at the rollout's weights, and workers with the moved policy."""
    config = settings(model, case, **layout)
    trainer.cfg = config
    told(trainer, "set_case", config.trainer, dict(oracle.model_of(model).named_parameters()))
    data = trainer.fwd_logprobs_values_reward(training_input(model))
    told(trainer, "load", dict(oracle.model_of(model, oracle.GROWTH).named_parameters()))
    return data


STEPS = [(name, "rows") for name in CASES] + [
    (name, more) for name in ("top-K TV", "TROLL") for more in LAYOUTS if more != "rows"
]


@pytest.mark.parametrize(("name", "layout"), STEPS)
def test_skyrls_step_has_the_loss_and_gradient_of_a_direct_computation(name, layout, trainer, model):
    case = CASES[name]
    data = prepared(trainer, model, case, **LAYOUTS[layout])
    output = trainer.dispatch.forward_backward("policy", trainer._normalize_advantages(data, [(0, len(data))]))
    wanted = oracle.expected(model, RANKS, case)
    largest = max(x.abs().max() for x in wanted.by_name.values())
    errors = [
        ((gradients[parameter] - x).abs().max() / largest).item()
        for gradients in told(trainer, "gradients")
        for parameter, x in wanted.by_name.items()
    ]
    assert max(errors) <= 1e-5
    assert ("num_microbatches" in output.metrics) == (layout == "tokens")
    # A sum over micro-batches and ranks. Tokens' terms are as large as 4 and cancel, so the error is absolute.
    assert output.metrics["policy_loss"] == pytest.approx(wanted.loss, rel=0, abs=2e-6)


@pytest.mark.parametrize("name", ["top-K TV", "TROLL"])
def test_skyrls_own_training_step_takes_an_optimizer_step_with_the_norm_of_a_direct_gradient(name, trainer, model):
    """Its loop of epochs and mini-batches, staged through Ray's object store; AdamW moves each weight by about its rate."""
    data = prepared(trainer, model, CASES[name])
    before = dict(oracle.model_of(model, oracle.GROWTH).named_parameters())
    metrics = trainer._execute_training_step("policy", data)
    wanted = oracle.expected(model, RANKS, CASES[name])
    assert metrics["grad_norm"] == pytest.approx(wanted.gradient.norm().item(), rel=1e-5)
    rate = trainer.cfg.trainer.policy.optimizer_config.lr
    for weights in told(trainer, "weights"):
        for parameter, x in weights.items():
            moved = x - before[parameter]
            strong = wanted.by_name[parameter].abs() > 1e-4
            expected = -rate * wanted.by_name[parameter].sign()
            assert ((moved - expected)[strong].abs() <= 0.1 * rate).all(), parameter
