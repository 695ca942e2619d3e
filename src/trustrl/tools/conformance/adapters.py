"""Adapters that call a policy loss with each framework's signature.

An adapter takes a batch and the counts of the whole batch, and returns the loss.

plain      f(logp, behavior_logp, advantage, mask[, num_tokens]) -> a scalar, or one value per token
verl       verl's registered losses: f(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, …)
skyrl      SkyRL's registered losses: f(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs)
trustrl    `trustrl.policy_loss` with a preset
trl        TRL's `GRPOTrainer._compute_loss`, in a real trainer on a tiny model
openrlhf   OpenRLHF's `PolicyLoss`, a module: forward(log_probs, old_log_probs, advantages, action_mask, …)
logprobs   f(logprobs, old_logprobs, advantages, loss_mask, …), as in AReaL and RLinf
torchtune  torchtune's `PPOLoss`, a module: forward(pi_old_logprobs, pi_logprobs, advantages, …, padding_masks)
"""

import inspect
import re
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor

from trustrl.errors import ConfigError, MissingPackageError
from trustrl.optional_imports import need
from trustrl.registry import Registry
from trustrl.tools.conformance.expectations import Adapter, Batch

Loss = Callable[..., Any]
Settings = Mapping[str, Any]
NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_WITH_GLOBAL_COUNT = ("cispo", "dapo", "vespo")
"""TRL's loss types that divide by the number of tokens in the whole batch. The others average their micro-batch."""


def find(name: str) -> Callable[..., Any]:
    """Imports a loss by its name, `package.module:function`. The name is never evaluated as code.

    Example:
        >>> find("math:sqrt")(4.0)
        2.0
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"The loss must have the form package.module:function, got {name!r}.")
    module_name, _, path = name.partition(":")
    try:
        target: Any = import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{module_name} must be importable, got {type(error).__name__}: {error}. "
            "Install it, or add its folder to PYTHONPATH."
        ) from error
    for part in path.split("."):
        if not hasattr(target, part):
            raise ConfigError(f"{name} must exist, but {module_name} has no {path!r}.")
        target = getattr(target, part)
    if not callable(target):
        raise ConfigError(f"{name} must be a function, got {type(target).__name__}.")
    return target


ADAPTERS: Registry[type[Adapter]] = Registry("adapter")


def adapted(loss: Loss, name: str | None = None, settings: Settings | None = None) -> Adapter:
    """Wraps a loss in the adapter of this name, or in the one that matches its parameters.

    Raises:
        ConfigError: If no adapter matches, or the adapter does not know a setting.
    """
    return ADAPTERS[name or detected(loss)](loss, settings or {})


def detected(loss: Loss) -> str:
    """Returns the name of the adapter whose parameters the function takes."""
    parameters = _parameters(loss)
    for name, adapter in ADAPTERS.items():
        if adapter.takes <= parameters.keys():
            return name
    raise ConfigError(
        f"The loss must take the parameters of an adapter ({', '.join(ADAPTERS)}), got ({', '.join(parameters)}). "
        "Use --adapter plain to pass logp, behavior_logp, advantage, and mask as its first four."
    )


def _parameters(loss: Loss) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function, or of `forward` if the loss is a module."""
    called = getattr(loss, "forward", loss) if isinstance(loss, type) else loss
    return dict(inspect.signature(called).parameters)


