"""A region as one of SkyRL's policy losses.

Seam:     `PolicyLossRegistry.register`, public
Switch:   `trainer.algorithm.policy_loss_type=trustrl-<preset>`
Borrowed: `reduce_loss`, whose derivative is the factor on each token; the trainer has already divided the advantages,
          so a sum over micro-batches and ranks is the average that `loss_reduction` names
Carried:  by SkyRL's registry actor on Ray, pickled by name: workers import this module
"""

import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from skyrl.train.config import make_config
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import names
from trustrl.engines.common.sampled_loss import SampledLoss, token_weights
from trustrl.engines.common.step_sums import averages, on_host
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_read import VocabularyOutput, read_by_policy
from trustrl.engines.refusals.skyrl import REDUCTIONS, WORKER
from trustrl.engines.skyrl.skyrl_config import RegionAlgorithmConfig, check_algorithm, check_settings, region_of
from trustrl.errors import ConfigError, DuplicateNameError, EngineError

OLDEST = (0, 3)
CALLED_WITH = ("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs")
MORE = frozenset({"ratio_max", "divergence_max", "mismatch_abs_mean"})
"""Further metrics that SkyRL combines correctly: it takes the largest of those ending in `_max`. They are never below
0, the value without tokens."""

_SAMPLED = SampledLoss(
    "SkyRL",
    {
        "behavior": (
            "rollout_logprobs",
            "Set generator.sampling_params.logprobs=1. A custom generator must return `rollout_logprobs`.",
        ),
        "proximal": (
            "old_log_probs",
            "SkyRL's trainer recomputes them for every loss except its own `dppo` and `rollout_is`; a custom trainer "
            "must do so too.",
        ),
    },
)


FACTOR = "trustrl_factor"
"""The key of the (B, T) factors by which SkyRL's average multiplies the tokens' losses."""

ANCHOR = ("trustrl_logp", "trustrl_topk_ids", "trustrl_topk_logp", "trustrl_topk_tail_logp")
"""The keys of π' in a batch: for each sequence, the rows of its tokens."""


class MicroBatch(NamedTuple):
    """The data of one micro-batch that SkyRL does not pass to a loss. N: tokens in the loss."""

    where: TokenPlaces
    factor: Tensor
    """(N,)"""

    token_ids: Tensor
    """(N,)"""

    anchor: Mapping[str, Tensor]
    """The rows of π' by `ANCHOR`; empty for regions on the sampled token."""

    passes: list[VocabularyOutput] | None
    """The read of the running forward pass; None for regions on the sampled token."""


MICRO_BATCH: ContextVar[MicroBatch | None] = ContextVar("trustrl_micro_batch", default=None)
"""The micro-batch that `trustrl.engines.skyrl.vocabulary_worker` is running, or None in SkyRL's own workers."""


