"""SkyRL's FSDP policy worker for regions that need more than SkyRL passes to a loss.

Seam:     `_forward_micro_batch` and `_forward_backward_micro` of `FSDPPolicyWorkerBase`, and `forward`,
          `forward_backward` and `init_model` around them, which all call super()
Switch:   `RegionTrainer`, which builds its policy workers from this class
Borrowed: the passes, their packing, and the micro-batches
Added:    a read of the vocabulary inside both passes. `forward` returns the anchor's top K next to each row's
          log-probs. `forward_backward` takes it from the batch, with the factor of each token, and passes both to the
          loss through `MICRO_BATCH`
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from skyrl.backends.skyrl_train.training_batch import TensorList
from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase
from skyrl.backends.skyrl_train.workers.worker_utils import BaseBatchIterator
from torch import Tensor

from trustrl.engines.common import seam
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_forward import LogitsForward
from trustrl.engines.common.vocabulary_read import Wanted
from trustrl.engines.skyrl.losses import ANCHOR, FACTOR, MICRO_BATCH, MicroBatch
from trustrl.engines.skyrl.skyrl_config import region_of
from trustrl.errors import ConfigError, EngineError

ROW = "trustrl_row"
"""The key of the row numbers, by which `forward` finds its rows again in whatever micro-batches SkyRL made."""

MICRO_WITH = ("self", "experience", "microbatch_weight", "loss_fn", "loss_fn_config")


class RegionPolicyWorkerBase(FSDPPolicyWorkerBase):
    """SkyRL's policy worker, whose passes also read the part of the vocabulary that the region needs."""

    def __init__(self, **kwargs: Any) -> None:
        _check_seams()
        super().__init__(**kwargs)
        algorithm = self.cfg.algorithm
        self._needs = region_of(algorithm.policy_loss_type, algorithm).needs()
        self._vocabulary: LogitsForward | None = None
        self._anchor: dict[int, dict[str, Tensor]] = {}

    def init_model(self, *args: Any, **kwargs: Any) -> None:
        """Makes the model, and adds the read of the vocabulary to its forward.

        Raises:
            ConfigError: If the model takes images, or its output layer is more than its weight.
        """
        super().init_model(*args, **kwargs)
        if not self._needs.topk:
            return
        if self.model.is_vlm:
            raise ConfigError(
                "trainer.policy.model.path must be a text model with a Top-K region or TROLL, got one with images. "
                "Set trainer.policy.language_model_only=true, or choose a region on the sampled token."
            )
        model = self.model.model
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self._vocabulary = LogitsForward(base, float32_head=False)

    # ── the pass at the rollout's weights ───────────────────────────────────────────────────────────────────────────

    def forward(self, data: Any, loss_fn: Any = None, loss_fn_config: Any = None) -> Any:
        """Runs SkyRL's own pass, and adds the anchor's top K to the output of each row."""
        recording = self._vocabulary is not None and loss_fn is None
        if recording:
            data[ROW] = torch.arange(len(data))
        output = super().forward(data, loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        if recording:
            for row, fields in enumerate(output.loss_fn_outputs):
                fields.update(self._anchor.pop(row))
        return output

    def _forward_micro_batch(self, micro_batch: Any) -> Any:
        rows = micro_batch.get(ROW)  # absent in a micro-batch of padding, which SkyRL drops
        if self._vocabulary is None:
            return super()._forward_micro_batch(micro_batch)
        length = micro_batch.metadata["response_length"]
        attention = micro_batch["attention_mask"].to(torch.cuda.current_device())
        where = TokenPlaces.of_mask(attention[:, -length:].bool())
        wanted = self._wanted(micro_batch["sequences"], attention, where, top_k=self._needs.topk)
        with self._vocabulary.pending(wanted) as passes:
            output = super()._forward_micro_batch(micro_batch)
        (read,) = passes
        columns: tuple[Any, ...] = (read.log_probs, read.topk_ids, read.topk_logp, read.topk_tail_logp)
        parts = [where.split((x if x.is_floating_point() else x.int()).cpu()) for x in columns]
        for number, row in enumerate(() if rows is None else rows.tolist()):
            self._anchor[row] = {name: part[number] for name, part in zip(ANCHOR, parts, strict=True)}
        return output

    # ── the pass with gradient ──────────────────────────────────────────────────────────────────────────────────────

    def forward_backward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs SkyRL's own method; see `_forward_backward_micro`."""
        with _columns_in_experience():
            return super().forward_backward(*args, **kwargs)

    def _forward_backward_micro(
        self, experience: Any, microbatch_weight: float, loss_fn: Any = None, loss_fn_config: Any = None
    ) -> Any:
        run = super()._forward_backward_micro
        if loss_fn is not None:  # another loss than the region's
            return run(experience, microbatch_weight, loss_fn=loss_fn, loss_fn_config=loss_fn_config)
        device = torch.cuda.current_device()
        experience.to_device(device)
        where = TokenPlaces.of_mask(experience.loss_mask.bool())
        anchor, factor = self._columns(experience, where, device)
        context: Any = nullcontext(None)
        if self._vocabulary is not None:
            own = self._needs.topk if self._needs.fills else 0
            context = self._vocabulary.pending(
                self._wanted(
                    experience.sequences, experience.attention_mask, where, gather_ids=anchor["trustrl_topk_ids"],
                    top_k=own,
                )
            )  # fmt: skip
        tokens = experience.sequences[:, -experience.num_actions :]
        with context as passes:
            reset = MICRO_BATCH.set(MicroBatch(where, factor, where.of(tokens), anchor, passes))
            try:
                return run(experience, microbatch_weight, loss_fn=loss_fn, loss_fn_config=loss_fn_config)
            finally:
                MICRO_BATCH.reset(reset)

    def _columns(self, experience: Any, where: TokenPlaces, device: Any) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the anchor of the N tokens in the loss, and their factors."""
        columns = experience.trustrl
        if not len(where.flat):  # such as SkyRL's micro-batches of padding, which lack the columns
            ids = torch.zeros(0, self._needs.topk, dtype=torch.int, device=device)
            none = torch.zeros(0, device=device)
            return dict(zip(ANCHOR, (none, ids, ids.float(), none), strict=True)), none
        factor = where.of(columns[FACTOR].to(device))
        if self._vocabulary is None:
            return {}, factor
        recorded = TokenPlaces.of_mask(experience.attention_mask[:, -experience.num_actions :].bool())
        in_loss = recorded.of(experience.loss_mask.bool())
        return {name: torch.cat(columns[name].tensors).to(device)[in_loss] for name in ANCHOR}, factor

    def _wanted(self, sequences: Tensor, attention: Tensor, where: TokenPlaces, **more: Any) -> Wanted:
        """Returns the request for some tokens of the responses."""
        tokens = sequences[:, -where.shape[1] :].to(attention.device)
        states = packed_states(attention, where) if self.cfg.remove_microbatch_padding else where.states
        return Wanted(where.of(tokens), states, temperature=self.cfg.algorithm.temperature, **more)


def packed_states(attention: Tensor, where: TokenPlaces) -> Callable[[Tensor], Tensor]:
    """Returns a map from the hidden states of a packed batch, (1, P, D), to those that predict some tokens, (N, D).

    Args:
        attention: (B, L), 1 on the P tokens that SkyRL packed.
        where: The places of the N tokens in the last columns.
    """
    length = attention.shape[1]
    place = attention.flatten().cumsum(0) - 1
    before = place[where.row * length + where.column + (length - where.shape[1] - 1)]
    return lambda hidden: hidden[0].index_select(0, before)


@contextmanager
def _columns_in_experience() -> Iterator[None]:
    """Context manager in which SkyRL's `Experience` also has our columns. SkyRL copies a fixed list of fields."""
    original = BaseBatchIterator.batch_to_experience

    def with_columns(batch: Any) -> Any:
        experience = original(batch)
        experience.trustrl = {name: batch.get(name) for name in (FACTOR, *ANCHOR)}
        return experience

    BaseBatchIterator.batch_to_experience = staticmethod(with_columns)
    try:
        yield
    finally:
        BaseBatchIterator.batch_to_experience = staticmethod(original)


def joined(rows: list[dict[str, Any]], batch_size: int) -> dict[str, TensorList]:
    """Returns the anchor's columns of a batch from the outputs of `forward`, one row per sequence.

    Raises:
        EngineError: If the numbers of rows and sequences differ.
    """
    if len(rows) != batch_size:
        raise EngineError(
            f"SkyRL's forward pass must return one row for each of {batch_size} sequences, got {len(rows)}. Set "
            "trainer.recompute_old_logprobs_per_minibatch=false."
        )
    return {name: TensorList([row[name] for row in rows]) for name in ANCHOR}


def _check_seams() -> None:
    # Ray appends a parameter of its own to the methods of actors.
    takes = {
        "_forward_micro_batch": ("self", "micro_batch"),
        "_forward_backward_micro": MICRO_WITH,
        "forward": ("self", "data", "loss_fn", "loss_fn_config"),
    }
    for name, parameters in takes.items():
        seam.require_parameters(FSDPPolicyWorkerBase, name, parameters, more=True)
    seam.require_parameters(BaseBatchIterator, "batch_to_experience", ("batch",))