@ADAPTERS.register("verl")
class Verl(Adapter):
    """verl's signature, with the counts that its trainer sets. Settings: fields of its actor, and `loss_agg_mode`."""

    takes: ClassVar = frozenset({"old_log_prob", "log_prob", "advantages", "response_mask"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss, settings)
        self._mode = self._settings.pop("loss_agg_mode", "token-mean")
        self._config_module = need("verl.workers.config", extra="verl")
        policy_loss = self._settings.pop("policy_loss", {})
        self._policy_loss = self._config_module.PolicyLossConfig(**policy_loss)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss as verl does and returns (scalar, metrics)."""
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
class SkyRL(Adapter):
    """SkyRL's signature. Its trainer divides advantages, so losses are sums. Settings: fields of `AlgorithmConfig`."""

    takes: ClassVar = frozenset({"log_probs", "old_log_probs", "advantages", "loss_mask"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss, settings)
        try:
            self._config = import_module("skyrl.train.config").AlgorithmConfig()
        except ModuleNotFoundError as error:
            raise MissingPackageError(
                f"{error.name} is not installed, but SkyRL's settings need it. Run `pip install skyrl`.",
                name=error.name,
            ) from None
        _set_fields(self._config, settings)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss as SkyRL does and returns (scalar, metrics)."""
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
            raise ConfigError(f"Each setting must be a field of {type(config).__name__}, got {key!r}.")
        if isinstance(value, Mapping):
            _set_fields(getattr(config, key), value)
        else:
            setattr(config, key, value)


@ADAPTERS.register("trustrl")
class TrustRL(Adapter):
    """`trustrl.policy_loss`. The setting `region` names a preset that reads only the sampled tokens."""

    takes: ClassVar = frozenset({"policy", "rollout", "region", "reduction"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        from trustrl.regions.presets import preset

        unknown = settings.keys() - {"region"}
        if unknown:
            raise ConfigError(f"The only setting must be `region`, got {sorted(unknown)[0]!r}.")
        super().__init__(loss, {})
        self._region = preset(settings.get("region", "dppo-binary-tv"))
        self._needs = self._region.needs()
        if self._needs.topk or self._needs.full:
            raise ConfigError(
                f"region must read the sampled tokens only, got {self._region.kind!r}, which needs log-probs of other "
                "tokens. Choose a preset on sampled tokens, such as dppo-binary-tv."
            )

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Returns the scalar loss with the reduction that the region requires."""
        from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
        from trustrl.core.records import PolicyTokens, RolloutTokens

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
class Plain(Adapter):
    """Function of four tensors that returns a scalar, or token terms to average over the tokens of the whole batch.

    A function with a parameter `num_tokens` receives that count. Settings are further keyword arguments.
    """

    takes: ClassVar = frozenset({"logp", "behavior_logp", "advantage", "mask"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss, settings)
        parameters = _parameters(loss)
        self._by_name = self.takes <= parameters.keys()
        self._told = "num_tokens" in parameters
        self.counts_are_global = self._told

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Returns the scalar loss, averaging token terms if the function returns them."""
        arguments = (batch.logp, batch.behavior_logp, batch.advantage, batch.in_loss)
        more = self._settings | ({"num_tokens": whole.num_tokens} if self._told else {})
        if self._by_name:
            names = ("logp", "behavior_logp", "advantage", "mask")
            loss = self._loss(**dict(zip(names, arguments, strict=True)), **more)
        else:
            loss = self._loss(*arguments, **more)
        if isinstance(loss, Tensor) and loss.dim() and loss.shape == batch.logp.shape:
            self.counts_are_global = True  # known only from its first answer
            return torch.where(batch.in_loss, loss, 0.0).sum() / max(whole.num_tokens, 1)
        return loss


@ADAPTERS.register("trl")
class TRL(Adapter):
    """TRL's loss, called by a real `GRPOTrainer`. Settings: fields of `GRPOConfig`.

    The trainer's model is tiny. The adapter returns the batch's log-probs from the method that computes the model's.
    """

    takes: ClassVar = frozenset({"self", "model", "inputs"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss, settings)
        self.counts_are_global = settings.get("loss_type", "dapo") in _WITH_GLOBAL_COUNT
        self._folder = tempfile.TemporaryDirectory(prefix="trustrl-conformance-")
        self._trainer = _trainer(self._folder.name, settings)

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss as TRL does, with one gradient accumulation step per batch."""
        trainer, (rows, width) = self._trainer, batch.logp.shape
        ids = torch.ones(rows, width, dtype=torch.long)
        trainer._get_per_token_logps_and_entropies = lambda *_, **__: (batch.logp, torch.zeros(rows, width), None)
        inputs = {
            "prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids,
            "completion_mask": batch.in_loss.long(), "advantages": batch.advantage,
            "old_per_token_logps": batch.behavior_logp, "num_items_in_batch": torch.tensor(whole.num_tokens),
        }  # fmt: skip
        return self._loss(trainer, trainer.model, inputs)


def _trainer(folder: str, settings: Settings) -> Any:
    trl, datasets = (need(name, extra="trl") for name in ("trl", "datasets"))
    from trustrl.world.models import tiny

    known = inspect.signature(trl.GRPOConfig).parameters
    for name in settings:
        if name not in known:
            raise ConfigError(f"Each setting must be a field of GRPOConfig, got {name!r}.")
    usual = {
        "output_dir": folder, "use_cpu": True, "bf16": False, "report_to": [], "per_device_train_batch_size": 2,
        "num_generations": 2, "max_completion_length": 6, "gradient_accumulation_steps": 1,
        "gradient_checkpointing": False, "disable_tqdm": True,
    }  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=tiny.model(tiny.Tiny()),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=trl.GRPOConfig(**usual | dict(settings)),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1", "2"]}),
        processing_class=tiny.tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins
    return trainer


@ADAPTERS.register("openrlhf")
class OpenRLHF(Adapter):
    """OpenRLHF's module, with the counts that its trainer passes. Settings: arguments of its constructor."""

    takes: ClassVar = frozenset({"log_probs", "old_log_probs", "advantages", "action_mask"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss(**settings), {})

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss as OpenRLHF does and returns (scalar, metrics)."""
        return self._loss(
            batch.logp,
            batch.behavior_logp,
            batch.advantage,
            action_mask=batch.in_loss.to(batch.logp.dtype),
            rollout_log_probs=batch.behavior_logp,
            batch_num_tokens=whole.num_tokens,
            global_batch_size=whole.num_sequences,
        )


@ADAPTERS.register("logprobs")
class Logprobs(Adapter):
    """Function of `logprobs`, `old_logprobs`, `advantages` and `loss_mask`. Settings are further keyword arguments.

    `proximal_logprobs`, if the function takes it, receives the same log-probs as `old_logprobs`.
    """

    takes: ClassVar = frozenset({"logprobs", "old_logprobs", "advantages", "loss_mask"})
    counts_are_global = False

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss, settings)
        self._proximal = "proximal_logprobs" in inspect.signature(loss).parameters

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss and returns (scalar, metrics). It averages over the part that it receives."""
        more = {"proximal_logprobs": batch.behavior_logp} if self._proximal else {}
        return self._loss(
            logprobs=batch.logp,
            old_logprobs=batch.behavior_logp,
            advantages=batch.advantage,
            loss_mask=batch.in_loss,
            **more,
            **self._settings,
        )


@ADAPTERS.register("torchtune")
class Torchtune(Adapter):
    """torchtune's module. Values and returns are 0, so its value loss is 0. Settings: arguments of its constructor."""

    takes: ClassVar = frozenset({"pi_old_logprobs", "pi_logprobs", "advantages", "padding_masks"})
    counts_are_global = False

    def __init__(self, loss: Loss, settings: Settings) -> None:
        super().__init__(loss(**settings), {})

    def loss_of(self, batch: Batch, whole: Batch) -> Any:
        """Calls the loss and returns (scalar, metrics). It averages over the part that it receives."""
        values: Tensor = torch.zeros(batch.logp.shape)
        return self._loss(
            batch.behavior_logp,
            batch.logp,
            batch.advantage,
            values,
            values,
            values,
            padding_masks=batch.in_loss,
            value_padding_masks=batch.in_loss,
        )
