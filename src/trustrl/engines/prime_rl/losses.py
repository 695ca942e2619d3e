"""A region as prime-rl's policy loss.

Seam:     `[trainer.loss] type = "custom"`, whose `import_path` names a function of one sequence
Switch:   `import_path = "trustrl.engines.prime_rl.region_loss"`, with the region in `[trainer.loss.kwargs]`
Borrowed: the factor of each token, `loss_weights`; prime-rl divides the sum of all sequences by its count of tokens
Carried:  by the trainer, which imports the function in every process
"""

import functools
import json
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from prime_rl.trainer.rl import loss as prime_rl_loss
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import TokenMean, TokenWeights
from trustrl.core.clean import OnNonFinite
from trustrl.core.metrics import Choice
from trustrl.core.policy_loss import LossOutput
from trustrl.core.records import RolloutTokens
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.common.sampled_loss import SampledLoss
from trustrl.engines.common.step_sums import averages
from trustrl.errors import ConfigError, EngineError

SETTING = "trainer.loss.kwargs"
INPUTS = ("trainer_logprobs", "inference_logprobs", "ref_logprobs", "advantages", "loss_mask", "loss_weights")
OUTPUTS = ("loss", "metrics")

SAMPLED = SampledLoss(
    "prime-rl", {"behavior": ("inference_logprobs", "prime-rl's orchestrator records them for every sampled token.")}
)


def region_loss(
    inputs: Any, *, on_nonfinite: OnNonFinite = "drop", metrics: Choice = "core", **region: Any
) -> "prime_rl_loss.LossOutputs":
    """Returns the loss of one sequence, a sum over its tokens, and its metrics.

    The gradient by log π is −M·w·A·c at each token: the region's mask and weight, the advantage, and `loss_weights`.
    prime-rl adds the sequences and divides by its count of tokens.

    Args:
        inputs: prime-rl's `LossInputs`: one sequence. The sampler's `inference_logprobs` are μ.
        on_nonfinite: See `trustrl.policy_loss`.
        metrics: The metrics to log: "core" for a few, "all" for every one that prime-rl can average.
        region: `preset` and the settings that differ from it, or `kind` and all settings of a region.

    Raises:
        ConfigError: If the settings describe no region, or one that prime-rl cannot feed.
        EngineError: If prime-rl calls its losses in a way that this adapter does not support.
    """
    chosen = _region(json.dumps(region, sort_keys=True))
    check_seam(type(inputs))
    mask = inputs.loss_mask
    out = SAMPLED(
        inputs.trainer_logprobs[None],
        RolloutTokens(
            behavior_logp=inputs.inference_logprobs[None], advantage=inputs.advantages[None], in_loss=mask[None]
        ),
        chosen,
        reduction_of(inputs),
        on_nonfinite,
    )
    return outputs(out, mask, metrics)


def reduction_of(inputs: Any) -> TokenWeights:
    """Returns the factor of each token of a sequence. prime-rl divides the sum by its own count of tokens."""
    mask, weights = inputs.loss_mask, inputs.loss_weights
    weights = torch.ones_like(inputs.advantages) if weights is None else weights
    return TokenWeights(torch.where(mask, weights, 0.0)[None], like=TokenMean)


def outputs(out: LossOutput, like: Tensor, metrics: Choice) -> "prime_rl_loss.LossOutputs":
    """Returns a loss with its metrics, on the device of `like`, as prime-rl takes them."""
    added = out.sums.added
    logged = {name: like.new_tensor(value, dtype=torch.float32) for name, value in averages(out.sums, metrics).items()}
    masked: Tensor = (added["masked"] / added["tokens"].clamp(min=1)).float()
    return prime_rl_loss.LossOutputs(loss=out.loss, metrics={"is_masked": masked, **logged})


@functools.cache
def _region(settings: str) -> Region:
    region = region_given(json.loads(settings), SETTING)
    SAMPLED.check(region)
    refuse_per_sequence(region)
    return region


def refuse_per_sequence(region: Region) -> None:
    """Raises if the region's gradient is a mean over sequences.

    Raises:
        ConfigError: If it is.
    """
    if region.needs().reduction is not None:
        raise ConfigError(
            f"{SETTING} must describe a region defined per token, got {region.kind}, whose gradient is a mean over "
            "sequences. prime-rl divides the sum over tokens by its count of tokens. TRL and verl support it."
        )


@functools.cache
def check_seam(inputs: type) -> None:
    """Raises if prime-rl calls its losses with other fields than the adapter was written for.

    Raises:
        EngineError: If the fields differ.
    """
    for data_class, expected in ((inputs, INPUTS), (prime_rl_loss.LossOutputs, OUTPUTS)):
        name = data_class.__name__
        names = tuple(field.name for field in fields(data_class)) if is_dataclass(data_class) else ()
        if names != expected:
            raise EngineError(
                f"prime-rl's {name} must have the fields {expected}, got {names}. This adapter was written "
                "for another version of prime-rl. Use a commit listed in trustrl's documentation."
            )
