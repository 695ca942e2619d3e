"""verl's training batches in the token record: texts, rewards and groups of sequences, and the settings of the run.

verl sends the worker the whole batch, so nothing is fetched. Texts are decoded from ids with the worker's tokenizer.

Seam: `ActorRolloutRefWorker.init_model`, which is called unchanged. The actor inside it does not see the sampler's
      settings, so a context variable carries them.

`StockRecord` records a run with one of verl's own losses, which stays the same bit for bit. `RegionWorker` calls verl's
loss with verl's arguments, and records what it was called with:

    VERL_USE_EXTERNAL_MODULES=trustrl.engines.verl TRUSTRL_RECORD=records python -m verl.trainer.main_ppo ...
"""

import functools
import hashlib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from importlib import metadata
from typing import Any

from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from trustrl.config.axes import Region
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.stock_tokens import StockTokens
from trustrl.engines.refusals.rows import reader
from trustrl.engines.verl import anchors
from trustrl.engines.verl.anchors import extra_fields, replicas
from trustrl.engines.verl.response_layout import every_response_token, padded, taken
from trustrl.recording import Recorder, SequenceRows, sequence_ids

SEQUENCE = "trustrl_sequence"
"""The field added to a batch: the id of each sequence."""

VERSION = "trustrl_sequence_version"
"""The field added to a batch: the version of the weights that drew each sequence."""

SCORES = ("rm_scores", "token_level_scores")
"""Reward of each response token, as verl's two trainers name it."""


def name_sequences(recorder: Recorder, data: Any, worker: Any, *, step: int) -> None:
    """Adds an id for each sequence to a batch, and records the sequences.

    Args:
        recorder: The recorder of this rank.
        data: This rank's part of the batch.
        worker: verl's `TrainingWorker`.
        step: The training step.
    """
    rank = worker.engine.get_data_parallel_rank()
    ids = sequence_ids(step=step, rollout=0, rank=rank, count=len(data))
    data[SEQUENCE] = ids
    padding = is_padding(data)
    chosen = [row for row, on in enumerate(recorder.sampled(ids).tolist()) if on and not padding[row]]
    if chosen:
        recorder.add_sequences(sequence_rows(data, ids, chosen, worker.model_config), step=step)


def sequence_rows(data: Any, sequences: Tensor, chosen: list[int], model: Any) -> SequenceRows:
    """Returns the rows of some sequences of a batch.

    Args:
        data: This rank's part of the batch.
        sequences: The id of each sequence.
        chosen: The rows of the batch to return.
        model: verl's `HFModelConfig`, with the tokenizer.
    """
    prompts, responses = _ids(data, "prompts", chosen), _ids(data, "responses", chosen)
    more: dict[str, Any] = {}
    for name in SCORES:
        if data.get(name, None) is not None:
            more["reward"] = padded(data[name])[chosen].sum(-1).tolist()
            break
    extra = [extra_fields(data)[row].get("reward_extra_info", {}) for row in chosen]
    if any(extra):
        more["rewards"] = [_numbers(info) for info in extra]
    uid, task = _column(data, "uid"), _tasks(data)
    ends = _end_ids(model)
    tokenizer = model.tokenizer
    if tokenizer is not None:
        more["prompt"] = tokenizer.batch_decode(prompts, skip_special_tokens=False)
        more["completion"] = tokenizer.batch_decode(responses, skip_special_tokens=True)
    servers = replicas(data)
    return SequenceRows(
        sequence=sequences[chosen].tolist(),
        replica=[servers[row] for row in chosen],
        group=None if uid is None else [_group(uid[row]) for row in chosen],
        task_id=None if task is None else [task[row] for row in chosen],
        prompt_tokens=[len(prompt) for prompt in prompts],
        completion_tokens=[len(response) for response in responses],
        advantage=_advantages(data, chosen),
        stop_reason=["stop" if response and response[-1] in ends else "length" for response in responses]
        if ends
        else None,
        **more,
    )


def is_padding(data: Any) -> list[bool]:
    """Returns whether each sequence is one that verl pads short batches with: no token in the loss, one prompt id."""
    in_loss = padded(data["response_mask"]).bool().any(-1).tolist()
    prompts = _ids(data, "prompts", range(len(in_loss)))
    return [not on and len(set(ids)) == 1 for on, ids in zip(in_loss, prompts, strict=True)]


def _group(uid: Any) -> int:
    """Returns verl's uid of a prompt, a text, as the record's number of 63 bits."""
    return int.from_bytes(hashlib.blake2b(str(uid).encode(), digest_size=8).digest(), "big") >> 1


def _ids(data: Any, name: str, rows: Iterable[int]) -> list[list[int]]:
    """Returns the ids of prompts or responses without padding."""
    x = data[name]
    if x.is_nested:
        parts = x.unbind()
        return [parts[row].tolist() for row in rows]
    width = data["prompts"].shape[1]
    on = data["attention_mask"][:, :width] if name == "prompts" else data["attention_mask"][:, width:]
    return [x[row][on[row].bool()].tolist() for row in rows]


def _column(data: Any, name: str) -> list[Any] | None:
    """Returns a field that is not a tensor, one value per sequence."""
    values = data.get(name, None)
    if values is None:
        return None
    return values.tolist() if hasattr(values, "tolist") else list(values)


def _tasks(data: Any) -> list[str | None] | None:
    """Returns `data_source`, followed by the index in `extra_info` if the dataset has one."""
    sources, infos = _column(data, "data_source"), _column(data, "extra_info")
    if sources is None:
        return None
    indices = [info.get("index") if isinstance(info, dict) else None for info in infos or [None] * len(sources)]
    return [str(a) if b is None else f"{a}/{b}" for a, b in zip(sources, indices, strict=True)]


