r"""Cleaning, loss terms and sums of a micro-batch in three Triton launches, for NVIDIA and AMD GPUs.

On a GPU a region's arithmetic is free and its launches are not: as single torch operations, a binary region with its
sums takes more than 300. These functions replace the three longest chains by one launch each. The region's own
decision, between the first and the second, stays in torch.

    clean    core.clean.clean_tokens: faults found and counted, faulty tokens blanked, columns summed
    terms    core.losses.policy_terms and the sum of core.losses.reduce_terms
    sums     core.diagnostics.collect

Those functions are the definition; these must agree with them to the last token and count. Nothing waits for the
device. Sums are added in a fixed order, so they are reproducible; only whole numbers are added atomically.

Cost per token: reads each input once and writes 60 to 120 bytes. Memory beyond that: 768 bytes per block of 256
tokens, and the histograms.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.kernels import sum_kernels as table
from trustrl.kernels.id_columns import Columns
from trustrl.kernels.token_kernels import clean_kernel, terms_kernel
from trustrl.kernels.triton_launch import dense

BLOCK = 256
"""Tokens per program that reads no columns."""

TILE = 256
"""Recorded columns per program that reads them."""

WARPS = 4

SAMPLED_FAULTS: tuple[str, ...] = ("policy", "advantage", "behavior", "proximal")
COLUMN_FAULTS: tuple[str, ...] = ("support", "mass", "column", "narrow")
"""Counters of `clean`, in their order."""


def tile(width: int) -> tuple[int, int]:
    """Returns the rows and columns of a program for tokens with this many recorded columns."""
    padded = 1 << max(width - 1, 0).bit_length()
    return max(1, TILE // padded), padded


class CleanRows(NamedTuple):
    """Results of `clean`. Each is one value per token, 0 where unusable."""

    log_policy: Tensor
    log_anchor: Tensor
    log_ratio: Tensor
    advantage: Tensor
    mismatch: Tensor
    staleness: Tensor
    cells: tuple[Tensor, ...]
    """Tails of anchor and policy, Σ|b − π|, Σ of KL's terms; empty without columns."""

    blanked: Tensor
    usable: Tensor
    faults: Tensor
    """Number of tokens with each of SAMPLED_FAULTS, then COLUMN_FAULTS."""


def clean(
    logp: Tensor,
    behavior: Tensor | None,
    proximal: Tensor | None,
    advantage: Tensor,
    in_loss: Tensor,
    versions: tuple[Tensor, int] | None,
    sound: Tensor | None,
    columns: Columns | None,
    *,
    reads: frozenset[str],
    anchor: str,
    wide: torch.dtype,
    limits: dict[str, float],
) -> CleanRows:
    """Finds and counts faults, and blanks faulty tokens. Tensors are flat except `advantage`, which may be one per row.

    Args:
        logp: log π, flat.
        behavior: log μ, if recorded.
        proximal: log π', if recorded.
        advantage: One per token, or one for each run of n / len(advantage) tokens.
        in_loss: Tokens that count.
        versions: The version behind each token and the version being trained, if known.
        sound: False on tokens whose exact divergence is faulty, if the region reads one.
        columns: The recorded top-K, if the region reads it.
        reads: The log-probs whose faults matter: "behavior", "proximal" or both.
        anchor: The one that distances are measured from.
        wide: The dtype of the blanked log-prob.
        limits: LARGEST, NOISE, MASS_COARSE and MASS_FINE of the definition.
    """
    n = logp.numel()
    width = 0 if columns is None else columns.ids.shape[-1]
    rows, padded = tile(width)
    out = torch.empty(10 if columns is not None else 6, n, dtype=torch.float64, device=logp.device)
    blanked = torch.empty(n, dtype=wide, device=logp.device)
    usable = torch.empty(n, dtype=torch.bool, device=logp.device)
    faults = torch.zeros(8, dtype=torch.float64, device=logp.device)
    recorded = (None,) * 7 if columns is None else columns[:7]
    version, trained = (None, 0) if versions is None else versions
    with torch.cuda.device_of(logp):
        clean_kernel[(math.ceil(n / rows),)](
            *dense(logp, behavior, proximal, advantage, in_loss, version, sound, *recorded), out, blanked, usable,
            faults, n, n // advantage.numel(), trained, width,
            READS_BEHAVIOR="behavior" in reads, READS_PROXIMAL="proximal" in reads, FROM_BEHAVIOR=anchor == "behavior",
            LEFT_OUT=None if columns is None else columns.left_out,
            NO_TAIL=columns is not None and columns.no_tail,
            ROWS=rows, COLUMNS=padded, num_warps=WARPS, **limits,
        )  # fmt: skip
    log_policy, log_anchor, log_ratio, clean_advantage, mismatch, staleness, *cells = out.unbind()
    return CleanRows(
        log_policy, log_anchor, log_ratio, clean_advantage, mismatch, staleness, tuple(cells), blanked, usable, faults
    )