class RegionLoss:
    """Policy loss with SkyRL's signature. Returns (scalar, metrics)."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __eq__(self, other: object) -> bool:
        """Compares by name: a loss that returns from SkyRL's registry actor equals the registered one."""
        return isinstance(other, RegionLoss) and other.name == self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __call__(
        self,
        log_probs: Tensor,
        old_log_probs: Tensor | None,
        advantages: Tensor,
        config: Any,
        loss_mask: Tensor | None = None,
        rollout_logprobs: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of one micro-batch, a sum, and its metrics.

        Args:
            log_probs: The policy's log-probs, with gradient.
            old_log_probs: The log-probs of π', which the trainer recomputed before the update.
            advantages: The advantage of each token, divided by SkyRL's trainer according to `loss_reduction`.
            config: SkyRL's `AlgorithmConfig`, or a `RegionAlgorithmConfig`.
            loss_mask: True on tokens in the loss; None for all tokens.
            rollout_logprobs: The log-probs of μ, which the sampler recorded.

        Raises:
            ConfigError: If the settings do not describe a region that this path supports, or count the mismatch twice.
            MissingDataError: If the region's anchor is missing.
        """
        region = region_of(self.name, config)
        check_algorithm(config, region)
        micro, like = MICRO_BATCH.get(), REDUCTIONS.get(config.loss_reduction)
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
        rollout = RolloutTokens(
            behavior_logp=rollout_logprobs, proximal_logp=old_log_probs, advantage=advantages, in_loss=mask.bool()
        )
        mode: Any = getattr(config, "on_nonfinite", "drop")  # `policy_loss` checks it
        if micro is not None:
            out = _packed_loss(log_probs, rollout, region, micro, mode, like)
        else:
            _refuse_stock_worker(self.name, region)
            weights = token_weights(lambda loss: ppo_utils.reduce_loss(loss, mask), log_probs.detach().float())
            out = _SAMPLED(log_probs, rollout, region, TokenWeights(weights, like=like), mode)
        sums = on_host(out.sums)  # SkyRL takes numbers, and ignores tensors
        masked = (sums.added["masked"] / sums.added["tokens"].clamp(min=1)).item()
        return out.loss, {"clip_ratio": masked, **averages(sums, getattr(config, "metrics", "core"), MORE)}


def _packed_loss(
    logp: Tensor, rollout: RolloutTokens, region: Region, micro: MicroBatch, mode: Any, like: Any
) -> LossOutput:
    """Returns the loss of the tokens in the loss, as one packed row."""
    where, factor, needs = micro.where, micro.factor, region.needs()
    policy: dict[str, Any] = {"logp": where.of(logp)}
    behavior, proximal = (None if x is None else where.of(x) for x in (rollout.behavior_logp, rollout.proximal_logp))
    topk = None
    if micro.passes is not None:
        # SkyRL's own are rounded to the dtype of the logits, and would not fit those at the K ids.
        (output,) = micro.passes
        policy = {"logp": output.log_probs, **read_by_policy(output, needs)}
        proximal, ids, top_logp, tail_logp = (micro.anchor[name] for name in ANCHOR)
        topk = TopK(ids.long(), top_logp, of=needs.anchor, tail_logp=tail_logp)
    packed = RolloutTokens(
        behavior_logp=behavior,
        proximal_logp=proximal,
        # SkyRL's trainer has multiplied the advantages. Undone, terms without an advantage get the same factor.
        advantage=torch.where(factor > 0, where.of(rollout.advantage) / factor, 0.0),
        in_loss=torch.ones_like(where.row, dtype=torch.bool),
        token_ids=micro.token_ids,
        sequence_ids=where.row,
        topk=topk,
    )
    _SAMPLED.require_anchors(packed, region)
    out = policy_loss(
        PolicyTokens(**policy), packed, region, reduction=TokenWeights(factor, like=like), on_nonfinite=mode
    )
    if len(where.flat):
        return out
    # Every rank runs the backward pass, which FSDP needs, if the micro-batch has no token in the loss.
    return replace(out, loss=out.loss + 0 * logp.sum())


def _refuse_stock_worker(name: str, region: Region) -> None:
    """Raises in SkyRL's own worker if the region needs trustrl's.

    Raises:
        ConfigError: If the region reads more than sampled tokens, or adds a penalty.
    """
    if WORKER.holds(region.needs()):
        raise ConfigError(
            f"trainer.algorithm.policy_loss_type={name} must run in trustrl's policy worker, got SkyRL's own. Start "
            f"SkyRL with `python -m {__package__}`, or return `{__package__}.vocabulary_trainer.RegionTrainer` from "
            "`get_trainer` of your entry point."
        )


def register() -> None:
    """Registers every preset, and `trustrl` for a region described in full.

    Call it once, in the process that starts Ray. Losses registered before `ray.init` reach Ray through SkyRL's
    `initialize_ray`; those registered after it reach Ray directly.

    Raises:
        EngineError: If SkyRL is too old, or calls or reduces its losses in a way that this adapter does not support.
        DuplicateNameError: If one of the names is already registered.
    """
    _check_seams()
    taken = set(ppo_utils.PolicyLossRegistry.list_available()) & set(names())
    if taken:
        raise DuplicateNameError(
            f"SkyRL's policy loss {min(taken)!r} is already registered. Remove the other one, or do not call "
            f"{__package__}.register() twice."
        )
    for name in names():
        ppo_utils.PolicyLossRegistry.register(name, RegionLoss(name))


def registered() -> tuple[str, ...]:
    """Returns the names of trustrl's losses, after looking up each one in SkyRL's registry (on Ray if it runs).

    Raises:
        EngineError: If a loss is missing or has been replaced.
    """
    known = ppo_utils.PolicyLossRegistry.list_available()
    for name in names():
        loss = ppo_utils.PolicyLossRegistry.get(name) if name in known else None
        if loss != RegionLoss(name):
            raise EngineError(
                f"SkyRL's policy loss {name!r} must be trustrl's, got {loss!r}. Call {__package__}.register() in the "
                "process that starts Ray."
            )
    return tuple(names())


def _check_seams() -> None:
    seam.require_version("skyrl", OLDEST, "trustrl was not tested with older versions")
    seam.require_parameters(ppo_utils, "ppo_policy_loss", CALLED_WITH)
    seam.require_parameters(ppo_utils, "reduce_loss", ("loss", "loss_mask"))
    for name, expected in {"register": ("name", "func"), "get": ("name",), "list_available": ()}.items():
        seam.require_parameters(ppo_utils.PolicyLossRegistry, name, expected)
    loss, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[1, 1], [1, 0]])
    # SkyRL has divided the advantages already: with a mean, each gradient would be divided twice.
    if not torch.equal(ppo_utils.reduce_loss(loss, mask), torch.tensor(7.0)):
        raise EngineError(
            "SkyRL's reduce_loss does not add the tokens in the loss. Install a version listed in "
            "trustrl's documentation, or call `trustrl.policy_loss` from your own trainer."
        )


OVERRIDE = "trainer.override_entrypoint="
"""SkyRL reads this argument and passes all arguments on, but its configuration does not have the field."""


def main() -> None:
    """Registers the regions, checks the settings, and runs SkyRL's `main_base`.

    Raises:
        ConfigError: If a setting does not work with the region, before Ray is started; see `check_settings`.
    """
    import ray
    from skyrl.train.entrypoints import main_base

    arguments = [argument for argument in sys.argv[1:] if not argument.startswith(OVERRIDE)]
    config = make_config(algorithm_cls=RegionAlgorithmConfig).from_cli_overrides(arguments)
    # Before Ray starts: `initialize_ray` carries the losses that are registered by then.
    register()
    region = check_settings(config)
    main_base.validate_cfg(config)
    main_base.initialize_ray(config)
    entrypoint: Any = main_base.skyrl_entrypoint
    if WORKER.holds(region.needs()):
        from trustrl.engines.skyrl.vocabulary_trainer import region_entrypoint as entrypoint
    ray.get(entrypoint.remote(config))
