"""Classification of what the region did to each recorded token, from the token's row alone."""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.terms import reads_sequences
from trustrl.optional_imports import need

VERDICTS = ("kept", "stopped", "down-weighted", "up-weighted", "no gradient", "not finite", "no verdict")
"""Verdicts by code, as `--json` names them."""

LABELS = {name: "masked" if name == "stopped" else name for name in VERDICTS}
"""Verdicts as reports show them."""

KEPT, STOPPED, DOWN, UP, NO_GRADIENT, NOT_FINITE, NO_VERDICT = range(len(VERDICTS))
WITH_GRADIENT = VERDICTS[:4]
"""Verdicts on tokens that have a gradient. The region does not affect the others."""

TOLERANCE = 0.01
"""Relative difference within which a weight equals the token's ratio."""

MEANINGS = {
    "kept": "gradient kept, and the weight is the ratio",
    "stopped": "the region masked the gradient",
    "down-weighted": "kept with a weight more than 1% below the ratio",
    "up-weighted": "kept with a weight more than 1% above the ratio",
    "no gradient": "advantage or weight is 0",
    "not finite": "a log-prob, weight, or advantage is NaN or infinite",
    "no verdict": "the run has no region",
}


def with_verdicts(table: Any, region: Region | None) -> Any:
    """Adds a column `verdict` to the table.

    Weights are compared with the ratio π/b, or with π/μ if the region also corrects the sampler mismatch. Weights that
    belong to a whole sequence are not compared. Tokens that no region decided on have the verdict "no verdict".
    """
    pa, pc = need("pyarrow", extra="records"), need("pyarrow.compute", extra="records")
    logp, weight, advantage = table["policy_logp"], table["weight"], table["advantage"]
    ratio = pc.exp(pc.subtract(logp, _anchor_column(table, region)))
    compared = _weighs_tokens(region)
    lower = pc.and_(compared, pc.less(weight, pc.multiply(ratio, 1 - TOLERANCE)))
    higher = pc.and_(compared, pc.greater(weight, pc.multiply(ratio, 1 + TOLERANCE)))
    finite = pc.and_(pc.is_finite(logp), pc.and_(pc.fill_null(pc.is_finite(weight), True), pc.is_finite(advantage)))
    cases = [
        (pc.invert(finite), NOT_FINITE),
        (pc.is_null(table["kept"]), NO_VERDICT),
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
    """Returns whether each token has its own weight, rather than one ratio or correction per sequence."""
    correction = getattr(region, "correction", None)
    return not reads_sequences(correction) and (region is None or region.needs().reduction is None)


def _anchor_column(table: Any, region: Region | None) -> Any:
    needs = None if region is None else region.needs()
    proximal = needs is not None and needs.anchors == {"proximal"}
    first, second = ("proximal_logp", "behavior_logp") if proximal else ("behavior_logp", "proximal_logp")
    return table[second] if table[first].null_count == len(table) else table[first]