def terms(
    logp: Tensor,
    keep: Tensor,
    weight: Tensor,
    advantage: Tensor,
    usable: Tensor,
    value: Tensor | None,
    penalty: Tensor | None,
    weights: Tensor | None,
    largest: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (Σ terms as float64, its derivatives with respect to `logp`, overflow flags). Tensors are flat.

    `weights` are the factors of the terms in the reduction; None for 1.
    """
    n, device = logp.numel(), logp.device
    blocks = math.ceil(n / BLOCK)
    slope = torch.empty(n, dtype=logp.dtype, device=device)
    overflow = torch.empty(n, dtype=torch.bool, device=device)
    partials = torch.empty(blocks, dtype=torch.float64, device=device)
    with torch.cuda.device_of(logp):
        terms_kernel[(blocks,)](
            *dense(logp, keep, weight, advantage, usable, value, penalty, weights), slope, overflow, partials, n,
            LARGEST=largest, ROWS=BLOCK, num_warps=WARPS,
        )  # fmt: skip
    return partials.sum(), slope, overflow


def sums(
    columns: Mapping[str, Any], *, num_bins: int, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns (sums, binned sums and histograms by name, extremes by name) of the rows whose columns are there.

    Args:
        columns: The columns of the table of sums, flat, and its switches. A bound is one number or one per token.
        num_bins: The number of bins of a histogram.
        settings: Compile-time numbers of the kernel.
    """
    n, device, bound = columns["in_loss"].numel(), columns["in_loss"].device, columns["max_increase"]
    blocks = math.ceil(n / BLOCK)
    partials = torch.empty(blocks, table.NUM_SUMS, dtype=torch.float64, device=device)
    extremes = torch.empty(blocks, table.NUM_EXTREMES, dtype=torch.float64, device=device)
    bins = torch.zeros(table.NUM_HISTOGRAMS, num_bins, dtype=torch.float64, device=device)
    with torch.cuda.device_of(columns["in_loss"]):
        table.sums_kernel[(blocks,)](
            **dict(zip(columns, dense(*columns.values()), strict=True)), partials=partials, extremes=extremes,
            bins=bins, n=n, num_bins=num_bins, bound_step=int(bound is not None and bound.numel() > 1),
            NUM_SUMS=table.NUM_SUMS, NUM_EXTREMES=table.NUM_EXTREMES, ROWS=BLOCK, num_warps=WARPS, **settings,
        )  # fmt: skip
    total, highest = partials.sum(0), extremes.amax(0)
    added = {name: total[slot] for name, slot in table.SUMS.items()}
    added |= {name: total[slot : slot + 24].view(8, 3) for name, slot in table.BINNED.items()}
    added |= {name: bins[slot] for name, slot in table.HISTOGRAMS.items()}
    tops = {name: highest[slot] for name, slot in table.EXTREMES.items()}
    present = {name for name, x in columns.items() if x is not None and x is not False}
    return _with_columns(added, present), _with_columns(tops, present)


def _with_columns(rows: dict[str, Tensor], present: set[str]) -> dict[str, Tensor]:
    """Returns the rows that have all their columns. The slots of the others hold garbage."""
    return {name: x for name, x in rows.items() if present.issuperset(table.NEEDS.get(name, ()))}
