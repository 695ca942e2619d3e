"""Adapters for losses that a trainer object computes, or that name their tensors differently.

trl        TRL's `GRPOTrainer._compute_loss`, in a real trainer on a tiny model
openrlhf   OpenRLHF's `PolicyLoss`, a module: forward(log_probs, old_log_probs, advantages, action_mask, …)
logprobs   f(logprobs, old_logprobs, advantages, loss_mask, …), as in AReaL and RLinf
torchtune  torchtune's `PPOLoss`, a module: forward(pi_old_logprobs, pi_logprobs, advantages, …, padding_masks)
"""

import inspect
import tempfile
from typing import Any, ClassVar

import torch
from torch import Tensor

from trustrl.errors import ConfigError
from trustrl.optional_imports import need
from trustrl.tools.conformance.adapters import ADAPTERS, Loss, Settings
from trustrl.tools.conformance.batches import Batch

_WITH_GLOBAL_COUNT = ("cispo", "dapo", "vespo")
"""TRL's loss types that divide by the number of tokens in the whole batch. The others average their micro-batch."""


@ADAPTERS.register("trl")
class TRL:
    """TRL's loss, called by a real `GRPOTrainer`. Settings: fields of `GRPOConfig`.

    The trainer's model is tiny. The adapter returns the batch's log-probs from the method that computes the model's.
    """

    takes: ClassVar = frozenset({"self", "model", "inputs"})

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss = loss
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
        reward_funcs=_no_reward,
        args=trl.GRPOConfig(**usual | dict(settings)),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["1", "2"]}),
        processing_class=tiny.tokenizer(),
    )
    trainer.current_gradient_accumulation_steps = 1  # TRL sets it when training begins
    return trainer


def _no_reward(completions: list[str], **_: Any) -> list[float]:
    return [0.0] * len(completions)


@ADAPTERS.register("openrlhf")
class OpenRLHF:
    """OpenRLHF's module, with the counts that its trainer passes. Settings: arguments of its constructor."""

    takes: ClassVar = frozenset({"log_probs", "old_log_probs", "advantages", "action_mask"})
    counts_are_global = True

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss = loss(**settings)

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
class Logprobs:
    """Function of `logprobs`, `old_logprobs`, `advantages` and `loss_mask`. Settings are further keyword arguments.

    `proximal_logprobs`, if the function takes it, receives the same log-probs as `old_logprobs`.
    """

    takes: ClassVar = frozenset({"logprobs", "old_logprobs", "advantages", "loss_mask"})
    counts_are_global = False

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss, self._settings = loss, dict(settings)
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
class Torchtune:
    """torchtune's module. Values and returns are 0, so its value loss is 0. Settings: arguments of its constructor."""

    takes: ClassVar = frozenset({"pi_old_logprobs", "pi_logprobs", "advantages", "padding_masks"})
    counts_are_global = False

    def __init__(self, loss: Loss, settings: Settings) -> None:
        self._loss = loss(**settings)

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
