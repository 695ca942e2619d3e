"""OPSM, VESPO, GMPO and sequence products against TRL's own code: the same weights and batch, the same gradients."""

from dataclasses import replace

import pytest

pytest.importorskip("trl")

import torch

import trustrl
from support import trl_world as world
from support.trl_parity import CLASSIC, LARGEST_ERROR
from trustrl import regions

SAMPLER = "sampling_per_token_logps"


@pytest.mark.parametrize("threshold", [0.05, 0.2, 5.0])
@pytest.mark.parametrize("tools", [False, True])
def test_opsm_is_trls_mask_around_its_clip(threshold, tools):
    """TRL clips by π/π' and drops by log μ − log π, as this region does with anchor="proximal"."""
    inputs = world.batch(world.tiny_model(), noise=0.2, tools=tools)
    rows = torch.arange(len(inputs[SAMPLER]))[:, None]
    inputs[SAMPLER] = (inputs[SAMPLER] + 0.08 * rows).clamp(max=-1e-3)  # μ finds later rows more likely than π does
    inputs["trustrl_behavior_logp"] = inputs[SAMPLER]
    region = regions.OPSM(threshold, statistic=CLASSIC, anchor="proximal")
    found = world.result(world.ours(region, world.tiny_model()), inputs)
    wanted = world.result(world.stock(world.tiny_model(), off_policy_mask_threshold=threshold), inputs)
    without = world.result(world.stock(world.tiny_model()), inputs)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    dropped = found.metrics["trustrl/sequence_dropped_share"]
    assert (dropped > 0) == (world.error(wanted.gradient, without.gradient) > 1e-3)
    assert (dropped > 0) == (threshold < 5)


OTHER = {"vespo_k_pos": 1.5, "vespo_lambda_pos": 2.5, "vespo_k_neg": 2.0, "vespo_lambda_neg": 1.5}


@pytest.mark.parametrize("noise", [0.05, 0.2])
@pytest.mark.parametrize("sampled", [False, True], ids=["by transformers", "by a sampler"])
@pytest.mark.parametrize(
    ("theirs", "region"),
    [({}, regions.VESPO()), (OTHER, regions.VESPO(1.5, 2.5, 2.0, 1.5))],
    ids=["defaults", "others"],
)
def test_vespo_is_trls_own(noise, sampled, theirs, region):
    """With a sampler, TRL multiplies Π π/π' by its π'/μ per token, which is 1 on padding: Π π/μ."""
    inputs = world.batch(world.tiny_model(), noise=noise)
    ratio = torch.exp((inputs["old_per_token_logps"] - inputs[SAMPLER]) * inputs["completion_mask"])
    inputs["importance_sampling_ratio"] = ratio if sampled else torch.ones_like(ratio)
    if sampled:
        inputs["trustrl_behavior_logp"] = inputs[SAMPLER]
    found = world.result(world.ours(region, world.tiny_model(), loss_type="dapo"), inputs)
    wanted = world.result(world.stock(world.tiny_model(), loss_type="vespo", **theirs), inputs)
    free = world.result(world.ours(trustrl.preset("pg-is"), world.tiny_model(), loss_type="dapo"), inputs)
    assert world.error(free.gradient, wanted.gradient) > 0.02
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


@pytest.mark.parametrize("bounds", [(0.4, 0.4), (0.1, 0.15)])
def test_gmpo_is_trls_experimental_trainer(bounds):
    gmpo = pytest.importorskip("trl.experimental.gmpo")
    low, high = bounds
    inputs = world.batch(world.tiny_model(), noise=0.3)
    region = regions.GMPO(regions.LogRatio(max_decrease=low, max_increase=high))
    found = world.result(world.ours(region, world.tiny_model(), loss_type="grpo"), inputs)
    usual = {name: getattr(world.settings(), name) for name in WORLD_SETTINGS}
    args = gmpo.GMPOConfig(**usual, epsilon=low, epsilon_high=high)
    wanted = world.result(world.trainer_of(gmpo.GMPOTrainer, world.tiny_model(), args), inputs)
    assert found.metrics["trustrl/masked_share"] > (0.2 if low < 0.4 else 0.02)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR


WORLD_SETTINGS = [
    "output_dir", "use_cpu", "bf16", "gradient_checkpointing", "report_to", "per_device_train_batch_size",
    "per_device_eval_batch_size", "num_generations", "max_completion_length", "disable_tqdm", "save_strategy", "seed",
]  # fmt: skip


def generated(mode, largest, smallest=None):
    """A stock trainer that corrects as if vLLM had sampled, and the inputs that TRL's own code makes of a rollout."""
    trainer = world.stock(
        world.tiny_model(), vllm_importance_sampling_mode=mode, vllm_importance_sampling_clip_max=largest,
        vllm_importance_sampling_clip_min=smallest,
    )  # fmt: skip
    drawn = world.batch(world.tiny_model(), noise=0.2)
    lengths = drawn["completion_mask"].sum(-1).tolist()
    columns = [drawn["completion_ids"], drawn[SAMPLER]]
    ids, logps = ([row[:n].tolist() for row, n in zip(x, lengths, strict=True)] for x in columns)
    prompts = [row[mask.bool()].tolist() for row, mask in zip(drawn["prompt_ids"], drawn["prompt_mask"], strict=True)]
    trainer._generate = lambda _: (
        prompts,
        ids,
        None,
        [world.tokenizer().decode(x) for x in ids],
        logps,
        {},
        None,
        None,
    )
    trainer.use_vllm = True
    inputs = trainer._generate_and_score_completions([{"prompt": "0+0="} for _ in lengths])
    inputs["advantages"] = drawn["advantages"]
    with torch.no_grad():  # as after some updates
        inputs["old_per_token_logps"] = inputs["old_per_token_logps"] + 0.15 * torch.randn(
            inputs["old_per_token_logps"].shape, generator=torch.Generator().manual_seed(3)
        )
    return trainer, inputs


@pytest.mark.parametrize(
    ("mode", "correction"),
    [
        ("sequence_mask", regions.MIS(min_ratio=0.0, max_ratio=1.1, level="sequence-product")),
        ("sequence_mask", regions.MIS(min_ratio=0.75, max_ratio=2.5, level="sequence-product")),
        ("sequence_truncate", regions.TIS(max_ratio=1.1, level="sequence-product")),
    ],
    ids=["mask from above", "mask from both sides", "truncate"],
)
def test_a_product_over_the_sequence_is_trls_own_correction_with_generation_stubbed(mode, correction):
    """TRL's code makes the ratio from its own π' and the given μ; only the sampling itself is stubbed."""
    smallest = getattr(correction, "min_ratio", None) or None
    stock, inputs = generated(mode, correction.max_ratio, smallest)
    old, ratio = inputs["old_per_token_logps"], inputs["importance_sampling_ratio"]
    assert ratio.shape == (len(old), 1)
    assert ((ratio == 0) if mode == "sequence_mask" else (ratio == correction.max_ratio)).any()
    assert ((ratio != 0) & (ratio != correction.max_ratio)).any()
    wanted = world.result(stock, inputs)
    # TRL took the ratio from its π' of then; the region reads both log-probs now, so μ moves with π'.
    then = torch.where(inputs["completion_mask"].bool(), logps_then(inputs), old)
    mine = inputs | {
        "trustrl_proximal_logp": old, "trustrl_behavior_logp": inputs[SAMPLER] + (old - then),
        "trustrl_version": torch.full(old.shape, -1),
    }  # fmt: skip
    region = regions.PPO(CLASSIC, anchor="proximal", correction=correction)
    found = world.result(world.ours(region, world.tiny_model()), mine)
    assert world.error(found.gradient, wanted.gradient) <= LARGEST_ERROR
    mean = replace(correction, level="sequence-mean") if mode == "sequence_mask" else replace(correction, level="token")
    other = world.result(world.ours(replace(region, correction=mean), world.tiny_model()), mine)
    assert world.error(other.gradient, wanted.gradient) > 1e-3


def logps_then(inputs):
    """π' as TRL recorded it: the model's own log-probs."""
    return world.at_sampled(world.logprobs(world.tiny_model(), inputs), inputs).detach()
