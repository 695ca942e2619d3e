"""The sampler's most probable ids in the field that prime-rl carries unread from its sampler to its trainer.

prime-rl slices, packs, pads and sends `routed_experts` as bytes with a shape and a dtype, and its trainer ignores it
without router replay. A table of T tokens is (T, 2, K) int32: the ids, and the bits of their log-probs in float32. Rows
of tokens that were not sampled are 0.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.errors import EngineError


class SampledTopK(NamedTuple):
    """The K most probable ids under μ of T tokens."""

    ids: Tensor
    """(T, K) int32"""

    logp: Tensor
    """(T, K) float32"""


def table_of(record: SampledRecord, before: int) -> np.ndarray:
    """Returns the table of a completion's tokens, after zeros for the tokens before them.

    Args:
        record: The sampler's record of the completion.
        before: The number of tokens before it.
    """
    sampled = np.stack([record.topk_ids.astype(np.int32), record.topk_logp.astype(np.float32).view(np.int32)], axis=1)
    return np.concatenate([np.zeros((before, *sampled.shape[1:]), np.int32), sampled])


def topk_of(table: Tensor) -> SampledTopK:
    """Returns the ids and log-probs of a table, (T, 2, K) int32.

    Raises:
        EngineError: If it is another table, such as the experts of a mixture of experts.
    """
    if table.shape[1] == 2:
        ids, bits = table.unbind(1)
        logp = bits.contiguous().view(torch.float32)
        if bool((logp <= 0).all()):
            return SampledTopK(ids, logp)
    raise EngineError(
        "prime-rl's routed_experts must hold the sampler's top K as `table_of` writes it, got a table of "
        f"{tuple(table.shape)}. Set enable_return_routed_experts=false, which uses the same field."
    )
