"""Sums over tokens that merge across micro-batches, ranks and steps, and the metrics computed from them.

`Sums` holds no means: sums add, extremes take the extreme, histograms add bin by bin, and `rates` divides last. One
call costs a few dozen reductions over the tokens and does not wait for the device. Ranks exchange two vectors of fixed
length (see `Sums.flat`), regardless of the number of tokens.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.core.clean import CleanTokens
from trustrl.core.histograms import FIRST_BIN, HALF, MANTISSA_BITS, NUM_BINS, PROBABILITY_EDGES, STALENESS_EDGES
from trustrl.core.metric_entries import Totals
from trustrl.core.metrics import FAULTS, METRICS, MOSTLY_DROPPED, Choice, chosen
from trustrl.core.numerics import either, largest_exponent
from trustrl.core.records import PolicyTokens
from trustrl.core.regions.decision import Decision
from trustrl.errors import NonFiniteError, RecordError, TrustRLWarning

RESERVED = {metric.name for metric in METRICS if f"extra/{metric.name}" not in metric.reads}
"""Metric names that a region's own values must not use, because they would replace the metric."""

LARGEST_LOG_RATIO = 300.0
"""Largest |log r| that enters a sum, so that one infinite log-ratio does not hide the others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over a set of tokens. `a + b` is the totals over both sets."""

    added: dict[str, Tensor]
    """Sums and histograms, which add."""

    highest: dict[str, Tensor]
    """Maxima, and negated minima, so that one reduction serves both."""

    def __add__(self, other: "Sums") -> "Sums":
        """Merges two sets of totals. A name that only one of them has is kept."""
        added = {name: _either(self.added, other.added, name, torch.add) for name in self.added | other.added}
        highest = {
            name: _either(self.highest, other.highest, name, torch.maximum) for name in self.highest | other.highest
        }
        return Sums(added, highest)

    def flat(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " h"]]:
        """Returns two vectors for collectives. All-reduce the first with SUM and the second with MAX, then `unflat`."""
        return _flatten(self.added), _flatten(self.highest)

    def unflat(self, added: Float[Tensor, " a"], highest: Float[Tensor, " h"]) -> "Sums":
        """Returns sums in this layout from two vectors in the form that `flat` returns."""
        return Sums(_unflatten(self.added, added), _unflatten(self.highest, highest))


def _either(a: dict[str, Tensor], b: dict[str, Tensor], name: str, merge: Any) -> Tensor:
    if name not in a or name not in b:
        return a.get(name, b.get(name))  # type: ignore[return-value]
    return merge(a[name], b[name])


def _flatten(parts: dict[str, Tensor]) -> Tensor:
    return torch.cat([parts[name].reshape(-1) for name in sorted(parts)])


def _unflatten(layout: dict[str, Tensor], vector: Tensor) -> dict[str, Tensor]:
    sizes = {name: layout[name].numel() for name in sorted(layout)}
    if vector.numel() != sum(sizes.values()):
        raise RecordError(
            f"The vector must have {sum(sizes.values())} entries, got {vector.numel()}. "
            "Use the same region on every rank."
        )
    parts = torch.split(vector, list(sizes.values()))
    return {name: part.reshape(layout[name].shape) for name, part in zip(sizes, parts, strict=True)}


def merge(sums: Iterable[Sums]) -> Sums:
    """Merges any number of totals.

    Raises:
        RecordError: If `sums` is empty.
    """
    total: Sums | None = None
    for part in sums:
        total = part if total is None else total + part
    if total is None:
        raise RecordError("merge needs at least one Sums, got none.")
    return total


@dataclass(frozen=True, slots=True)
class _Totals:
    """Totals in the making, over the usable tokens of one micro-batch."""

    usable: Bool[Tensor, " n"]
    on: Float[Tensor, " n"]
    """`usable` as 0 and 1, in the dtype of the sums."""

    # torch.compile cannot trace a subscripted factory such as dict[str, Tensor].
    added: dict[str, Tensor] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]
    highest: dict[str, Tensor] = field(default_factory=dict)  # pyright: ignore[reportUnknownVariableType]

    def count(self, name: str, x: Tensor) -> None:
        """Counts where x is True, on any token."""
        self.added[name] = torch.count_nonzero(x).to(self.on.dtype)

    def total(self, name: str, x: Tensor) -> None:
        """Sums x over usable tokens. x must be finite everywhere: a dot product is cheapest, and 0 · inf is NaN."""
        if x.dtype == torch.bool:
            self.count(name, self.usable & x)
        else:
            self.added[name] = torch.dot(self.on, x.to(self.on.dtype))

    def largest(self, name: str, x: Tensor) -> None:
        """Takes the maximum of x over usable tokens."""
        self.highest[name] = _max(torch.where(self.usable, x, -torch.inf))


