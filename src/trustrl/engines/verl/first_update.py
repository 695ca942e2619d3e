"""π' of the first update of a batch: its own forward pass, which runs at the same weights as a pass that records π'.

Only the sequences of later updates need such a pass. With M mini-batches it runs on (M − 1) / M of the sequences, and
with one mini-batch it does not run. Log-probs of the two passes differ by rounding if their micro-batches differ. In
the first update, the ratio π/π' is exactly 1.
"""

from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from verl.utils import tensordict_utils as tu

STRATEGIES = ("fsdp", "fsdp2")
"""The engines that were tested with it."""


def applies(engine: Any, data: Any) -> bool:
    """Returns whether the first update may serve as the pass that records π' for its own sequences.

    Each sequence must be used once, and the training pass must compute what a pass without gradient does.
    """
    if tu.get(data, "epochs", default=1) != 1 or engine.engine_config.strategy not in STRATEGIES:
        return False
    return not _random(engine.module)


def _random(module: nn.Module) -> bool:
    """Returns whether a model in training mode draws random numbers."""
    if any(isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0 for part in module.modules()):
        return True
    config = getattr(module, "config", None)
    settings = {} if config is None else config.to_dict()
    return any(
        isinstance(value, float) and value > 0 for name, value in settings.items() if "drop" in name or "jitter" in name
    )


def first_rows(data: Any, *, ranks: int, rank: int) -> Tensor:
    """Returns which rows of this rank's part of a batch verl takes for its first update.

    Args:
        data: This rank's part of the batch, with verl's settings of its mini-batches.
        ranks: The number of data-parallel ranks.
        rank: This rank among them.
    """
    size = tu.get(data, "mini_batch_size", default=None)
    count = len(data)
    per_rank = count // tu.get(data, "num_mini_batch") if size is None else size // ranks
    rows = TensorDict({"row": torch.arange(count)}, batch_size=[count])
    kwargs = tu.get(data, "dataloader_kwargs", default={})
    seed = tu.get(data, "seed", default=42) + rank
    return next(tu.make_iterator(rows, per_rank, epochs=1, seed=seed, dataloader_kwargs=kwargs))["row"]


def rows_to_record(data: Any, first: Tensor, multiple: int) -> Tensor:
    """Returns the rows of the later updates, in order, and as many of the first as verl needs for whole micro-batches.

    Args:
        data: This rank's part of the batch.
        first: The rows of the first update.
        multiple: The size of a micro-batch, which must divide the number of rows.
    """
    every = torch.arange(len(data))
    rows = every[torch.isin(every, first, invert=True)]
    return torch.cat([rows, first[: -len(rows) % multiple]]).sort().values


def spread(fields: dict[str, Tensor], rows: Tensor, data: Any) -> dict[str, Tensor]:
    """Returns fields of some rows as fields of all rows of a batch.

    The other rows belong to the first update, which reads none of them. They are NaN, so if verl's first update reads
    other rows than expected, their tokens are dropped and counted.
    """
    mask = data["response_mask"]
    return {name: _nested(x, rows, mask) if x.is_nested else _dense(x, rows, mask) for name, x in fields.items()}


def _dense(x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    out = _unread(x, (len(mask), *x.shape[1:]))
    out[rows.to(x.device)] = x
    return out


def _nested(x: Any, rows: Tensor, mask: Any) -> Tensor:
    some = dict(zip(rows.tolist(), x.unbind(), strict=True))
    shape, lengths = x.values().shape[1:], mask.offsets().diff().tolist()
    every = [some[row] if row in some else _unread(x.values(), (n, *shape)) for row, n in enumerate(lengths)]
    return torch.nested.as_nested_tensor(every, layout=torch.jagged)


def _unread(like: Tensor, shape: tuple[int, ...]) -> Tensor:
    return like.new_full(shape, torch.nan if like.is_floating_point() else 0)
