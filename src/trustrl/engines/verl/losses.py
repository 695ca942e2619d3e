"""A region as one of verl's policy losses.

Seam:     `verl.trainer.ppo.core_algos.register_policy_loss`, a public decorator
Switch:   `actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-<preset>`
Borrowed: `agg_loss`, whose derivative is the factor on each token; verl keeps its reduction and its scaling over ranks
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.core.diagnostics import Sums
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import names
from trustrl.engines.common.step_sums import averages, on_host
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.refusals.verl import REDUCTIONS
from trustrl.engines.verl.verl_config import metrics_of, refuse_more_than_sampled_tokens, region_of
from trustrl.errors import ConfigError, DuplicateNameError, EngineError

OLDEST = (0, 9)
CALLED_WITH = (
    "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
)  # fmt: skip
_REGISTERED: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class LossContext:
    """The inputs of one micro-batch's loss that verl does not pass, and the receiver of its results."""

    region: Region
    anchors: dict[str, Tensor]
    """`behavior_logp` and `proximal_logp` of the tokens, as far as they are known."""

    receive: Callable[[LossOutput, PolicyTokens, RolloutTokens, Tensor], None]
    """Called with the result, the tokens, and the factor that verl multiplies each token's loss by."""

    rollout: dict[str, Any] = field(default_factory=dict)
    """Further fields of `RolloutTokens`."""

    policy: dict[str, Any] = field(default_factory=dict)
    """Further fields of `PolicyTokens`."""

    policy_is_proximal: bool = False
    """True in the first update of a batch if π' is taken from its own forward pass."""

    tokens: TokenPlaces | None = None
    """The N tokens in verl's (B, R) arguments that the other fields are for; None for all B · R."""


_CURRENT: ContextVar[LossContext | None] = ContextVar("loss_context", default=None)
"""The context of the running loss; None outside `RegionWorker`."""


@contextmanager
def active(context: LossContext) -> Iterator[None]:
    """Makes policy losses use this context while active."""
    before = _CURRENT.set(context)
    try:
        yield
    finally:
        _CURRENT.reset(before)


class RegionLoss:
    """Policy loss with verl's signature. Returns (scalar, metrics)."""

    def __init__(self, loss_mode: str) -> None:
        self.loss_mode = loss_mode

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.loss_mode}>"

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = "token-mean",
        config: Any = None,
        rollout_is_weights: Tensor | None = None,
    ) -> tuple[Tensor, dict[str, float]]:
        """Returns the loss of one micro-batch, and its metrics.

        Args:
            old_log_prob: The anchor's log-probs: μ's in bypass mode, those of π' otherwise. Not read inside
                `RegionWorker`, which knows both.
            log_prob: The policy's log-probs, with gradient.
            advantages: The advantage of each token.
            response_mask: True on tokens in the loss.
            loss_agg_mode: verl's average.
            config: verl's `ActorConfig`.
            rollout_is_weights: verl's own correction of π'/μ, ≥ 0, on the policy term; only for regions anchored on π'.

        Raises:
            ConfigError: If the settings do not describe a region that this path supports, or count the mismatch twice.
        """
        if config is None:
            raise ConfigError(f"config must be verl's ActorConfig with {self.loss_mode}, got None.")
        context = _CURRENT.get()
        region = region_of(self.loss_mode, config.policy_loss) if context is None else context.region
        needs = region.needs()
        weights = token_weights(response_mask, loss_agg_mode, config.global_batch_info)
        in_loss = response_mask.bool()
        if rollout_is_weights is not None and "behavior" in needs.anchors:
            raise ConfigError(
                f"rollout_is_weights must be None with {region.kind} anchored on the sampler, got a tensor. The "
                "region's ratio already contains π'/μ, and verl's correction would apply it twice. Set "
                "algorithm.rollout_correction.rollout_is=null, or region.anchor=proximal."
            )
        if context is None:
            refuse_more_than_sampled_tokens(region)
            if config.policy_loss.get("recording", None) is not None:
                raise ConfigError(
                    "policy_loss.recording must be null outside trustrl's workers, got settings. Only trustrl's "
                    "workers write records."
                )
        anchors = {f"{needs.anchor}_logp": old_log_prob} if context is None else context.anchors
        if rollout_is_weights is not None:
            # The policy term is linear in A, and a region's own penalty does not read A: only the former is corrected.
            # Records contain this A, so a replay of the region makes the same decisions.
            advantages = advantages * rollout_is_weights
        if context is not None and context.tokens is not None:
            log_prob, advantages, in_loss, weights = map(context.tokens.of, (log_prob, advantages, in_loss, weights))
        # With truncated sampling, the context's log-probs are those inside the kept ids.
        policy = PolicyTokens(**{"logp": log_prob, **(context.policy if context else {})})
        if context is not None and context.policy_is_proximal:
            anchors = anchors | {"proximal_logp": policy.logp.detach()}
        more = context.rollout if context else {}
        rollout = RolloutTokens(advantage=advantages, in_loss=in_loss, **anchors, **more)
        out = policy_loss(
            policy,
            rollout,
            region,
            reduction=TokenWeights(weights, like=REDUCTIONS.get(loss_agg_mode)),
            on_nonfinite=config.policy_loss.get("on_nonfinite", "drop"),
        )
        if context is not None:  # the worker logs the metrics of the whole step, and reads nothing until then
            context.receive(out, policy, rollout, weights)
            return out.loss, {}
        sums = on_host(out.sums)  # verl takes numbers
        return out.loss, averages(sums, metrics_of(config.policy_loss)) | clip_metrics(sums)


