"""Sums over tokens that metrics are computed from, one row each, and the bins of histograms.

`python scripts/sums.py` writes the eager code and the Triton kernel with its slots from these rows (`eager_sums`,
`kernels/sum_kernels.py`). A test compares, so the two cannot differ in an expression or a slot. Loads without torch.

An expression uses Python's operators and `exp`, `abs`, `where`, `clip`, `at_most`, `finite`, `finite_part`, `known`,
`only` and `pick` (see `scripts/sums.py`) on the names of COLUMNS, SHARED and CONSTANTS. `a or b` is column b where a is
absent. A summed expression must be finite on all tokens, unusable ones included: blank it with `where`.
"""

import math
from typing import Literal, NamedTuple

LARGEST_LOG_RATIO = 300.0
"""Largest |log r| that enters a sum, so that one infinite log-ratio does not hide the others."""

CONSTANTS = ("LARGEST_LOG_RATIO", "LARGEST_EXPONENT", "LARGEST_WEIGHT")
"""Numbers that depend on the dtype of the sums at most; see `diagnostics.constants`."""


class Column(NamedTuple):
    """Input with one value per token."""

    name: str
    kind: Literal["flag", "number", "bound", "switch"] = "number"
    """A `bound` is one number or one per token. A `switch` is one Python truth value per micro-batch."""

    optional: bool = False
    """True if a micro-batch may lack it. A row that reads it names it in `needs`."""


COLUMNS = (
    Column("in_loss", "flag"),
    Column("usable", "flag"),
    Column("overflow", "flag"),
    Column("keep", "flag"),
    Column("advantage"),
    Column("log_policy"),
    Column("log_anchor"),
    Column("log_ratio"),
    Column("weight"),
    Column("side", optional=True),
    Column("lower", optional=True),
    Column("upper", optional=True),
    Column("tail_anchor", optional=True),
    Column("tail_policy", optional=True),
    Column("entropy", optional=True),
    Column("mismatch", optional=True),
    Column("staleness", optional=True),
    Column("max_increase", "bound", optional=True),
    Column("max_decrease", "bound", optional=True),
    Column("bounded", "switch", optional=True),
    Column("around_sampler", "switch"),
)


class Shared(NamedTuple):
    """Expression that several rows use."""

    name: str
    expression: str


SHARED = (
    Shared("masked", "~keep & (advantage != 0)"),
    Shared("direction", "side or log_ratio"),
    Shared("anchor", "exp(log_anchor)"),
    Shared("gap", "exp(log_policy) - anchor"),
    # The square of a ratio overflows float64 at e^355 and float32 at e^44. The maximum keeps the true size.
    Shared("held", "clip(log_ratio, -LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)"),
    Shared("ratio", "exp(at_most(held, LARGEST_EXPONENT))"),
    Shared("acting", "usable & ~overflow & keep"),
    Shared("high", "upper or lower"),
    Shared("bound", "where(direction > 0, max_increase, max_decrease)"),
    Shared("seen", "finite(entropy)"),
    Shared("spread", "where(usable & seen, entropy, 0.0)"),
    Shared("both", "known(mismatch)"),
    Shared("log_k", "where(both, mismatch, 0.0)"),
    # Of π' and μ, one is the anchor.
    Shared("other", "exp(log_anchor + pick(around_sampler, log_k, -log_k))"),
)

Reduction = Literal["count", "sum", "max", "histogram", "binned"]


class Row(NamedTuple):
    """A sum, a maximum or a histogram over tokens."""

    name: str
    expression: str
    unit: str
    needs: tuple[str, ...] = ()
    """Optional columns without which the row is left out, in the order of the nested conditions around its code."""

    reduction: Reduction = "sum"
    """`binned` adds up tokens, masked tokens and |gap| in each bin of the expression."""

    over: Literal["usable", "all"] = "usable"
    """Tokens that enter."""


def _count(name: str, expression: str, *needs: str) -> Row:
    return Row(name, expression, "tokens", needs, "count")


def _count_all(name: str, expression: str, *needs: str) -> Row:
    return Row(name, expression, "tokens", needs, "count", "all")


def _max(name: str, expression: str, unit: str, *needs: str) -> Row:
    return Row(name, expression, unit, needs, "max")


def _histogram(name: str, expression: str, *needs: str) -> Row:
    return Row(f"histogram/{name}", expression, "tokens", needs, "histogram")


def _binned(name: str, expression: str, *needs: str) -> Row:
    return Row(name, expression, "tokens, tokens, probability", needs, "binned")


D = "the statistic's"
DECIDED = "lower", "bounded", "max_increase", "max_decrease"
TAILS = "tail_anchor", "tail_policy"

