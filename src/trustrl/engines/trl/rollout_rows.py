"""Sequences of TRL's rollouts in the token record: their ids, texts, rewards and groups."""

import math
from collections.abc import Sequence
from importlib import metadata
from typing import Any

import torch
from torch import Tensor
from transformers.trainer_callback import TrainerCallback

from trustrl.recording import Recorder, SequenceRows, sequence_ids

SEQUENCE = "trustrl_sequence"
"""The tensor added to a rollout: the id of each row's sequence."""

GROUPS = -1
"""In place of a rank, for the ids of groups, whose completions may be on several ranks."""


class RecordEnd(TrainerCallback):
    """Brings the record to the disk before each checkpoint, and to an object store at the end of training."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Syncs the recorder if the trainer saves a checkpoint next."""
        if control.should_save:
            self._recorder.sync()

    on_epoch_end = on_step_end

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Flushes the recorder."""
        self._recorder.flush()


class RolloutRows:
    """Ids for the sequences of each rollout, and rows with their texts and rewards for the recorder.

    Args:
        trainer: TRL's trainer.
        recorder: The recorder of this rank.
    """

    def __init__(self, trainer: Any, recorder: Recorder) -> None:
        self._trainer = trainer
        self._recorder = recorder
        self._last = (-1, 0)
        self._scored: tuple[list[dict[str, Any]], list[list[int]], Tensor] | None = None

    def score(
        self, rewards: Tensor, inputs: list[dict[str, Any]], prompts: Any, completions: Any, completion_ids_list: Any
    ) -> None:
        """Keeps the result and the arguments of TRL's `_calculate_rewards` for the rollout that it belongs to.

        Args:
            rewards: (completions of all ranks, reward functions): the rewards, NaN for None.
            inputs: This rank's rows of the dataset, one per completion.
            prompts: Not read.
            completions: Not read.
            completion_ids_list: The token ids of each completion.
        """
        self._scored = (inputs, completion_ids_list, rewards)

    def name(self, rollout: dict[str, Any], replicas: Sequence[str | None] | None = None) -> dict[str, Tensor]:
        """Records the sequences of a training rollout, and returns the tensor of ids to add to it.

        Args:
            rollout: The result of TRL's `_generate_and_score_completions`.
            replicas: The replica that sampled each sequence, or None if it is unknown.
        """
        step, mask = self._trainer.state.global_step, rollout["completion_mask"]
        before, number = self._last
        self._last = (step, number + 1 if step == before else 0)  # a step may begin with several rollouts
        rank = self._trainer.accelerator.process_index
        ids = sequence_ids(step=step, rollout=self._last[1], rank=rank, count=len(mask))
        scored, self._scored = self._scored, None
        chosen = self._recorder.sampled(ids).nonzero().squeeze(1).tolist()
        if chosen:
            self._recorder.add_sequences(self._rows(rollout, ids, scored, chosen, replicas), step=step)
        return {SEQUENCE: ids.to(mask.device)}

    def _rows(
        self,
        rollout: dict[str, Any],
        ids: Tensor,
        scored: Any,
        chosen: list[int],
        replicas: Sequence[str | None] | None,
    ) -> SequenceRows:
        trainer = self._trainer
        on_rank, first = len(ids), trainer.accelerator.process_index * len(ids)
        groups = [(first + row) // trainer.num_generations for row in chosen]
        names = sequence_ids(step=self._last[0], rollout=self._last[1], rank=GROUPS, count=max(groups) + 1)
        prompts = [rollout["prompt_ids"][row][rollout["prompt_mask"][row].bool()].tolist() for row in chosen]
        inputs, sampled, rewards = scored or (None, None, None)
        if sampled is None:
            both = zip(rollout["completion_ids"], rollout["completion_mask"].bool(), strict=True)
            sampled = [x[on].tolist() for x, on in both]
        completions = [list(sampled[row]) for row in chosen]
        more: dict[str, Any] = {}
        if rewards is not None:
            here = rewards[first : first + on_rank][chosen].detach().cpu()
            scores = [_known(row) for row in here.tolist()]
            more["rewards"] = [dict(zip(trainer.reward_func_names, row, strict=True)) for row in scores]
            more["reward"] = _known(_total(here, trainer.reward_weights.cpu()))
        if inputs is not None and "task_id" in inputs[0]:
            more["task_id"] = [str(inputs[row]["task_id"]) for row in chosen]
        advantages = rollout["advantages"]
        if advantages.ndim == 1:
            more["advantage"] = advantages[chosen].tolist()
        ends = _end_ids(trainer)
        return SequenceRows(
            sequence=ids[chosen].tolist(),
            group=names[groups].tolist(),
            prompt_tokens=[len(prompt) for prompt in prompts],
            completion_tokens=[len(completion) for completion in completions],
            stop_reason=["stop" if completion and completion[-1] in ends else "length" for completion in completions],
            replica=None if replicas is None else [replicas[row] for row in chosen],
            prompt=trainer.processing_class.batch_decode(prompts, skip_special_tokens=False),
            completion=trainer.processing_class.batch_decode(completions, skip_special_tokens=True),
            **more,
        )


def _total(rewards: Tensor, weights: Tensor) -> list[float]:
    """Returns the weighted sum of each completion's rewards, as TRL computes it; NaN if no function gave one."""
    total = (rewards * weights).nansum(dim=1)
    return torch.where(rewards.isnan().all(dim=1), torch.nan, total).tolist()


