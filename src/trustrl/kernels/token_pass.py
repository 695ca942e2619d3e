r"""Cleaning, loss terms and sums of a micro-batch in three Triton launches, for NVIDIA and AMD GPUs.

On a GPU a region's arithmetic is free and its launches are not: as single torch operations, a binary region with its
sums takes more than 300. These functions replace the three longest chains by one launch each. The region's own
decision, between the first and the second, stays in torch.

    clean    core.clean.clean_tokens: faults found and counted, faulty tokens blanked, columns summed
    terms    core.losses.policy_terms and the sum of core.reductions.reduce_terms
    sums     core.diagnostics.collect

Those functions are the definition; these must agree with them to the last token and count. Nothing waits for the
device. Sums are added in a fixed order, so they are reproducible; only whole numbers are added atomically.

Cost per token: reads each input once and writes 60 to 120 bytes. Memory beyond that: 768 bytes per block of 256
tokens, and the histograms.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.kernels.recorded_columns import Columns
from trustrl.kernels.sum_kernels import sums_kernel
from trustrl.kernels.token_kernels import clean_kernel, terms_kernel

BLOCK = 256
"""Tokens per program."""

TILE = 256
"""Recorded columns per program."""

WARPS = 4
NUM_SUMS, NUM_EXTREMES = 88, 8

SAMPLED_FAULTS: tuple[str, ...] = ("policy", "advantage", "behavior", "proximal")
COLUMN_FAULTS: tuple[str, ...] = ("support", "mass", "column", "narrow")
"""Counters of `clean`, in their order."""

TOTALS: tuple[str, ...] = (
    "tokens", "measured", "used", "fault/overflow", "signed", "stopped", "stopped/increase", "stopped/decrease", "gap",
    "gap/abs", "bad_updates", "ratio", "ratio/square", "log_ratio", "log_ratio/square", "acting", "weight",
    "divergence", "divergence/finite", "divergence/infinite", "divergence/upper", "divergence/upper_finite", "bounded",
    "undecided", "tail/anchor", "tail/policy", "entropy/kept", "entropy/kept_measured", "entropy/stopped",
    "entropy/stopped_measured", "mismatch/measured", "mismatch", "mismatch/abs", "staleness",
)  # fmt: skip
"""Sums of `sums`, in their order."""

EXTREMES: tuple[str, ...] = (
    "max/gap", "min/gap", "max/log_ratio", "max/divergence", "max/mismatch", "min/mismatch", "max/staleness",
)  # fmt: skip
BY_PROBABILITY, BY_STALENESS = 40, 64
"""Places of the two binned sums, eight bins of three columns each."""


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
    padded = 1 << max(width - 1, 0).bit_length()
    rows = BLOCK if columns is None else max(1, min(BLOCK, TILE // padded))
    out = torch.empty(10 if columns is not None else 6, n, dtype=torch.float64, device=logp.device)
    blanked = torch.empty(n, dtype=wide, device=logp.device)
    usable = torch.empty(n, dtype=torch.bool, device=logp.device)
    faults = torch.zeros(8, dtype=torch.float64, device=logp.device)
    recorded = (None,) * 7 if columns is None else columns[:7]
    version, trained = (None, 0) if versions is None else versions
    with torch.cuda.device_of(logp):
        clean_kernel[(math.ceil(n / rows),)](
            *_dense(logp, behavior, proximal, advantage, in_loss, version, sound, *recorded), out, blanked, usable,
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


class TermInputs(NamedTuple):
    """Inputs of the loss of each token, flat."""

    logp: Tensor
    keep: Tensor
    weight: Tensor
    advantage: Tensor
    usable: Tensor
    value: Tensor | None
    penalty: Tensor | None
    weights: Tensor | None
    """Factor of each token's term in the reduction; None for 1."""


def terms(given: TermInputs, largest: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (Σ terms as float64, its derivatives with respect to `logp`, overflow flags)."""
    n, device = given.logp.numel(), given.logp.device
    blocks = math.ceil(n / BLOCK)
    slope = torch.empty(n, dtype=given.logp.dtype, device=device)
    overflow = torch.empty(n, dtype=torch.bool, device=device)
    partials = torch.empty(blocks, dtype=torch.float64, device=device)
    with torch.cuda.device_of(given.logp):
        terms_kernel[(blocks,)](
            *_dense(*given), slope, overflow, partials, n, LARGEST=largest, ROWS=BLOCK, num_warps=WARPS
        )
    return partials.sum(), slope, overflow


class SumInputs(NamedTuple):
    """Inputs of the sums, flat. None leaves out the sums that need it."""

    in_loss: Tensor
    usable: Tensor
    overflow: Tensor
    keep: Tensor
    advantage: Tensor
    log_policy: Tensor
    log_anchor: Tensor
    log_ratio: Tensor
    weight: Tensor
    side: Tensor | None
    lower: Tensor | None
    upper: Tensor | None
    tail_anchor: Tensor | None
    tail_policy: Tensor | None
    entropy: Tensor | None
    mismatch: Tensor | None
    staleness: Tensor | None
    max_increase: Tensor | None
    """One bound, or one per token; with `max_decrease`, only where undecided tokens are counted."""
    max_decrease: Tensor | None


def sums(
    given: SumInputs, *, bounded: bool, num_bins: int, settings: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Returns (sums by name with both binned sums, extremes by name, histograms of gap, log-ratio, lower and upper).

    All names are there; those of missing inputs hold garbage.
    """
    n, device = given.in_loss.numel(), given.in_loss.device
    blocks = math.ceil(n / BLOCK)
    partials = torch.empty(blocks, NUM_SUMS, dtype=torch.float64, device=device)
    extremes = torch.empty(blocks, NUM_EXTREMES, dtype=torch.float64, device=device)
    bins = torch.zeros(4, num_bins, dtype=torch.float64, device=device)
    narrows = given.max_increase is not None
    per_token = given.max_increase is not None and given.max_increase.numel() > 1
    with torch.cuda.device_of(given.in_loss):
        sums_kernel[(blocks,)](
            *_dense(*given), partials, extremes, bins, n, num_bins, int(per_token), BOUNDED=bounded, NARROWS=narrows,
            NUM_SUMS=NUM_SUMS, ROWS=BLOCK, num_warps=WARPS, **settings,
        )  # fmt: skip
    total = partials.sum(0)
    added: dict[str, Tensor] = dict(zip(TOTALS, total.unbind(), strict=False))
    added["by_probability"] = total[BY_PROBABILITY:BY_STALENESS].view(8, 3)
    added["by_staleness"] = total[BY_STALENESS:NUM_SUMS].view(8, 3)
    return added, dict(zip(EXTREMES, extremes.amax(0).unbind(), strict=False)), bins


def _dense(*tensors: Any) -> Any:
    """Returns contiguous tensors, because the kernels step through memory without strides."""
    return tuple(None if x is None else x.detach().contiguous() for x in tensors)
