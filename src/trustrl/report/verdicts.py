"""What the region did to each recorded token, from its row alone."""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.terms import MIS
from trustrl.packages import need

VERDICTS = ("kept", "stopped", "down-weighted", "up-weighted", "no gradient", "not finite")
"""By code: the token's place here."""

KEPT, STOPPED, DOWN, UP, NO_GRADIENT, NOT_FINITE = range(len(VERDICTS))
WITH_GRADIENT = VERDICTS[:4]
"""What a region did to tokens that had a gradient; the others are left alone whatever it says."""

TOLERANCE = 0.01
"""A weight within 1 % of the token's own ratio is that ratio."""

MEANINGS = {
    "kept": "gradient passed, weight is the ratio",
    "stopped": "the region stopped the gradient",
    "down-weighted": "passed with a weight more than 1 % below the ratio",
    "up-weighted": "passed with a weight more than 1 % above the ratio",
    "no gradient": "advantage or weight is 0",
    "not finite": "a log-prob, weight or advantage is NaN or infinite",
}


def with_verdicts(table: Any, region: Region | None) -> Any:
    """The table with a column `verdict`.

    The ratio a weight is held against is π/b, or π/μ where the region corrects the sampler's mismatch on top. Where a
    weight is the sequence's and not the token's own, there is no such ratio.
    """
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    logp, weight, advantage = table["policy_logp"], table["weight"], table["advantage"]
    ratio = pc.exp(pc.subtract(logp, _anchor_column(table, region)))
    compared = _weighs_tokens(region)
    lower = pc.and_(compared, pc.less(weight, pc.multiply(ratio, 1 - TOLERANCE)))
    higher = pc.and_(compared, pc.greater(weight, pc.multiply(ratio, 1 + TOLERANCE)))
    finite = pc.and_(pc.is_finite(logp), pc.and_(pc.is_finite(weight), pc.is_finite(advantage)))
    cases = [
        (pc.invert(finite), NOT_FINITE),
        (pc.equal(advantage, 0.0), NO_GRADIENT),
        (pc.invert(table["kept"]), STOPPED),
        (pc.equal(weight, 0.0), NO_GRADIENT),
        (lower, DOWN),
        (higher, UP),
    ]
    conditions = pc.make_struct(*(pc.fill_null(case, False) for case, _ in cases))
    codes = [pa.scalar(code, pa.int8()) for _, code in cases]
    verdict = pc.case_when(conditions, *codes, pa.scalar(KEPT, pa.int8()))
    return table.append_column("verdict", verdict)


def _weighs_tokens(region: Region | None) -> bool:
    """Whether each token has a weight of its own: not with one ratio for a sequence, nor with one correction."""
    correction = getattr(region, "correction", None)
    by_sequence = isinstance(correction, MIS) and correction.level == "sequence"
    return not by_sequence and (region is None or region.needs().reduction is None)


def _anchor_column(table: Any, region: Region | None) -> Any:
    needs = None if region is None else region.needs()
    proximal = needs is not None and needs.anchors == {"proximal"}
    first, second = ("proximal_logp", "behavior_logp") if proximal else ("behavior_logp", "proximal_logp")
    return table[second] if table[first].null_count == len(table) else table[first]