def _known(values: list[float]) -> list[float | None]:
    """Returns the values with None for NaN, by which TRL marks a reward that a function did not give."""
    return [None if math.isnan(x) else x for x in values]


def _end_ids(trainer: Any) -> set[int]:
    """Returns the ids that end a completion, as TRL counts its truncated ones."""
    tokenizer = getattr(trainer, "_tokenizer", None) or trainer.processing_class
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    ends = getattr(trainer, "eos_token_ids", None) or [tokenizer.eos_token_id]
    return {*ends, tokenizer.pad_token_id}


def about(trainer: Any, *, observed: bool = False) -> dict[str, Any]:
    """Returns the settings of a TRL run for `run.json`.

    Args:
        trainer: TRL's trainer.
        observed: Whether the recorded region only observes, and TRL's own loss trains.
    """
    args = trainer.args
    sampling = {"temperature": trainer.temperature}
    updates = args.steps_per_generation * trainer.num_iterations / args.gradient_accumulation_steps
    generates = "vllm" if trainer.use_vllm else "transformers"
    settings = {
        "sampler": "rollout_func" if getattr(trainer, "rollout_func", None) is not None else generates,
        "loss": args.loss_type,
        "steps_planned": args.max_steps if args.max_steps > 0 else None,
        "updates_per_batch": max(1, round(updates)),
        "completions_per_prompt": trainer.num_generations,
        "learning_rate": args.learning_rate,
        "seed": args.seed,
    }
    return {
        "engine": {"name": "trl", "version": metadata.version("trl"), "settings": settings},
        "model": getattr(trainer.model.config, "_name_or_path", None) or None,
        "tokenizer": getattr(trainer.processing_class, "name_or_path", None) or None,
        "dtypes": {"trainer": _trainer_dtype(trainer), "sampler": _sampler_dtype(trainer)},
        "sampling": sampling | {name: getattr(args, name, None) for name in ("top_p", "top_k", "min_p")},
        "region_role": "observed" if observed else None,
    }


def _trainer_dtype(trainer: Any) -> str:
    """Returns the dtype of the trainer's forward pass."""
    if trainer.args.bf16 or trainer.args.fp16:
        return "bfloat16" if trainer.args.bf16 else "float16"
    return str(trainer.model.dtype).removeprefix("torch.")


def _sampler_dtype(trainer: Any) -> str | None:
    """Returns the dtype of the sampler's forward pass; None if it is unknown here, as for a vLLM server."""
    if getattr(trainer, "rollout_func", None) is not None:
        return None
    if not trainer.use_vllm:
        return None if trainer.args.bf16 or trainer.args.fp16 else _trainer_dtype(trainer)
    engine = getattr(getattr(getattr(trainer, "vllm_generation", None), "llm", None), "llm_engine", None)
    dtype = getattr(getattr(engine, "model_config", None), "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")
