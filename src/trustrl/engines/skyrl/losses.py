"""A region as one of SkyRL's policy losses.

Seam:     `PolicyLossRegistry.register`, public
Switch:   `trainer.algorithm.policy_loss_type=trustrl-<preset>`
Borrowed: `reduce_loss`, asked for what it multiplies each token with; the trainer has divided the advantages before,
          so that a sum over micro-batches and ranks is the average that `loss_reduction` names
Carried:  by SkyRL's registry actor on Ray, pickled by name: workers import this module
"""

from typing import Any

import torch
from skyrl.backends.skyrl_train.utils import ppo_utils
from torch import Tensor

from trustrl.config.terms import TokenWeights
from trustrl.engines import seam
from trustrl.engines.averages import averages
from trustrl.engines.naming import names
from trustrl.engines.skyrl.region import region_of
from trustrl.engines.skyrl.settings import check_algorithm
from trustrl.engines.skyrl_refusals import REDUCTIONS
from trustrl.errors import DuplicateNameError, EngineError, MissingDataError
from trustrl.objective import policy_loss
from trustrl.records import PolicyTokens, RolloutTokens

OLDEST = (0, 3)
CALLED_WITH = ("log_probs", "old_log_probs", "advantages", "config", "loss_mask", "rollout_logprobs")
MORE = frozenset({"ratio_max", "divergence_max", "mismatch_abs_mean"})
"""SkyRL takes the largest of what ends in `_max`. These are never below 0, which stands for no tokens."""

_MISSING = {
    "behavior": (
        "rollout_logprobs",
        "Set generator.sampling_params.logprobs=1, and let a generator of your own return `rollout_logprobs`.",
    ),
    "proximal": (
        "old_log_probs",
        "SkyRL's trainer recomputes them for every loss but its own `dppo` and `rollout_is`; let yours do so.",
    ),
}


class RegionLoss:
    """A policy loss as SkyRL calls it: (scalar, metrics) out."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __eq__(self, other: object) -> bool:
        """A loss that came back from SkyRL's registry actor is the same loss."""
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
        """The loss of one micro-batch, a sum.

        Args:
            log_probs: The policy's, with gradient.
            old_log_probs: π': what the trainer recomputed before the update.
            advantages: One for each token, divided by SkyRL's trainer as `loss_reduction` says.
            config: SkyRL's `AlgorithmConfig`, or a `RegionAlgorithmConfig`.
            loss_mask: Tokens in the loss; None for all.
            rollout_logprobs: μ: what the sampler recorded.

        Raises:
            ConfigError: the settings do not describe a region this path can run, or count the mismatch twice.
            MissingDataError: the region's anchor was not given.
        """
        region = region_of(self.name, config)
        check_algorithm(config, region)
        given = {"behavior": rollout_logprobs, "proximal": old_log_probs}
        for anchor in sorted(region.needs().anchors):
            if given[anchor] is None:
                argument, advice = _MISSING[anchor]
                raise MissingDataError(f"{argument} must be given with {region.kind}, got None. {advice}")
        mask = torch.ones_like(log_probs, dtype=torch.bool) if loss_mask is None else loss_mask
        out = policy_loss(
            PolicyTokens(logp=log_probs),
            RolloutTokens(
                behavior_logp=rollout_logprobs,
                proximal_logp=old_log_probs,
                advantage=advantages,
                in_loss=mask.bool(),
            ),
            region,
            reduction=TokenWeights(token_weights(mask), like=REDUCTIONS.get(config.loss_reduction)),
            on_nonfinite=getattr(config, "on_nonfinite", "drop"),
        )
        added = out.sums.added
        stopped = (added["stopped"] / added["tokens"].clamp(min=1)).item()
        return out.loss, {"clip_ratio": stopped, **averages(out.sums, MORE)}


def token_weights(loss_mask: Tensor) -> Tensor:
    """c_t: what SkyRL's `reduce_loss` multiplies each token's loss with. It is linear, so this is its derivative."""
    watched = torch.zeros(loss_mask.shape, device=loss_mask.device, requires_grad=True)
    with torch.enable_grad():
        (weights,) = torch.autograd.grad(ppo_utils.reduce_loss(watched, loss_mask), watched)
    return weights


def register() -> None:
    """Registers every preset, and `trustrl` for a region described in full. Once, in the process that starts Ray.

    Before `ray.init`, SkyRL's `initialize_ray` carries them to Ray; after it, registering does.

    Raises:
        EngineError: SkyRL is too old, or calls or reduces its losses in a way this adapter was not written for.
        DuplicateNameError: somebody else has one of the names.
    """
    _check_seams()
    taken = set(ppo_utils.PolicyLossRegistry.list_available()) & set(names())
    if taken:
        raise DuplicateNameError(
            f"SkyRL's policy loss {min(taken)!r} is registered already. Remove the other one, or do not call "
            f"{__package__}.register() twice."
        )
    for name in names():
        ppo_utils.PolicyLossRegistry.register(name, RegionLoss(name))


def registered() -> tuple[str, ...]:
    """The names under which SkyRL finds our losses, looked up in SkyRL's registry now, on Ray if it runs.

    Raises:
        EngineError: one is missing, or is not ours.
    """
    known = ppo_utils.PolicyLossRegistry.list_available()
    for name in names():
        found = ppo_utils.PolicyLossRegistry.get(name) if name in known else None
        if found != RegionLoss(name):
            raise EngineError(
                f"SkyRL's policy loss {name!r} must be trustrl's, got {found!r}. Call {__package__}.register() in the "
                "process that starts Ray."
            )
    return tuple(names())


def _check_seams() -> None:
    seam.require_version("skyrl", OLDEST, "it was not tried with any before")
    seam.require_parameters(ppo_utils, "ppo_policy_loss", CALLED_WITH)
    seam.require_parameters(ppo_utils, "reduce_loss", ("loss", "loss_mask"))
    for name, expected in {"register": ("name", "func"), "get": ("name",), "list_available": ()}.items():
        seam.require_parameters(ppo_utils.PolicyLossRegistry, name, expected)
    loss, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[1, 1], [1, 0]])
    if not torch.equal(ppo_utils.reduce_loss(loss, mask), torch.tensor(7.0)):
        raise EngineError(
            "SkyRL's reduce_loss must be the sum over tokens in the loss, and it is not. Install a version listed in "
            "trustrl's documentation, or call `trustrl.policy_loss` from your own trainer."
        )
