"""Top-K regions and TROLL as prime-rl's policy loss, anchored on the sampler's own record.

Seam:     `FusedOutputLinear.forward`, prime-rl's output layer, and `DataLoader._micro_batch_to_tensor`. The import of
          this module replaces both. prime-rl imports its custom loss after it has built the model and before it loads a
          batch, so the layer is replaced in its class
Switch:   `import_path = "trustrl.engines.prime_rl.vocabulary.region_loss"`, with the region in `[trainer.loss.kwargs]`
Borrowed: packing, wire format, forward and backward passes, the factor of each token, and the division by its count
Added:    the sampler's top K in the field `routed_experts` (see `sampled_topk`). The output layer computes log-probs
          with trustrl's pass, which reads these ids in the same tiles, so it never makes logits
"""

import functools
import json
from collections import deque
from typing import Any, NamedTuple

import torch
from prime_rl.trainer.models.layers import lm_head
from prime_rl.trainer.rl import data, loss as prime_rl_loss
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.core.clean import OnNonFinite
from trustrl.core.metrics import Choice
from trustrl.core.policy_loss import policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.core.token_logprobs import token_logprobs
from trustrl.engines.common import seam
from trustrl.engines.common.region_settings import region_given
from trustrl.engines.prime_rl.losses import SETTING, check_seam, outputs, reduction_of, refuse_per_sequence
from trustrl.engines.prime_rl.sampled_topk import SampledTopK, topk_of
from trustrl.errors import ConfigError, EngineError, MissingDataError


class Loaded(NamedTuple):
    """The part of a micro-batch of S packed tokens that prime-rl's trainer does not pass on."""

    tokens: Tensor
    """(S,)"""

    topk: SampledTopK | None


class Read(NamedTuple):
    """The policy at the sampler's ids, for each of the S tokens of the last forward pass."""

    tokens: Tensor
    topk: SampledTopK
    topk_logp: Tensor
    """(S, K), with gradient"""

    tail_logp: Tensor
    """(S,), with gradient"""


class _Trainer:
    """The micro-batches of one training process."""

    def __init__(self) -> None:
        self.loaded: deque[Loaded] = deque()
        """Those that wait for their forward pass, in prime-rl's order."""

        self.read: Read | None = None


_TRAINER = _Trainer()


def region_loss(
    inputs: Any, *, on_nonfinite: OnNonFinite = "drop", metrics: Choice = "core", **region: Any
) -> "prime_rl_loss.LossOutputs":
    """Returns the loss of one sequence, a sum over its tokens, and its metrics.

    Args:
        inputs: prime-rl's `LossInputs`: one sequence, whose tensors are slices of the packed micro-batch.
        on_nonfinite: See `trustrl.policy_loss`.
        metrics: The metrics to log: "core" for a few, "all" for every one that prime-rl can average.
        region: `preset` and the settings that differ from it, or `kind` and all settings of a region.

    Raises:
        ConfigError: If the settings describe no region that reads the sampler's top K.
        EngineError: If prime-rl calls its losses or its output layer in a way that this adapter does not support.
        MissingDataError: If the sampler recorded no top K.
    """
    chosen = _region(json.dumps(region, sort_keys=True))
    check_seam(type(inputs))
    logp, mask, read = inputs.trainer_logprobs, inputs.loss_mask, _TRAINER.read
    # prime-rl splits one packed tensor into sequences and does not say where each was. A slice knows its own place.
    start = logp.storage_offset()
    if read is None or logp.untyped_storage().nbytes() != len(read.tokens) * logp.element_size():
        raise EngineError(
            "prime-rl's log-probs must be slices of one packed micro-batch of its fused output layer, and they are "
            "not. Set trainer.model.fused_lm_head_token_chunk_size to a number, and trainer.model.cp to 1."
        )
    k = chosen.needs().topk
    if read.topk.ids.shape[1] != k:
        raise ConfigError(
            f"{SETTING} must describe a region with k = {read.topk.ids.shape[1]}, which the sampler recorded, got {k}. "
            "Record the region's k."
        )
    here = slice(start, start + len(logp))
    out = policy_loss(
        PolicyTokens(logp=logp[None], topk_logp=read.topk_logp[here][None], tail_logp=read.tail_logp[here][None]),
        RolloutTokens(
            behavior_logp=inputs.inference_logprobs[None],
            advantage=inputs.advantages[None],
            in_loss=mask[None],
            token_ids=read.tokens[here][None],
            topk=TopK(read.topk.ids[here][None].long(), read.topk.logp[here][None], of="behavior"),
        ),
        chosen,
        reduction=reduction_of(inputs),
        on_nonfinite=on_nonfinite,
    )
    return outputs(out, mask, metrics)