def collect(
    tokens: CleanTokens,
    decision: Decision,
    overflow: Tensor,
    policy: PolicyTokens,
    terms: dict[str, Tensor],
) -> Sums:
    """Returns the totals of one micro-batch that `rates` reads."""
    totals = _Totals(tokens.usable, tokens.usable.to(tokens.log_ratio.dtype))
    on, added = totals.on, totals.added
    masked = ~decision.keep & (tokens.advantage != 0)
    side = tokens.log_ratio if decision.side is None else decision.side
    _count_tokens(totals, tokens, overflow)
    for name, term in terms.items():
        added[f"loss/{name}"] = term.to(on.dtype)
    totals.total("signed", tokens.advantage != 0)
    totals.total("stopped", masked)
    totals.total("stopped/increase", masked & (side > 0))
    totals.total("stopped/decrease", masked & (side < 0))

    anchor = torch.exp(tokens.log_anchor)
    gap = torch.exp(tokens.log_policy) - anchor
    _total_movement(totals, tokens, gap)
    acting = tokens.usable & ~overflow & decision.keep
    largest = math.exp(largest_exponent(on.dtype))
    totals.count("acting", acting)
    totals.total("weight", torch.where(acting, decision.weight, 0.0).clamp(-largest, largest))

    # Data that only some micro-batches carry comes with its own count.
    histograms = {"gap": gap, "log_ratio": tokens.log_ratio}
    if decision.divergence is not None:
        histograms |= _total_divergence(totals, decision, side)
    _total_vocabulary(totals, tokens, policy, masked)
    if tokens.log_mismatch is not None:
        _total_mismatch(totals, tokens.log_mismatch)
    add_extra(added, tokens, decision)

    columns = [on, (tokens.usable & masked).to(on.dtype), on * gap.abs()]
    added["by_probability"] = _binned(anchor, PROBABILITY_EDGES, columns)
    if tokens.staleness is not None:
        totals.total("staleness", tokens.staleness)
        added["staleness/measured"] = added["measured"]
        totals.largest("max/staleness", tokens.staleness)
        added["by_staleness"] = _binned(tokens.staleness, STALENESS_EDGES, columns)
    added |= {f"histogram/{name}": histogram(x, on) for name, x in histograms.items()}
    return Sums(added, totals.highest)


def add_extra(added: dict[str, Tensor], tokens: CleanTokens, decision: Decision) -> None:
    """Sums a region's own values over the usable tokens.

    Raises:
        RecordError: If one has the name of a metric.
    """
    for name, x in decision.extra.items():
        if name in RESERVED:
            raise RecordError(f"Decision.extra must not use the name of a metric, got {name!r}. Choose another name.")
        if x.dtype == torch.bool:
            added[f"extra/{name}"] = torch.count_nonzero(tokens.usable & x).to(tokens.log_ratio.dtype)
        else:
            added[f"extra/{name}"] = torch.where(tokens.usable, x, 0.0).sum(dtype=tokens.log_ratio.dtype)


def count_sequences(tokens: CleanTokens) -> dict[str, Tensor]:
    """Counts the sequences with a token in the loss, if tokens are grouped."""
    dtype = tokens.log_ratio.dtype
    if tokens.num_rows is not None:
        width = tokens.in_loss.numel() // max(tokens.num_rows, 1)
        return {"sequences": tokens.in_loss.reshape(tokens.num_rows, width).any(-1).sum(dtype=dtype)}
    if tokens.sequences is None:
        return {}
    present = torch.zeros(tokens.sequences.num, dtype=dtype, device=tokens.in_loss.device)
    present = present.scatter_reduce(0, tokens.sequences.of_token, tokens.in_loss.to(dtype), "amax")
    return {"sequences": present.sum()}


