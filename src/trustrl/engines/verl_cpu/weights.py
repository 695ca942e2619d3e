"""Weights on their way through Ray's object store: a few large arrays of bytes, which Ray hands over without a copy."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from trustrl.errors import EngineError

BUCKET_BYTES = 32 << 20
"""How much travels at once, unless a single tensor is larger."""


@dataclass(frozen=True, slots=True)
class Bucket:
    """Some tensors of a checkpoint, end to end."""

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    data: np.ndarray

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Copies of the tensors: what Ray hands over is read-only and may go away."""
        data = torch.from_numpy(self.data.copy())
        types = [getattr(torch, name) for name in self.dtypes]
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in zip(types, self.shapes, strict=True)]
        if sum(sizes) != len(data):
            raise EngineError(f"A bucket of weights must hold {sum(sizes)} bytes, got {len(data)}.")
        starts = accumulate(sizes, initial=0)
        return [
            # A start that suits bytes need not suit floats: `clone` lays the piece out afresh.
            (name, data[start : start + size].clone().view(dtype).view(shape))
            for name, dtype, shape, start, size in zip(self.names, types, self.shapes, starts, sizes, strict=False)
        ]


def buckets(weights: Iterable[tuple[str, Tensor]], limit: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """All of the weights in order, each bucket at most `limit` bytes or one tensor."""
    held: list[tuple[str, Tensor]] = []
    size = 0
    for name, tensor in weights:
        if held and size + tensor.nbytes > limit:
            yield _packed(held)
            held, size = [], 0
        # The trainer may change or free it while the bucket fills.
        held.append((name, tensor.detach().to("cpu", copy=True)))
        size += tensor.nbytes
    if held:
        yield _packed(held)


def _packed(held: list[tuple[str, Tensor]]) -> Bucket:
    pieces = [tensor.contiguous().view(-1).view(torch.uint8) for _, tensor in held]
    return Bucket(
        names=[name for name, _ in held],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for _, tensor in held],
        shapes=[tuple(tensor.shape) for _, tensor in held],
        data=torch.cat(pieces).numpy(),
    )
