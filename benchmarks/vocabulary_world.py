"""Inputs of the vocabulary benchmarks (hidden states and a head of real size), and their memory measurement."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from trustrl.core.token_logprobs import TokenLogprobs

V, D, K = 151_936, 1024, 64
NUMBERS = Path(__file__).parent.parent / "docs" / "data" / "vocabulary.json"
"""The stored numbers of the page."""


class World:
    """Hidden states, a head, sampled tokens and given ids. Logits have a standard deviation of about two."""

    def __init__(self, dtype: torch.dtype, rows: int, vocabulary: int = V, size: int = D, num_ids: int = K) -> None:
        g = torch.Generator().manual_seed(0)
        self.hidden = torch.randn(rows, size, generator=g).to(dtype)
        self.head = torch.empty(vocabulary, size, dtype=dtype)
        for part in self.head.split(8192):  # in parts, because a float32 copy of the whole head would count as memory
            part.copy_(torch.randn(part.shape, generator=g) * (2 / size**0.5))
        self.token = torch.randint(0, vocabulary, (rows,), generator=g)
        self.ids = torch.randint(0, vocabulary, (rows, num_ids), generator=g)
        self.weight = torch.randn(rows, generator=g) / rows

    def first(self, rows: int) -> "World":
        """Returns the first rows of this world, with the same head."""
        few = World.__new__(World)
        few.__dict__.update(self.__dict__)
        for field in ("hidden", "token", "ids", "weight"):
            setattr(few, field, getattr(self, field)[:rows])
        return few

    def leaves(self, frozen: bool) -> tuple[Tensor, Tensor]:
        """Returns (hidden, head) as leaves that require gradients."""
        return self.hidden.detach().requires_grad_(), self.head.detach().requires_grad_(not frozen)

    def loss(self, out: TokenLogprobs, entropy: bool, rows: slice = slice(None)) -> Tensor:
        """Returns a loss that uses every differentiable output."""
        weight = self.weight[rows]
        total = (weight * out.logp).sum()
        if out.gathered_logp is not None and out.tail_logp is not None:
            total = total + 0.01 * (weight[:, None] * out.gathered_logp).sum() + 0.1 * (weight * out.tail_logp).sum()
        return total + 0.01 * (weight * out.entropy).sum() if entropy and out.entropy is not None else total


def resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {key}. Run the memory benchmark on Linux.")


def peak_memory(world: World, call: Callable[[World], None]) -> int:
    """Returns the peak resident bytes during the call, minus those resident before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    before = resident("VmRSS")
    call(world)
    return resident("VmHWM") - before


def processor() -> str:
    """Returns the processor's name and which units for bf16 products it has."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    found = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    units = [flag for flag in ("amx_bf16", "avx512_bf16") if flag in found.get("flags", "").split()]
    return f"{found.get('model name', 'unknown')}, bf16 units: {', '.join(units) or 'none'}"


def say(text: str) -> None:
    print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)
