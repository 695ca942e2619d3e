"""A region as one of verl's policy losses.

Seam:     `verl.trainer.ppo.core_algos.register_policy_loss`, a public decorator
Switch:   `actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-<preset>`
Borrowed: `agg_loss`, asked for what it multiplies each token with; verl keeps its reduction and its scaling over ranks
"""

import inspect
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo import core_algos

from trustrl.config.terms import TokenWeights
from trustrl.engines import seam
from trustrl.engines.averages import averages
from trustrl.engines.naming import names
from trustrl.engines.verl import feed
from trustrl.engines.verl.metrics import under_their_names
from trustrl.engines.verl.region import refuse_more_than_sampled_tokens, region_of
from trustrl.engines.verl_refusals import REDUCTIONS
from trustrl.errors import ConfigError, DuplicateNameError, EngineError
from trustrl.objective import policy_loss
from trustrl.records import PolicyTokens, RolloutTokens

OLDEST = (0, 9)
CALLED_WITH = (
    "old_log_prob", "log_prob", "advantages", "response_mask", "loss_agg_mode", "config", "rollout_is_weights",
)  # fmt: skip
_OURS: dict[str, Any] = {}


class RegionLoss:
    """A policy loss as verl calls it: keywords in, (scalar, metrics) out."""

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
        """The loss of one micro-batch.

        Args:
            old_log_prob: The anchor's log-probs: μ's in bypass mode, π' otherwise. Not read where a worker of ours
                knows both.
            log_prob: The policy's, with gradient.
            advantages: One for each token.
            response_mask: Tokens in the loss.
            loss_agg_mode: verl's average.
            config: verl's `ActorConfig`.
            rollout_is_weights: verl's own correction of π'/μ, ≥ 0, on the policy term; only for regions anchored on π'.

        Raises:
            ConfigError: the settings do not describe a region this path can run, or count the mismatch twice.
        """
        if config is None:
            raise ConfigError(f"config must be verl's ActorConfig with {self.loss_mode}, got None.")
        fed = feed.current()
        region = region_of(self.loss_mode, config.policy_loss) if fed is None else fed.region
        needs = region.needs()
        weights = token_weights(response_mask, loss_agg_mode, config.global_batch_info)
        if rollout_is_weights is not None and "behavior" in needs.anchors:
            raise ConfigError(
                f"rollout_is_weights must be None with {region.kind} anchored on the sampler, got a tensor: its "
                "ratio already contains π'/μ and verl would multiply with it once more. Set "
                "algorithm.rollout_correction.rollout_is=null, or region.anchor=proximal."
            )
        if fed is None:
            refuse_more_than_sampled_tokens(region)
            if config.policy_loss.get("recording", None) is not None:
                raise ConfigError(
                    "policy_loss.recording must be null outside trustrl's workers, got settings: nobody would write."
                )
        anchors = {f"{needs.anchor}_logp": old_log_prob} if fed is None else fed.anchors
        if rollout_is_weights is not None:
            # The policy term is linear in A and a region's own penalty does not read it: only the former is corrected.
            # Records get this A, so that the region decides the same when it is asked again.
            advantages = advantages * rollout_is_weights
        policy = PolicyTokens(logp=log_prob, **fed.policy if fed else {})
        rollout = RolloutTokens(
            advantage=advantages, in_loss=response_mask.bool(), **anchors, **fed.rollout if fed else {}
        )
        out = policy_loss(
            policy,
            rollout,
            region,
            reduction=TokenWeights(weights, like=REDUCTIONS.get(loss_agg_mode)),
            on_nonfinite=config.policy_loss.get("on_nonfinite", "drop"),
        )
        if fed is None:
            return out.loss, averages(out.sums) | under_their_names(out.sums)
        fed.take(out, policy, rollout, weights)
        return out.loss, under_their_names(out.sums)


def token_weights(response_mask: Tensor, loss_agg_mode: str, global_batch_info: dict[str, Any]) -> Tensor:
    """c_t: what verl's `agg_loss` multiplies each token's loss with. It is linear, so this is its derivative."""
    watched = torch.zeros(response_mask.shape, device=response_mask.device, requires_grad=True)
    with torch.enable_grad():
        total = core_algos.agg_loss(
            loss_mat=watched, loss_mask=response_mask, loss_agg_mode=loss_agg_mode, **global_batch_info
        )
        (weights,) = torch.autograd.grad(total, watched)
    return weights


def register() -> None:
    """Registers every preset, and `trustrl` for a region described in full.

    Raises:
        EngineError: verl is too old, or calls or averages its losses in a way this adapter was not written for.
        DuplicateNameError: somebody else has one of the names.
    """
    _check_seams()
    made = {name: RegionLoss(name) for name in names()}
    for name in made:
        taken = _found(name)
        if taken is not None:
            raise DuplicateNameError(
                f"verl's policy loss {name!r} is already registered as {taken!r}; verl would overwrite it without a "
                f"word. Remove the other one, or do not call {__package__}.register() twice."
            )
    for name, loss in made.items():
        core_algos.register_policy_loss(name)(loss)
    _OURS.update(made)


def registered() -> tuple[str, ...]:
    """The names under which verl finds our losses, looked up in verl's registry now.

    Raises:
        EngineError: one is missing, or is not ours any more.
    """
    for name, loss in _OURS.items():
        found = _found(name)
        if found is not loss:
            raise EngineError(
                f"verl's policy loss {name!r} must be trustrl's, got {found!r}. Something registered it again after "
                f"{__package__} was imported."
            )
    return tuple(_OURS)


def _found(name: str) -> Any:
    try:
        return core_algos.get_policy_loss_fn(name)
    except ValueError:  # what verl says of an unknown name
        return None


def _check_seams() -> None:
    seam.require_version("verl", OLDEST, "its losses are called in another way before")
    for name in ("register_policy_loss", "get_policy_loss_fn"):
        seam.require_parameters(core_algos, name, ("name",))
    seam.require_parameters(core_algos, "compute_policy_loss_vanilla", CALLED_WITH)
    found = tuple(inspect.signature(core_algos.agg_loss).parameters)
    if not {"loss_mat", "loss_mask", "loss_agg_mode"} <= set(found):
        raise EngineError(f"verl's agg_loss must take loss_mat, loss_mask and loss_agg_mode, got {found}.")
    loss, mask = torch.tensor([[1.0, 2.0], [4.0, 8.0]]), torch.tensor([[True, True], [True, False]])
    for mode in REDUCTIONS:
        theirs = core_algos.agg_loss(loss_mat=loss, loss_mask=mask, loss_agg_mode=mode)
        ours = (token_weights(mask, mode, {}) * loss).sum()
        if not torch.allclose(theirs, ours):
            raise EngineError(
                f"verl's agg_loss must be a weighted sum of the tokens' losses, got {theirs.item():g} instead of "
                f"{ours.item():g} with {mode}. Install a verl version listed in trustrl's documentation."
            )
