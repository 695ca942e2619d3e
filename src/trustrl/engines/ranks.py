"""A step's sums over micro-batches and ranks, where each rank's loss is an average over ranks."""

from typing import Any

import torch
from torch import Tensor

from trustrl.diagnostics import Sums


def share_of_one_rank(sums: Sums, weights: Tensor, ranks: int) -> Sums:
    """One micro-batch's sums, ready to be added up: ranks' losses average, counts add.

    Args:
        sums: of the micro-batch.
        weights: what the trainer multiplies each token's loss with.
        ranks: how many take part.
    """
    added = {name: x / ranks if name.startswith("loss/") else x for name, x in sums.added.items()}
    added["loss_weight"] = weights.sum(dtype=torch.float64) / ranks
    return Sums(added, dict(sums.highest))


def over_ranks(sums: Sums, group: Any = None) -> Sums:
    """The sums of all ranks. Two all-reduces of about 2,500 numbers in all."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size(group) == 1:
        return sums
    added, highest = sums.flat()
    torch.distributed.all_reduce(added, group=group)
    torch.distributed.all_reduce(highest, op=torch.distributed.ReduceOp.MAX, group=group)
    return sums.unflat(added, highest)
