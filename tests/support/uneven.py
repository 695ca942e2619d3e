"""Batches of equal numbers of tokens and of even or uneven lengths, and a model whose own memory is small.

A trainer pads its own tensors to sequences × longest: ids, masks, log-probs, hidden states. A region's part is what
holds K numbers or more in its last axis.
"""

from typing import NamedTuple

import torch
from transformers import AttentionInterface

import trustrl
from support.live_bytes import LiveBytes

K, VOCABULARY, WIDTH, SEQUENCES = 64, 512, 8, 32
SMALL, LARGE = 1024, 8192
"""The longest response; the 31 others have 1/32 of its tokens."""

AttentionInterface.register(
    "no_attention", lambda _, query, key, value, *more, **settings: (value.transpose(1, 2), None)
)
NO_LAYERS = {
    "num_hidden_layers": 0, "vocab_size": VOCABULARY, "hidden_size": WIDTH, "max_position_embeddings": 2 * LARGE,
    "tie_word_embeddings": False, "attn_implementation": "no_attention",
}  # fmt: skip
"""Settings of a model without layers: embedding, norm and output layer, and no mask of tokens × tokens."""

ONE_LAYER = NO_LAYERS | {"num_hidden_layers": 1, "intermediate_size": WIDTH, "head_dim": WIDTH // 2}
"""The same with a layer, for trainers that shard by layers."""

REGIONS = {name: trustrl.preset(name, anchor="proximal", k=K) for name in ("dppo-topk-tv", "troll")}


def lengths(longest, *, even):
    """The number of response tokens of each sequence."""
    short = longest // SEQUENCES
    total = longest + (SEQUENCES - 1) * short
    return torch.full((SEQUENCES,), total // SEQUENCES) if even else torch.tensor([longest] + [short] * (SEQUENCES - 1))


class Peak(NamedTuple):
    """Peak bytes of a step."""

    whole: int
    wide: int
    """Of tensors with K numbers or more in the last axis, and no more than the vocabulary."""


def peaks(longest, step_of):
    """Peaks of each region's step, {region: {"even": Peak, "uneven": Peak}}.

    Args:
        longest: The longest response.
        step_of: Returns the step of a region as a function of the responses' lengths.
    """
    found = {}
    for name, region in REGIONS.items():
        step = step_of(region)
        step(torch.tensor([3, 2]))
        found[name] = {}
        for even in (True, False):
            with LiveBytes() as whole, LiveBytes(lambda x: x.ndim > 1 and K <= x.shape[-1] <= VOCABULARY) as wide:
                step(lengths(longest, even=even))
            found[name]["even" if even else "uneven"] = Peak(whole.peak, wide.peak)
    return found


def report(found):
    """The table of a run."""
    for name, by_lengths in found.items():
        for key, (whole, wide) in by_lengths.items():
            print(f"{name:14}{key:8}{whole / 1e6:8.1f} MB, of {K} ids and more {wide / 1e6:8.1f} MB", flush=True)