def _numbers(info: dict[str, Any]) -> dict[str, float]:
    return {name: float(x) for name, x in info.items() if isinstance(x, (bool, int, float))}


def _advantages(data: Any, chosen: list[int]) -> list[float | None]:
    """Returns the advantage of each sequence; None if it differs between the tokens."""
    advantages, in_loss = padded(data["advantages"]), padded(data["response_mask"]).bool()
    sequences = [advantages[row][in_loss[row]] for row in chosen]
    return [float(x[0]) if len(x) and bool((x == x[0]).all()) else None for x in sequences]


def _end_ids(model: Any) -> set[int]:
    """Returns the ids that end a response."""
    eos_ids = [getattr(source, "eos_token_id", None) for source in (model.generation_config, model.tokenizer)]
    every = [token_id for ends in eos_ids for token_id in (ends if isinstance(ends, list) else [ends])]
    return {token_id for token_id in every if token_id is not None}


_CONFIG: ContextVar[Any] = ContextVar("actor_rollout_ref", default=None)


def knowing_the_config(init_model: Any) -> Any:
    """Returns verl's `init_model` that passes its worker's settings on to `about`."""

    @functools.wraps(init_model)  # keeps verl's mark of how to call it on a group of workers
    def inner(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _CONFIG.set(self.config)
        try:
            return init_model(self, *args, **kwargs)
        finally:
            _CONFIG.reset(before)

    return inner


def about(worker: Any, loss: str, *, observed: bool = False) -> dict[str, Any]:
    """Returns the settings of a verl run for `run.json`. None if this worker does not know one.

    Args:
        worker: verl's `TrainingWorker`.
        loss: The name of its policy loss.
        observed: Whether the recorded region only observes, and verl's own loss trains.
    """
    setting = reader(_CONFIG.get() or {})
    engine, model = worker.engine_config, worker.model_config
    settings = {
        "sampler": setting("rollout.name", None),
        "loss": loss,
        "strategy": engine.strategy,
        "completions_per_prompt": setting("rollout.n", None),
        "learning_rate": getattr(worker.optimizer_config, "lr", None),
        "seed": setting("rollout.seed", None),
    }
    return {
        "engine": {"name": "verl", "version": metadata.version("verl"), "settings": settings},
        "model": getattr(model, "path", None),
        "tokenizer": getattr(model, "tokenizer_path", None),
        "dtypes": {"trainer": _forward_dtype(worker), "sampler": setting("rollout.dtype", None)},
        "sampling": {name: setting(f"rollout.{name}", None) for name in ("temperature", "top_p", "top_k", "min_p")},
        "region_role": "observed" if observed else None,
    }


def _forward_dtype(worker: Any) -> str | None:
    """Returns the dtype of the trainer's forward pass: FSDP's mixed precision, or Megatron's setting."""
    dtype = getattr(worker.engine, "_autocast_dtype", None) or getattr(worker.engine_config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


class StockRecord:
    """The record of a worker whose loss is verl's own.

    Args:
        recorder: The recorder of this rank.
        region: A region to observe, or None.
    """

    def __init__(self, recorder: Recorder, region: Region | None) -> None:
        self._tokens = StockTokens(recorder, region)
        self._step = self._updates = 0
        self._bypass = False

    def begin(self, step: int, data: Any, sent: Mapping[int, int]) -> None:
        """Begins a training step.

        Args:
            step: The training step.
            data: This rank's part of the batch.
            sent: The worker's training steps before each version of the weights was sent to the sampler.
        """
        self._step, self._updates = step, 0
        self._bypass = anchors.bypassed(data)
        versions = anchors.sequence_versions(data, sent)
        if versions is not None:
            data[VERSION] = versions

    def begin_update(self) -> None:
        """Begins an optimizer step."""
        self._updates += 1

    def end(self) -> None:
        """Ends the training step."""
        self._tokens.end_step(self._step)

    def loss(self, theirs: Any, *, model_output: Any, data: Any, dp_group: Any = None) -> tuple[Tensor, dict]:
        """Runs verl's loss of one micro-batch, and records what it got."""
        result = theirs(model_output=model_output, data=data, dp_group=dp_group)
        if SEQUENCE in data.keys() and "log_probs" in model_output:  # noqa: SIM118 - a TensorDict
            self._add(model_output, data)
        return result

    def _add(self, model_output: Any, data: Any) -> None:
        tokens = every_response_token(data)
        entropy, version = model_output.get("entropy", None), data.get(VERSION, None)
        advantages, weights = taken(data["advantages"], tokens), data.get("rollout_is_weights", None)
        if weights is not None:
            advantages = advantages * taken(weights, tokens)
        policy = PolicyTokens(
            logp=tokens.of(no_padding_2_padding(model_output["log_probs"].detach(), data)),
            entropy=None if entropy is None else tokens.of(no_padding_2_padding(entropy.detach(), data)),
            version=self._step,
        )
        known: dict[str, Any] = anchors.logps(data, tokens, bypass=self._bypass, truncated=False)
        rollout = RolloutTokens(
            advantage=advantages,
            in_loss=taken(data["response_mask"], tokens).bool(),
            token_ids=taken(data["responses"], tokens),
            sequence_ids=tokens.row,
            version=None if version is None else tokens.of_rows(version),
            position=tokens.column,
            **known,
        )
        sequences, update = tokens.of_rows(data[SEQUENCE]), max(self._updates - 1, 0)
        self._tokens.add(policy, rollout, sequences=sequences, step=self._step, update=update)