@functools.cache
def _region(settings: str) -> Region:
    region = region_given(json.loads(settings), SETTING)
    needs = region.needs()
    if not needs.topk or needs.full or needs.fills or needs.anchors != {"behavior"}:
        raise ConfigError(
            f"{SETTING} must describe a Top-K region or TROLL anchored on the sampler alone, got {region.kind} "
            f"anchored on {needs.anchor}. Set anchor='behavior' and, for TROLL, rest='bucket'. Regions on the sampled "
            "token use import_path = 'trustrl.engines.prime_rl.region_loss'."
        )
    refuse_per_sequence(region)
    return region


def _load(self: Any, micro_batch: Any) -> Any:
    """Makes the tensors of a micro-batch as prime-rl does, and takes the sampler's top K out of it."""
    tensors = _PRIME_RL_LOAD(self, micro_batch)
    table, tensors["routed_experts"] = tensors["routed_experts"], None
    _TRAINER.loaded.append(Loaded(tensors["input_ids"][0], None if table is None else topk_of(table[0])))
    return tensors


def _head(self: Any, hidden_states: Tensor, labels: Tensor | None = None, temperature: Tensor | None = None) -> Any:
    """Computes the log-probs of the labels and at the sampler's ids; replaces prime-rl's fused output layer."""
    assert labels is not None  # prime-rl's own layer asserts both
    assert temperature is not None
    if not _TRAINER.loaded or _TRAINER.loaded[0].topk is None:
        raise MissingDataError(
            "prime-rl's micro-batches must hold the sampler's top K, got none. Fill the samples' routed_experts with "
            "`trustrl.engines.prime_rl.sampled_topk.table_of`, and leave trainer.data.fake out."
        )
    tokens, topk = _TRAINER.loaded.popleft()
    batch, length, width = hidden_states.shape
    if batch != 1 or length != len(tokens):
        raise EngineError(
            f"prime-rl must run its passes in the order of its micro-batches, got {batch} × {length} states for "
            f"{len(tokens)} tokens. Set trainer.model.cp to 1."
        )
    assert topk is not None
    topk = SampledTopK(topk.ids.to(labels.device), topk.logp.to(labels.device))
    out = token_logprobs(
        hidden_states.reshape(-1, width),
        self.weight,
        labels.reshape(-1),
        gather_ids=_next(topk.ids).long(),
        entropy="detached",
        temperature=temperature.reshape(-1),
    )
    assert out.gathered_logp is not None  # requested
    assert out.tail_logp is not None
    assert out.entropy is not None
    read = _TRAINER.read = Read(tokens.to(labels.device), topk, _previous(out.gathered_logp), _previous(out.tail_logp))
    # In the output too: FSDP2 adds its backward hooks to the tensors that it finds there.
    return {
        "logprobs": out.logp.view(batch, length),
        "entropy": out.entropy.view(batch, length),
        "trustrl_topk_logp": read.topk_logp,
        "trustrl_tail_logp": read.tail_logp,
    }


def _next(x: Tensor) -> Tensor:
    """Returns the value of the next token at each token. The state before a token predicts it."""
    return torch.cat([x[1:], torch.zeros_like(x[:1])])


def _previous(x: Tensor) -> Tensor:
    """Returns the value of the state before each token; the first token, which nothing predicts, keeps the first."""
    return torch.cat([x[:1], x[:-1]])


def _install() -> Any:
    seam.require_parameters(
        lm_head.FusedOutputLinear, "forward", ("self", "hidden_states", "labels", "temperature"), package="prime-rl"
    )
    seam.require_parameters(data.DataLoader, "_micro_batch_to_tensor", ("self", "micro_batch"), package="prime-rl")
    original = data.DataLoader._micro_batch_to_tensor
    data.DataLoader._micro_batch_to_tensor = _load
    lm_head.FusedOutputLinear.forward = _head
    return original


_PRIME_RL_LOAD = _install()