def _count_tokens(totals: _Totals, tokens: CleanTokens, overflow: Tensor) -> None:
    totals.count("tokens", tokens.in_loss)
    totals.count("measured", tokens.usable)
    totals.count("used", tokens.usable & ~overflow)
    totals.added.update(count_sequences(tokens))
    for name, faults in tokens.faults.items():
        totals.added[f"fault/{name}"] = faults
    totals.count("fault/overflow", overflow)


def _total_movement(totals: _Totals, tokens: CleanTokens, gap: Tensor) -> None:
    """Sums the probability gap π − b and the ratio π/b."""
    totals.total("gap", gap)
    totals.total("gap/abs", gap.abs())
    totals.total("bad_updates", (tokens.advantage < 0) & (gap <= -0.5))
    totals.largest("max/gap", gap)
    totals.largest("min/gap", -gap)
    # The square of a ratio overflows float64 at e^355 and float32 at e^44. The maximum keeps the true size.
    log_ratio = tokens.log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    ratio = torch.exp(log_ratio.clamp(max=largest_exponent(totals.on.dtype)))
    totals.total("ratio", ratio)
    totals.total("ratio/square", ratio.square())
    totals.total("log_ratio", log_ratio)
    totals.total("log_ratio/square", log_ratio.square())
    totals.largest("max/log_ratio", tokens.log_ratio)


def _total_divergence(totals: _Totals, decision: Decision, side: Tensor) -> dict[str, Tensor]:
    """Sums both ends of the interval, and counts tokens whose bound lies between them. Returns the histograms.

    The count is taken only if a larger K would lower it.
    """
    assert decision.divergence is not None
    lower, upper = decision.divergence
    totals.total("divergence", torch.nan_to_num(lower, posinf=0.0))
    totals.total("divergence/finite", lower < torch.inf)
    totals.total("divergence/infinite", lower == torch.inf)
    totals.largest("max/divergence", lower)
    found = {"divergence": lower}
    if upper is not lower:
        totals.total("divergence/upper", torch.nan_to_num(upper, posinf=0.0))
        totals.total("divergence/upper_finite", upper < torch.inf)
        found["divergence_upper"] = upper
    if decision.max_increase is not None and decision.max_decrease is not None:
        bound = either(side > 0, decision.max_increase, decision.max_decrease, like=lower)
        totals.total("bounded", lower >= 0)
        if decision.narrows_with_k:
            totals.total("undecided", (lower <= bound) & (bound < upper))
    return found


def _total_vocabulary(totals: _Totals, tokens: CleanTokens, policy: PolicyTokens, masked: Tensor) -> None:
    """Sums the mass outside the recorded ids, and the policy's entropy."""
    if tokens.partition is not None:
        totals.total("tail/anchor", torch.where(tokens.usable, tokens.partition.anchor_tail, 0.0))
        totals.total("tail/policy", torch.where(tokens.usable, tokens.partition.policy_tail, 0.0))
        totals.added["tail/measured"] = totals.added["measured"]
    if policy.entropy is not None:
        entropy = policy.entropy.detach().reshape(-1).to(totals.on.dtype)
        known = entropy.isfinite()
        entropy = torch.where(known & tokens.usable, entropy, 0.0)
        for name, where in (("kept", ~masked), ("stopped", masked)):
            totals.total(f"entropy/{name}", torch.where(where, entropy, 0.0))
            totals.total(f"entropy/{name}_measured", known & where)


def _total_mismatch(totals: _Totals, log_mismatch: Tensor) -> None:
    """Sums k = π'/μ where both log-probs are known."""
    known = ~log_mismatch.isnan()
    log_k = torch.where(known, log_mismatch, 0.0)
    totals.total("mismatch/measured", known)
    totals.total("mismatch", torch.exp(log_k.clamp(max=largest_exponent(totals.on.dtype))) * known)
    totals.total("mismatch/abs", log_k.abs())
    totals.largest("max/mismatch", torch.where(known, log_mismatch, -torch.inf))
    totals.largest("min/mismatch", torch.where(known, -log_mismatch, -torch.inf))


