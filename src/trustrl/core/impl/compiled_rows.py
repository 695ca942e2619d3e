r"""Sums over the recorded columns of each token in float32, in one compiled loop, with a bound on their error.

With u = 2⁻²⁴, n columns and exponentials within 2 units in the last place (relative error 4u), all probabilities of a
side sum to at most M = 1.02, and a sum of n terms in any order adds (n − 1)u·Σ|terms|. Then

    mass:    Σb and Σπ             (4 + n − 1)·M·u                     ≤ e = (1.1n + 6)u
    TV:      Σ|b − π|              4u·2M + u·2M + (n − 1)·u·2M = (2n + 8)·M·u
             D = ½(Σ + |m − p|)    half of that and of both masses     ≤ (2.2n + 12)u
    KL:      Σ(b·g − b + π)        8u·Σb|g| + 12·M·u + (n − 1)·u·Σ     ≤ (1.1n + 32)(1 + Σ)u
    TROLL:   Σπ·g                  6u·Σπ|g| + (n − 1)·u·Σπ|g|          ≤ (1.1n + 8)(1 + |Σ|)u

where g is the difference of two log-probs. x·log(x/y) is negative by at most y/e, so Σb|g| ≤ Σb·g + 2M/e. A tail's term
x·log(x/y) with both tails wrong by e is wrong by at most e·(1 + max|log(x/y)| + max x/y). TROLL divides by one mass and
adds the logarithms of both. What reads one number per token is float64: about 32 operations on numbers below 40 with
relative errors of 4·2⁻⁵³ are within 2⁻⁴⁰.
"""

from typing import Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.core.partition import COARSE_ROUNDOFF, FINE_ROUNDOFF, LARGEST_LOGP, largest_mass
from trustrl.core.projection import FLOOR
from trustrl.kernels.id_columns import Columns

Distance = Literal["tv", "kl", "projection"]
"""Σ|b − π| over the columns, their share of KL(b‖π), or KL(π‖b) over all cells, normalized."""

U = FINE_ROUNDOFF
BAND = 2.0**-40
"""Error of the float64 part of a distance."""

SURE = 0.9
"""Share of a fault's limit below which float32 sums rule the fault out. The limits are 1e-3 or more."""

WIDEST = 1024
"""Most columns. The error of a mass, (1.1n + 6)u = 7e-5, is then below the margin of 1e-4 that `SURE` leaves."""


class ColumnSums(NamedTuple):
    """Results for each token."""

    anchor_tail: Float[Tensor, " n"]
    policy_tail: Float[Tensor, " n"]
    distance: Float[Tensor, " n"]
    error: Float[Tensor, " n"]
    """Bound on the error of the region's distance."""

    doubt: Float[Tensor, " n"]
    """At most 0 where the columns surely have no fault; NaN or larger where the definition must say."""