def clip_metrics(sums: Sums) -> dict[str, float]:
    """Returns the shares that the region masked, under the names of verl's own losses; 0 without tokens, as in verl."""
    added = sums.added
    capped = added.get("extra/capped", torch.zeros_like(added["tokens"]))
    counted = torch.stack([added["masked"], -added["log_ratio"], capped])
    per = torch.stack([added["tokens"], added["measured"], added["tokens"]]).clamp(min=1)
    names = ("actor/pg_clipfrac", "actor/ppo_kl", "actor/pg_clipfrac_lower")
    return dict(zip(names, (counted / per).tolist(), strict=True))


def token_weights(response_mask: Tensor, loss_agg_mode: str, global_batch_info: dict[str, Any]) -> Tensor:
    """Returns c_t, the factor that verl's `agg_loss` multiplies each token's loss by.

    `agg_loss` is linear, so c_t is its derivative.
    """
    tracked = torch.zeros(response_mask.shape, device=response_mask.device, requires_grad=True)
    # The loss may run where gradients are off.
    with torch.enable_grad():
        total = core_algos.agg_loss(
            loss_mat=tracked, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **global_batch_info
        )
        (weights,) = torch.autograd.grad(total, tracked)
    return weights


def register() -> None:
    """Registers every preset, and `trustrl` for a region described in full.

    Raises:
        EngineError: If verl is too old, or calls or averages its losses in a way that this adapter does not support.
        DuplicateNameError: If one of the names is already registered.
    """
    _check_seams()
    made = {name: RegionLoss(name) for name in names()}
    for name in made:
        taken = _found(name)
        if taken is not None:
            raise DuplicateNameError(
                f"verl's policy loss {name!r} is already registered as {taken!r}, and verl would overwrite it "
                f"silently. Remove the other one, or do not call {__package__}.register() twice."
            )
    for name, loss in made.items():
        core_algos.register_policy_loss(name)(loss)
    _REGISTERED.update(made)


def registered() -> tuple[str, ...]:
    """Returns the names of trustrl's losses, after looking up each one in verl's registry.

    Raises:
        EngineError: If a loss is missing or has been replaced.
    """
    for name, loss in _REGISTERED.items():
        entry = _found(name)
        if entry is not loss:
            raise EngineError(
                f"verl's policy loss {name!r} must be trustrl's, got {entry!r}. Something registered it again after "
                f"{__package__} was imported."
            )
    return tuple(_REGISTERED)


def _found(name: str) -> Any:
    try:
        return core_algos.get_policy_loss_fn(name)
    except ValueError:  # verl raises it for an unknown name
        return None


def _check_seams() -> None:
    seam.require_version("verl", OLDEST, "older versions call their losses differently")
    for name in ("register_policy_loss", "get_policy_loss_fn"):
        seam.require_parameters(core_algos, name, ("name",))
    seam.require_parameters(core_algos, "compute_policy_loss_vanilla", CALLED_WITH)
    names = tuple(inspect.signature(core_algos.agg_loss).parameters)
    if not {"loss_mat", "loss_mask", "loss_agg_mode"} <= set(names):
        raise EngineError(
            f"verl's agg_loss must take loss_mat, loss_mask and loss_agg_mode, got {names}. Install a verl version "
            "listed in trustrl's documentation."
        )
    # Checked with numbers: parameters alone do not tell that a reduction is linear, and `token_weights` relies on it.
    loss, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[True, True], [True, False]])
    for mode in REDUCTIONS:
        theirs = core_algos.agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode=mode)
        ours = (token_weights(mask, mode, {}) * loss).sum()
        if not torch.allclose(theirs, ours):
            raise EngineError(
                f"verl's agg_loss must be a weighted sum of the tokens' losses, got {theirs.item():g} instead of "
                f"{ours.item():g} with {mode}. Install a verl version listed in trustrl's documentation."
            )