def _max(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_full((), -torch.inf)


def _binned(x: Tensor, edges: tuple[float, ...], columns: list[Tensor]) -> Float[Tensor, "bins f"]:
    """Sums each column over the bins of x: [−inf, e₀), [e₀, e₁), …, [e_last, inf)."""
    place = torch.zeros_like(x, dtype=torch.int8)
    for edge in edges:
        place += x >= edge
    index = place.long()
    empty = torch.zeros(len(edges) + 1, dtype=columns[0].dtype, device=x.device)
    return torch.stack([empty.scatter_add(0, index, column) for column in columns], dim=-1)


def bin_of(x: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Returns the histogram bin of each number. HALF is the bin around 0.

    The leading bits of a float32, its exponent and three bits of its mantissa, form a logarithmic scale.
    """
    leading = x.abs().to(torch.float32).view(torch.int32) >> (23 - MANTISSA_BITS)
    step = (leading - FIRST_BIN).clamp(0, HALF)
    return HALF + torch.sign(x).to(torch.int32) * step


def histogram(x: Float[Tensor, " n"], on: Float[Tensor, " n"]) -> Float[Tensor, " bins"]:
    """Counts the tokens with on = 1 in each bin."""
    return torch.zeros(NUM_BINS, dtype=on.dtype, device=on.device).scatter_add(0, bin_of(x).long(), on)


def rates(sums: Sums, metrics: Choice = "all") -> dict[str, float]:
    """Computes named metrics from totals. Waits for the device.

    Add sums over micro-batches and ranks *before* calling it: rates of parts do not average to the rate of the whole.
    Warns if most tokens were dropped.

    Args:
        sums: The totals.
        metrics: "all" for every metric that the totals suffice for, or "core" for the few that engines log by default.
            See `trustrl.core.metrics.METRICS` and `CORE`.

    Returns:
        `trustrl/<name>` → value.

    Raises:
        ConfigError: If `metrics` is neither "core" nor "all".
    """
    totals = Totals()
    for part in (sums.added, sums.highest):
        # torch leaves the elements of `tolist` untyped.
        values: list[float] = _flatten(part).tolist() if part else []  # pyright: ignore[reportUnknownMemberType, reportUnknownVariableType]
        for name in sorted(part):
            size = part[name].numel()
            chunk, values = values[:size], values[size:]
            totals[name] = chunk[0] if part[name].ndim == 0 else _nested(chunk, part[name].shape)
    found: dict[str, float] = {}
    for metric in METRICS:
        value = metric.value(totals)
        if value is not None:
            found[f"trustrl/{metric.name}"] = value
    known = {name for metric in METRICS for name in metric.reads}
    measured = totals["measured"]
    for name, value in totals.items():
        if name.startswith("extra/") and name not in known and measured:
            found[f"trustrl/{name.removeprefix('extra/')}"] = value / measured
    if found.get("trustrl/dropped_share", 0.0) > MOSTLY_DROPPED:
        warnings.warn(
            f"The loss dropped most of its tokens: {dropped_because(found)}. The batch trains on less than half of "
            "them. trustrl.check(policy, rollout, region) names the first such token.",
            TrustRLWarning,
            stacklevel=2,
        )
    return chosen(found, metrics)


def dropped_because(metrics: Mapping[str, float]) -> str:
    """Describes the kinds of faults in a step's metrics, without their counts."""
    return "; ".join(meaning for name, meaning in FAULTS.items() if metrics.get(f"trustrl/fault_{name}"))


def _nested(values: list[float], shape: torch.Size) -> list[Any]:
    if len(shape) == 1:
        return values
    width = math.prod(shape[1:])
    return [_nested(values[i : i + width], shape[1:]) for i in range(0, len(values), width)]


def raise_on_faults(sums: Sums) -> None:
    """Raises if a token in the loss is faulty. Waits for the device.

    Raises:
        NonFiniteError: With the number of tokens for each kind of fault.
    """
    counts = {name.removeprefix("fault/"): int(x) for name, x in sums.added.items() if name.startswith("fault/")}
    found = {name: count for name, count in counts.items() if count}
    if found:
        listed = ", ".join(f"{name}: {count}" for name, count in found.items())
        raise NonFiniteError(
            f"Tokens in the loss must be finite and possible, got faults at {listed}. "
            "trustrl.check(policy, rollout) locates them; on_nonfinite='drop' removes and counts them."
        )