def sum_columns(
    columns: Columns, logp: Tensor, anchor: Tensor, valid: Tensor, of: Distance, resolution: float
) -> ColumnSums:
    """Sums the columns of each token.

    Args:
        columns: The recorded columns.
        logp: log π of the sampled token.
        anchor: log b of the sampled token.
        valid: `columns.valid` as 0 and 1. Compiled code reads booleans one by one.
        of: The distance.
        resolution: Smallest meaningful tail; 0 if both are recorded.
    """
    sampled = columns.ids == columns.token_ids.unsqueeze(-1)
    present = valid.to(torch.float32) > 0.5
    known = present & ~sampled
    log_b, log_p = columns.anchor_logp.to(torch.float32), columns.own_logp.to(torch.float32)
    b, p = (torch.where(known, x, -torch.inf).exp() for x in (log_b, log_p))
    if of == "tv":
        each = (b - p).abs()
    elif of == "kl":
        each = b * torch.where(known, log_b - log_p, 0.0) - b + p  # NaN, which is in doubt, where both are 0
    else:
        each = p * torch.where(known, log_p.clamp(min=FLOOR) - log_b.clamp(min=FLOOR), 0.0)
    # How far the sampled token's own column is from its log-prob, or above the anchor's.
    off = torch.maximum((log_p - logp.to(torch.float32).unsqueeze(-1)).abs(), log_b - anchor.float().unsqueeze(-1))
    off = torch.where(present & sampled, off, 0.0).sum(-1).double()
    mass_b, mass_p, distance = (x.sum(-1).double() for x in (b, p, each))
    logp, anchor, width = logp.double(), anchor.double(), columns.ids.shape[-1]
    if columns.anchor_tail_logp is not None and columns.own_tail_logp is not None:
        m, q = columns.anchor_tail_logp.double().exp(), columns.own_tail_logp.double().exp()
        tails, exact = (m, q), True
    else:
        m, q = ((1 - x.exp() - y).clamp(min=0.0) for x, y in ((anchor, mass_b), (logp, mass_p)))
        tails, exact = (0.0, 0.0), False
    mass_error = (1.1 * width + 6) * U
    tail_error = 0.0 if exact else mass_error
    doubt = _excess(columns, width, off, mass_b + (anchor + off).exp() + tails[0], mass_p + logp.exp() + tails[1])
    if columns.left_out is not None:
        doubt = torch.maximum(doubt, 1 - anchor.exp() - mass_b + mass_error - columns.left_out)
    error = torch.full_like(distance, (2.2 * width + 12) * U + BAND)
    if of == "kl":
        error = (1.1 * width + 32) * U * (1 + distance.abs()) + _tail_error(m, q, tail_error, resolution) + BAND
        if not exact:  # only an anchor without a tail has a finite upper end
            doubt = torch.maximum(doubt, mass_error - m)
    elif of == "projection":
        floor = max(resolution, torch.finfo(torch.float64).tiny)
        error = (1.1 * width + 8) * U * (1 + distance.abs())
        distance = _projection_kl(logp, anchor, (mass_p, mass_b), (q.clamp(min=floor), m.clamp(min=floor)), distance)
        error = error + 2 * mass_error * (3 + distance.abs()) + _tail_error(q, m, tail_error, floor) + BAND
    return ColumnSums(m, q, distance, error, doubt)


def _excess(columns: Columns, width: int, off: Tensor, all_b: Tensor, all_p: Tensor) -> Tensor:
    """Returns the largest excess over a limit that the definition's tests of the columns have, less a margin."""
    coarse = columns.anchor_logp.dtype != torch.float32 and columns.own_logp.dtype != torch.float32
    limit = largest_mass(width + 2, COARSE_ROUNDOFF) if coarse else 1 + LARGEST_LOGP
    excess = torch.maximum(all_b, all_p) - (1 + SURE * (limit - 1))
    excess = torch.maximum(excess, off - SURE * LARGEST_LOGP)
    excess = torch.maximum(excess, -columns.token_ids.double() - 0.5)  # a negative id
    if coarse:  # the masses do not show a log-prob that is slightly above 0
        highest = torch.maximum(columns.anchor_logp, columns.own_logp).to(torch.float32).amax(-1).double()
        for tail in (columns.anchor_tail_logp, columns.own_tail_logp):
            highest = highest if tail is None else torch.maximum(highest, tail.double())
        excess = torch.maximum(excess, highest - SURE * LARGEST_LOGP)
    return excess


def _tail_error(x: Tensor, y: Tensor, error: float, floor: float) -> Tensor:
    """Returns the error of x·log(x/y), both wrong by `error` and at least `floor`."""
    if not error:
        return torch.zeros_like(x)
    low_x, low_y = ((z - error).clamp(min=floor) for z in (x, y))
    log = torch.log((x + error) / low_y).abs() + torch.log(low_x / (y + error)).abs()
    return error * (1 + log + (x + error) / low_y)


def _projection_kl(
    logp: Tensor, anchor: Tensor, masses: tuple[Tensor, Tensor], tails: tuple[Tensor, Tensor], cross: Tensor
) -> Tensor:
    """Returns KL(π‖b) over the cells with both sides normalized."""
    logp, anchor = logp.clamp(max=0.0), anchor.clamp(max=0.0)
    own_p, own_b = torch.exp(logp), torch.exp(anchor)
    cross = cross + own_p * (logp - anchor) + tails[0] * (torch.log(tails[0]) - torch.log(tails[1]))
    mass_p, mass_b = masses[0] + own_p + tails[0], masses[1] + own_b + tails[1]
    return cross / mass_p - torch.log(mass_p) + torch.log(mass_b)
