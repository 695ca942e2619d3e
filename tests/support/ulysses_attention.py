"""An attention for verl's Ulysses sequence parallelism on a CPU, where flash-attention cannot run.

verl's own `_ulysses_flash_attention_forward` exchanges heads and tokens between ranks; only the kernel inside it is
replaced.
"""

import torch
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from verl.models.transformers import monkey_patch

NAME = "ulysses_on_cpu"


def install() -> None:
    monkey_patch._flash_attention_forward = _packed
    AttentionInterface.register(NAME, _forward)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, lambda *_, **__: None)


def _packed(query, key, value, _mask, _length, *_, position_ids=None, **__):
    """(1, T, H, D): causal within each sequence. A sequence begins where its position is 0."""
    sequence = (position_ids[0] == 0).cumsum(0)
    allowed = (sequence[:, None] == sequence) & torch.ones(len(sequence), len(sequence), dtype=torch.bool).tril()
    groups = query.shape[2] // key.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (query, key.repeat_interleave(groups, 2), value.repeat_interleave(groups, 2)))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=allowed).transpose(1, 2)


def _forward(module, query, key, value, attention_mask, position_ids=None, **__):
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    out = monkey_patch._ulysses_flash_attention_forward(q, k, v, None, q.shape[1], position_ids=position_ids)
    return out, None
