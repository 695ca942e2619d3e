"""Reference for the vocabulary pass: its three bare products, each in the layout and chunking that is fastest here.

    python benchmarks/vocabulary_limit.py bf16     # measure, and print which won

    logits     hidden @ head.T     or   head @ hidden.T
    d_head     tile.T @ hidden     or   tile @ hidden          the tile as [tokens, ids] or as [ids, tokens]
    d_hidden   tile @ head         or   tile.T @ head

Every product is timed alone, with both layouts of its tile and every width of it, on a part of the vocabulary. Outputs
are allocated beforehand. Nothing is accumulated, so no pass over the vocabulary can be as fast. The table also has the
fastest choice of one layout and one width for all three products, the reference of release 0.1.0, and the time of
products in float32 of factors converted tile by tile: on a CPU without bf16 units, these are faster than bf16 products.
"""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
from vocabulary_world import World, say

WIDTHS = (2048, 4096, 8192, 16_384, 32_768)
TRIED = 32_768
"""Number of vocabulary ids on which the choices are timed."""
REPEATS = 3


class Choice(NamedTuple):
    """Layout and chunking of one product."""

    product: str
    tokens_last: bool
    width: int

    def __str__(self) -> str:
        return f"{self.product} with {'tokens last' if self.tokens_last else 'tokens first'}, tiles of {self.width:,}"


PRODUCTS = ("logits", "d_head", "d_hidden")


class BareProducts:
    """Products over the vocabulary, by choice, with preallocated outputs."""

    def __init__(self, world: World, choices: list[Choice]) -> None:
        self.world, self.choices = world, choices
        widest = max(choice.width for choice in choices)
        self.tile = torch.empty(widest * len(world.hidden), dtype=world.hidden.dtype)
        self.tile.copy_(torch.randn(len(world.hidden)).repeat(widest))
        self.d_hidden, self.d_head = torch.empty_like(world.hidden), torch.empty_like(world.head)

    def __call__(self, size: int | None = None) -> None:
        """Computes every product over the first `size` ids, or all of them."""
        for choice in self.choices:
            for at in range(0, size or len(self.world.head), choice.width):
                self._one(choice, slice(at, at + choice.width))

    def _one(self, choice: Choice, columns: slice) -> None:
        hidden, head = self.world.hidden, self.world.head[columns]
        flat = self.tile[: len(head) * len(hidden)]
        by_token = flat.view(len(head), len(hidden)).T if choice.tokens_last else flat.view(len(hidden), len(head))
        if choice.product == "logits" and choice.tokens_last:
            torch.mm(head, hidden.T, out=by_token.T)
        elif choice.product == "logits":
            torch.mm(hidden, head.T, out=by_token)
        elif choice.product == "d_head":
            torch.mm(by_token.T, hidden, out=self.d_head[columns])
        else:
            torch.mm(by_token, head, out=self.d_hidden)

    def __str__(self) -> str:
        return "; ".join(map(str, self.choices))


def cpu_seconds(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


class Limits(NamedTuple):
    """The reference, and the two other ways to make three products."""

    fastest: BareProducts
    one_layout: BareProducts
    """The fastest with one layout and one width for all three products."""
    tried: dict[Choice, float]
    """CPU seconds of each choice on `TRIED` ids."""


def fastest_products(world: World) -> Limits:
    """Times every choice and returns the fastest."""
    size = min(TRIED, len(world.head))
    choices = [Choice(p, last, width) for width in WIDTHS for last in (False, True) for p in PRODUCTS]
    tried = dict.fromkeys(choices, float("inf"))
    for turn in range(REPEATS):
        say(f"limit: round {turn + 1} of {REPEATS}")
        for choice in choices:
            products = BareProducts(world, [choice])
            tried[choice] = min(tried[choice], cpu_seconds(lambda run=products: run(size)))
    best = [min((c for c in choices if c.product == p), key=tried.__getitem__) for p in PRODUCTS]
    together = [[Choice(p, last, width) for p in PRODUCTS] for width in WIDTHS for last in (False, True)]
    one_layout = min(together, key=lambda three: sum(tried[c] for c in three))
    return Limits(BareProducts(world, best), BareProducts(world, one_layout), tried)


def converted(world: World, width: int = 4096) -> None:
    """Computes the three products in float32, from factors converted tile by tile."""
    hidden, d_head = world.hidden.float(), torch.empty_like(world.head)
    for at in range(0, len(world.head), width):
        head = world.head[at : at + width].float()
        tile = (hidden @ head.T).to(world.head.dtype).float()
        d_head[at : at + width] = tile.T @ hidden
        tile @ head


def main(dtype: str) -> None:
    torch.set_num_threads(1)
    kind, rows = {"bf16": (torch.bfloat16, 1024), "fp32": (torch.float32, 512)}[dtype]
    limits = fastest_products(World(kind, rows))
    say("")
    print(f"| product, layout and width | CPU seconds for {TRIED:,} ids |\n|---|---|")
    for choice, seconds in sorted(limits.tried.items(), key=lambda pair: (pair[0].product, pair[1])):
        print(f"| {choice} | {seconds:.3f} |")
    print(f"\nfastest: {limits.fastest}\none layout: {limits.one_layout}")


if __name__ == "__main__":
    main(*(sys.argv[1:] or ["bf16"]))