ROWS = (
    _count_all("tokens", "in_loss"),
    _count_all("fault/overflow", "overflow"),
    _count_all("measured", "usable"),
    _count("used", "~overflow"),
    _count("signed", "advantage != 0"),
    _count("masked", "masked"),
    _count("masked/increase", "masked & (direction > 0)"),
    _count("masked/decrease", "masked & (direction < 0)"),
    _count("bad_updates", "(advantage < 0) & (gap <= -0.5)"),
    Row("gap", "gap", "probability"),
    Row("gap/abs", "abs(gap)", "probability"),
    Row("anchor/masked", "where(masked, anchor, 0.0)", "probability"),
    _max("max/gap", "gap", "probability"),
    _max("min/gap", "-gap", "probability"),
    _histogram("gap", "gap"),
    Row("ratio", "ratio", "ratio"),
    Row("ratio/square", "ratio * ratio", "ratio²"),
    Row("log_ratio", "held", "nats"),
    Row("log_ratio/square", "held * held", "nats²"),
    _max("max/log_ratio", "log_ratio", "nats"),
    _histogram("log_ratio", "log_ratio"),
    _count_all("acting", "acting"),
    Row("weight", "clip(where(acting, weight, 0.0), -LARGEST_WEIGHT, LARGEST_WEIGHT)", "ratio"),
    Row("divergence", "finite_part(lower)", D, ("lower",)),
    _count("divergence/finite", "lower < inf", "lower"),
    _count("divergence/infinite", "lower == inf", "lower"),
    _max("max/divergence", "lower", D, "lower"),
    _histogram("divergence", "lower", "lower"),
    Row("divergence/upper", "finite_part(upper)", D, ("lower", "upper")),
    _count("divergence/upper_finite", "upper < inf", "lower", "upper"),
    _histogram("divergence_upper", "upper", "lower", "upper"),
    _count("bounded", "lower >= 0", "lower", "bounded"),
    # Counted only if a larger K would lower it.
    _count("undecided", "(lower <= bound) & (bound < high)", *DECIDED),
    Row("tail/anchor", "where(usable, tail_anchor, 0.0)", "probability", TAILS),
    Row("tail/policy", "where(usable, tail_policy, 0.0)", "probability", TAILS),
    _count_all("tail/measured", "usable", *TAILS),
    Row("entropy/kept", "where(masked, 0.0, spread)", "nats", ("entropy",)),
    _count("entropy/kept_measured", "seen & ~masked", "entropy"),
    Row("entropy/masked", "where(masked, spread, 0.0)", "nats", ("entropy",)),
    _count("entropy/masked_measured", "seen & masked", "entropy"),
    _count("mismatch/measured", "both", "mismatch"),
    Row("mismatch", "only(both, exp(at_most(log_k, LARGEST_EXPONENT)))", "ratio", ("mismatch",)),
    Row("mismatch/abs", "abs(log_k)", "nats", ("mismatch",)),
    Row("mismatch/gap", "abs(other - anchor)", "probability", ("mismatch",)),
    _max("max/mismatch", "where(both, mismatch, -inf)", "nats", "mismatch"),
    _max("min/mismatch", "where(both, -mismatch, -inf)", "nats", "mismatch"),
    # Late, because the tile of tokens by bins takes most registers: 120 on an A100 instead of 140.
    _binned("by_probability", "anchor"),
    Row("staleness", "staleness", "versions", ("staleness",)),
    _max("max/staleness", "staleness", "versions", "staleness"),
    _count_all("staleness/measured", "usable", "staleness"),
    _binned("by_staleness", "staleness", "staleness"),
)
"""Every sum over tokens. Rows with the same expression over the same tokens share a slot of the kernel. Maxima are kept
as they are, and minima as maxima of the negated expression."""


MANTISSA_BITS, SMALLEST_EXPONENT, LARGEST_EXPONENT = 3, -27, 10
FIRST_BIN = ((SMALLEST_EXPONENT + 127) << MANTISSA_BITS) - 1
HALF = (LARGEST_EXPONENT - SMALLEST_EXPONENT) << MANTISSA_BITS
NUM_BINS = 2 * HALF + 1
"""Histogram bins: one around 0, then 8 per power of two from 2⁻²⁷ (7e-9) to 2¹⁰ on each side. The outermost are
open."""

PROBABILITY_EDGES = (1e-4, 1e-3, 1e-2, 0.1, 0.5, 0.9, 0.99)
"""Edges of the anchor-probability bins. The first and the last bin are open."""

STALENESS_EDGES = (1.0, 2.0, 3.0, 5.0, 9.0, 17.0)
"""Edges of the staleness bins, in weight versions: 0 | 1 | 2 | 3-4 | 5-8 | 9-16 | 17 and more."""


def quantile(bins: list[float], share: float) -> float:
    """Returns the value below which this share of a histogram lies, to the width of a bin (at most 12.5%).

    Examples:
        >>> bins = [0.0] * NUM_BINS
        >>> bins[HALF] = 1.0
        >>> quantile(bins, 0.5)
        0.0
    """
    total = sum(bins)
    if not total:
        raise ZeroDivisionError
    wanted, below = share * total, 0.0
    for index, count in enumerate(bins):
        if count and below + count >= wanted:
            part = (wanted - below) / count
            return _inside_bin(index - HALF, part if index > HALF else 1 - part)
        below += count
    return _inside_bin(HALF, 1.0)


def _inside_bin(step: int, part: float) -> float:
    """Interpolates between the bin's edge nearer to 0 (part 0) and its other edge (part 1)."""
    if step == 0:
        return 0.0
    low, high = (_edge(abs(step) - 1 + more) for more in (0, 1))
    return math.copysign(low + part * (high - low), step)


def _edge(index: int) -> float:
    octave, eighth = divmod(index, 1 << MANTISSA_BITS)
    return 2.0 ** (SMALLEST_EXPONENT + octave) * (1 + eighth / (1 << MANTISSA_BITS))


def bin_names(prefix: str, edges: tuple[float, ...]) -> list[str]:
    """Returns the names of the bins between these edges. The first and the last bin are open."""
    return [f"{prefix}_below_{edges[0]:g}", *(f"{prefix}_from_{edge:g}" for edge in edges)]
