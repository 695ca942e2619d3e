"""Who calls a policy loss how. An adapter takes a batch and the whole batch's counts, and returns the loss.

plain     f(logp, behavior_logp, advantage, mask[, num_tokens]) -> a scalar, or one number for each token
verl      verl's registered losses: f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, …)
skyrl     SkyRL's registered losses: f(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)
trustrl   `trustrl.policy_loss` with a preset
"""

import inspect
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from trustrl.conformance.batches import Batch
from trustrl.errors import ConfigError, MissingPackageError
from trustrl.packages import need
from trustrl.registry import Registry

Loss = Callable[..., Any]
Settings = Mapping[str, Any]


class Adapter(Protocol):
    """One way to call a loss."""

    takes: ClassVar[frozenset[str]]
    """Parameters by which a function of this kind is known."""

    counts_are_global: bool
    """Whether the loss is told the whole batch's counts, so that parts of a batch must add up by themselves."""

    def __init__(self, loss: Loss, settings: Settings) -> None: ...

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """What the loss returns for `batch`, a part of `whole`."""
        ...


ADAPTERS: Registry[type[Adapter]] = Registry("adapter")


def adapted(loss: Loss, name: str | None = None, settings: Settings | None = None) -> Adapter:
    """The loss behind the adapter of this name, or behind the one its parameters fit.

    Raises:
        ConfigError: no adapter fits, or it does not know a setting.
    """
    return ADAPTERS[name or detected(loss)](loss, settings or {})


def detected(loss: Loss) -> str:
    """The adapter whose parameters the function takes."""
    found = _parameters(loss)
    for name, adapter in ADAPTERS.items():
        if adapter.takes <= found.keys():
            return name
    raise ConfigError(
        f"The loss must take the parameters of an adapter ({', '.join(ADAPTERS)}), got ({', '.join(found)}). "
        "With --adapter plain its first four are taken as logp, behavior_logp, advantage and mask."
    )


def _parameters(loss: Loss) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(loss).parameters)


@ADAPTERS.register("verl")
class Verl:
    """verl's call, with the counts its trainer fills in; settings are those of its actor, and `loss_agg_mode`."""

    takes: ClassVar = frozenset({"old_log_prob", "log_prob", "advantages", "response_mask"})
    counts_are_global = True

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss, self._settings = loss, dict(settings)
        self._mode = self._settings.pop("loss_agg_mode", "token-mean")
        self._config_module = need("verl.workers.config", extra="verl")
        policy_loss = self._settings.pop("policy_loss", {})
        self._policy_loss = self._config_module.PolicyLossConfig(**policy_loss)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """(scalar, metrics), as verl calls it."""
        config = self._config_module.ActorConfig(
            strategy="fsdp",
            rollout_n=1,
            ppo_micro_batch_size_per_gpu=1,
            policy_loss=self._policy_loss,
            global_batch_info={
                "dp_size": 1,
                "batch_num_tokens": whole.num_tokens,
                "global_batch_size": whole.num_sequences,
                "loss_scale_factor": whole.in_loss.shape[-1],
            },
            **self._settings,
        )
        return self._loss(
            old_log_prob=batch.behavior_logp,
            log_prob=batch.logp,
            advantages=batch.advantage,
            response_mask=batch.in_loss,
            loss_agg_mode=self._mode,
            config=config,
        )


@ADAPTERS.register("skyrl")
class SkyRL:
    """SkyRL's call; settings are those of its `AlgorithmConfig`. Its trainer divides advantages, so a loss is a sum."""

    takes: ClassVar = frozenset({"log_probs", "old_log_probs", "advantages", "loss_mask"})
    counts_are_global = True

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss = loss
        try:
            self._config = import_module("skyrl.train.config").AlgorithmConfig()
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"{error.name} must be installed for SkyRL's settings, and it is not. Run `pip install skyrl`.",
                name=error.name,
            ) from None
        _set_fields(self._config, settings)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """(scalar, metrics), as SkyRL calls it."""
        return self._loss(
            log_probs=batch.logp,
            old_log_probs=batch.behavior_logp,
            advantages=batch.advantage,
            config=self._config,
            loss_mask=batch.in_loss.to(torch.float32),
            rollout_logprobs=batch.behavior_logp,
        )


def _set_fields(config: Any, settings: Settings) -> None:
    for key, value in settings.items():
        if not hasattr(config, key):
            raise ConfigError(f"A setting must be a field of {type(config).__name__}, got {key!r}.")
        if isinstance(value, Mapping):
            _set_fields(getattr(config, key), value)
        else:
            setattr(config, key, value)


@ADAPTERS.register("trustrl")
class Ours:
    """`trustrl.policy_loss`; the setting `region` names a preset that reads no more than sampled tokens."""

    takes: ClassVar = frozenset({"policy", "rollout", "region", "reduction"})
    counts_are_global = True

    def __init__(self, loss: Loss, settings: Settings) -> None:
        from trustrl.config.presets import preset

        unknown = settings.keys() - {"region"}
        if unknown:
            raise ConfigError(f"A setting must be `region`, got {sorted(unknown)[0]!r}.")
        self._loss, self._region = loss, preset(settings.get("region", "dppo-binary-tv"))
        self._needs = self._region.needs()
        if self._needs.topk or self._needs.full:
            raise ConfigError(
                f"region must read the sampled tokens only, got {self._region.kind!r}, which needs more of the "
                "vocabulary than these batches have."
            )

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """The scalar, reduced as the region asks."""
        from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
        from trustrl.records import PolicyTokens, RolloutTokens

        if self._needs.reduction is SequenceMeanTokenMean:
            reduction = SequenceMeanTokenMean(num_sequences=whole.num_sequences)
        else:
            reduction = TokenMean(num_tokens=whole.num_tokens)
        rollout = RolloutTokens(
            behavior_logp=batch.behavior_logp,
            proximal_logp=batch.behavior_logp,
            advantage=batch.advantage,
            in_loss=batch.in_loss,
        )
        return self._loss(PolicyTokens(logp=batch.logp), rollout, self._region, reduction=reduction).loss


@ADAPTERS.register("plain")
class Plain:
    """Four tensors in. A scalar comes back, or token terms, which are then averaged over the whole batch's tokens.

    A function with a parameter `num_tokens` is told that count. Settings are further keywords.
    """

    takes: ClassVar = frozenset({"logp", "behavior_logp", "advantage", "mask"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss, self._settings = loss, dict(settings)
        found = _parameters(loss)
        self._by_name = self.takes <= found.keys()
        self._told = "num_tokens" in found
        self.counts_are_global = self._told

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """The scalar; made here where the function returns token terms."""
        given = (batch.logp, batch.behavior_logp, batch.advantage, batch.in_loss)
        more = self._settings | ({"num_tokens": whole.num_tokens} if self._told else {})
        if self._by_name:
            names = ("logp", "behavior_logp", "advantage", "mask")
            found = self._loss(**dict(zip(names, given, strict=True)), **more)
        else:
            found = self._loss(*given, **more)
        if isinstance(found, Tensor) and found.dim() and found.shape == batch.logp.shape:
            self.counts_are_global = True  # only its first answer tells
            return torch.where(batch.in_loss, found, 0.0).sum() / max(whole.num_tokens, 1)
        return found
