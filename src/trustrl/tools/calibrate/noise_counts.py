"""Counts of sampler-trainer noise and of the effect of each threshold. Counts add over files.

The sampler's μ and the trainer's π' have the same weights, so they differ only by rounding, kernels, and numeric
formats. A threshold below this noise masks tokens that have not moved.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.config.statistics import Anchor, BinaryKL, BinaryTV, Ratio
from trustrl.core.clean import CleanTokens, clean_tokens
from trustrl.core.divergences import measure
from trustrl.core.ops import probability_gap
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.recording import Piece
from trustrl.tools.audit import TokenCounts, age, measured_from

COLUMNS = (
    "step", "update", "sequence", "advantage", "behavior_logp", "proximal_logp", "policy_logp", "sampler_version",
)  # fmt: skip

GRID = tuple(float(f"{digits}e{power}") for power in range(-10, 2) for digits in range(10, 100))
"""Every two-digit number from 1e-9 to 990: the thresholds with exact counts."""

STATISTICS = {"tv": BinaryTV(), "kl": BinaryKL(), "ratio": Ratio()}
"""The binary divergences and |r − 1|, each with its published bound."""

NOISE = ("logp", *STATISTICS)
"""|log π' − log μ|, and each statistic of the two."""

TOTALS: tuple[str, ...] = ("rows", "measured", "signed", "bad", "first", "noise", "proximal", "sequences", "unanchored")
BAD_GAP = 0.5
"""Smallest b − π at which a token with A < 0 is a bad update. See the metric `trustrl/bad_update_share`."""

_BEHAVIOR = Needs(anchors=frozenset({"behavior"}), anchor="behavior")


def noise_of(piece: Piece, anchor: Anchor = "behavior") -> TokenCounts:
    """Counts the noise in a piece, and the tokens that each threshold would mask, miss, and certify.

    With π' as the anchor, the noise is the trainer's own: π against π' before the first update.

    Noise is counted while the trainer still has the rollout's weights, so each sampled token counts once. It is
    measured against the recorded π', or against π if π' is null, since the two are equal there.
    """
    columns, num = measured_from(piece, anchor).columns, len(piece)
    if anchor == "proximal":
        columns = {name: column for name, column in columns.items() if name != "proximal_logp"}
    totals = dict.fromkeys(TOTALS, torch.tensor(0)) | {"rows": torch.tensor(num)}
    empty = torch.zeros(len(STATISTICS), len(GRID) + 1, dtype=torch.int64)
    counts: dict[str, Tensor] = dict.fromkeys(("outward", "bad", "lower", "upper"), empty)
    counts["noise"] = torch.zeros(len(NOISE), len(GRID) + 1, dtype=torch.int64)
    if "behavior_logp" not in columns:
        return _summary(totals | {"unanchored": torch.tensor(num)}, counts)

    tokens = _tokens(columns, columns["policy_logp"], torch.ones(num, dtype=torch.bool))
    outward = tokens.usable & (tokens.advantage * tokens.log_ratio > 0)
    bad = tokens.usable & (tokens.advantage < 0) & (probability_gap(tokens) <= -BAD_GAP)
    lower, upper = map(_bins, _ends(tokens))
    histograms = {
        "outward": _counted(lower, outward),
        "bad": _counted(lower, bad),
        "lower": _counted(lower, tokens.usable),
        "upper": _counted(upper, tokens.usable),
    }
    first = age(columns) == 0
    same = _tokens(columns, columns.get("proximal_logp", columns["policy_logp"]), first)
    histograms["noise"] = _counted(_bins([same.log_ratio.abs(), *_ends(same)[0]]), same.usable)
    totals |= {
        "measured": tokens.usable.sum(),
        "signed": (tokens.usable & (tokens.advantage != 0)).sum(),
        "bad": bad.sum(),
        "first": first.sum(),
        "noise": same.usable.sum(),
        "proximal": first.sum() * ("proximal_logp" in columns),
        "sequences": torch.tensor(len(piece.run[first].unique())),
    }
    return _summary(totals, histograms)


def _summary(totals: dict[str, Tensor], counts: dict[str, Tensor]) -> TokenCounts:
    return TokenCounts({"totals": torch.stack([totals[name] for name in TOTALS]), **counts})


def _tokens(columns: dict[str, Tensor], logp: Float[Tensor, " n"], where: Bool[Tensor, " n"]) -> CleanTokens:
    rollout = RolloutTokens(advantage=columns["advantage"], in_loss=where, behavior_logp=columns["behavior_logp"])
    return clean_tokens(PolicyTokens(logp=logp), rollout, _BEHAVIOR)


def _ends(tokens: CleanTokens) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the lower and the upper end of each statistic."""
    intervals = [measure(tokens, statistic) for statistic in STATISTICS.values()]
    return [interval.lower for interval in intervals], [interval.upper for interval in intervals]


def _bins(values: list[Tensor]) -> list[Int[Tensor, " n"]]:
    """Returns the bin of each value. Bin j holds GRID[j − 1] < x ≤ GRID[j]."""
    grid = torch.tensor(GRID, dtype=torch.float64)
    return [torch.bucketize(x, grid, out_int32=True) for x in values]


def _counted(bins: list[Int[Tensor, " n"]], where: Bool[Tensor, " n"]) -> Int[Tensor, "s g"]:
    """Returns histograms of these tokens, so x > δ and x ≤ δ are exact sums for every grid δ."""
    indices = where.nonzero().squeeze(1)
    return torch.stack([torch.bincount(x.index_select(0, indices), minlength=len(GRID) + 1) for x in bins])
