"""What happened to the tokens, as numbers that merge across micro-batches, ranks and steps.

Nothing here is a mean: sums add, extremes take the extreme, histograms add bin by bin, and `rates` divides at the very
end. One call costs a few dozen reductions over the tokens and no device synchronisation; what crosses ranks is two
vectors of fixed length (see `Sums.flat`), whatever the number of tokens.
"""

import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.errors import NonFiniteError, RecordError, TrustRLWarning
from trustrl.metrics import (
    FAULTS,
    FIRST_BIN,
    HALF,
    MANTISSA_BITS,
    METRICS,
    MOSTLY_DROPPED,
    NUM_BINS,
    PROBABILITY_EDGES,
    STALENESS_EDGES,
    Totals,
)
from trustrl.numerics import either, largest_exponent
from trustrl.records import PolicyTokens, RolloutTokens
from trustrl.regions.decision import Decision
from trustrl.tokens import Tokens

RESERVED = {metric.name for metric in METRICS if f"extra/{metric.name}" not in metric.reads}
"""Names a region's own numbers may not take: they would replace a metric."""

LARGEST_LOG_RATIO = 300.0
"""Log-ratios are clamped to this before they are added, so that one of −inf does not hide the others."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over some tokens. `a + b` are the totals over both."""

    added: dict[str, Tensor]
    """Sums and histograms: they add."""

    highest: dict[str, Tensor]
    """Maxima; minima are here too, negated, so that one reduction serves both."""

    def __add__(self, other: "Sums") -> "Sums":
        """Merges; a name that only one side has is kept as it is."""
        added = {name: _either(self.added, other.added, name, torch.add) for name in self.added | other.added}
        highest = {
            name: _either(self.highest, other.highest, name, torch.maximum) for name in self.highest | other.highest
        }
        return Sums(added, highest)

    def flat(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " h"]]:
        """Two vectors for collectives: all-reduce the first with SUM and the second with MAX, then `unflat`."""
        return _flatten(self.added), _flatten(self.highest)

    def unflat(self, added: Float[Tensor, " a"], highest: Float[Tensor, " h"]) -> "Sums":
        """Sums of this layout from vectors of `flat`'s form."""
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
            f"The vector must have {sum(sizes.values())} entries, got {vector.numel()}. Ranks must use the same region."
        )
    parts = vector.split(list(sizes.values()))
    return {name: part.reshape(layout[name].shape) for name, part in zip(sizes, parts, strict=True)}


def merge(sums: Iterable[Sums]) -> Sums:
    """The totals over all of them.

    Raises:
        RecordError: there is nothing to merge.
    """
    total: Sums | None = None
    for part in sums:
        total = part if total is None else total + part
    if total is None:
        raise RecordError("merge must be given at least one Sums, got none.")
    return total


def collect(
    tokens: Tokens,
    decision: Decision,
    overflow: Tensor,
    policy: PolicyTokens,
    rollout: RolloutTokens,
    terms: dict[str, Tensor],
) -> Sums:
    """Everything `rates` may be asked for, from one micro-batch."""
    measured = tokens.usable
    on = measured.to(tokens.log_ratio.dtype)
    used = measured & ~overflow
    added: dict[str, Tensor] = {}
    highest: dict[str, Tensor] = {}

    def count(name: str, x: Tensor) -> None:
        added[name] = torch.count_nonzero(x).to(on.dtype)

    def total(name: str, x: Tensor) -> None:
        # A dot product, because that is what costs least: x must be finite everywhere.
        if x.dtype == torch.bool:
            count(name, measured & x)
        else:
            added[name] = torch.dot(on, x.to(on.dtype))

    def largest(name: str, x: Tensor) -> None:
        highest[name] = _max(torch.where(measured, x, -torch.inf))

    count("tokens", tokens.in_loss)
    count("measured", measured)
    count("used", used)
    if tokens.sequences is not None:
        present = torch.zeros(tokens.sequences.num, dtype=on.dtype, device=on.device)
        present = present.scatter_reduce(0, tokens.sequences.of_token, tokens.in_loss.to(on.dtype), "amax")
        added["sequences"] = present.sum()
    for name, faults in tokens.faults.items():
        added[f"fault/{name}"] = faults
    count("fault/overflow", overflow)
    for name, term in terms.items():
        added[f"loss/{name}"] = term.to(on.dtype)

    signed = tokens.advantage != 0
    stopped = ~decision.keep & signed
    side = tokens.log_ratio if decision.side is None else decision.side
    total("signed", signed)
    total("stopped", stopped)
    total("stopped/increase", stopped & (side > 0))
    total("stopped/decrease", stopped & (side < 0))

    anchor = torch.exp(tokens.log_anchor)
    gap = torch.exp(tokens.log_policy) - anchor
    moved = gap.abs()
    total("gap", gap)
    total("gap/abs", moved)
    total("bad_updates", (tokens.advantage < 0) & (gap <= -0.5))
    largest("max/gap", gap)
    largest("min/gap", -gap)

    # A ratio's square leaves float64 at e^355 and float32 at e^44; the maximum carries the true size of a larger one.
    log_ratio = tokens.log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
    exponent = largest_exponent(on.dtype)
    summand = math.exp(exponent)
    ratio = torch.exp(log_ratio.clamp(max=exponent))
    total("ratio", ratio)
    total("ratio/square", ratio.square())
    total("log_ratio", log_ratio)
    total("log_ratio/square", log_ratio.square())
    largest("max/log_ratio", tokens.log_ratio)
    acting = used & decision.keep
    count("acting", acting)
    total("weight", torch.where(acting, decision.weight, 0.0).clamp(-summand, summand))
    histograms = {"gap": gap, "log_ratio": tokens.log_ratio}

    # What only some micro-batches may carry brings its own count along.
    if decision.divergence is not None:
        histograms |= _divergence_totals(decision, side, total, largest)
    if tokens.cells is not None:
        total("tail/anchor", torch.where(measured, tokens.cells.anchor_tail, 0.0))
        total("tail/policy", torch.where(measured, tokens.cells.policy_tail, 0.0))
        added["tail/measured"] = added["measured"]
    if tokens.log_mismatch is not None:
        known = ~tokens.log_mismatch.isnan()
        log_mismatch = torch.where(known, tokens.log_mismatch, 0.0)
        total("mismatch/measured", known)
        total("mismatch", torch.exp(log_mismatch.clamp(max=exponent)) * known)
        total("mismatch/abs", log_mismatch.abs())
        largest("max/mismatch", torch.where(known, tokens.log_mismatch, -torch.inf))
        largest("min/mismatch", torch.where(known, -tokens.log_mismatch, -torch.inf))
    if policy.entropy is not None:
        entropy = policy.entropy.detach().reshape(-1).to(on.dtype)
        known = entropy.isfinite()
        entropy = torch.where(known & measured, entropy, 0.0)
        for name, where in (("kept", ~stopped), ("stopped", stopped)):
            total(f"entropy/{name}", torch.where(where, entropy, 0.0))
            total(f"entropy/{name}_measured", known & where)
    for name, x in decision.extra.items():
        if name in RESERVED:
            raise RecordError(f"Decision.extra must not reuse the name of a metric, got {name!r}. Choose another name.")
        total(f"extra/{name}", x if x.dtype == torch.bool else torch.where(measured, x, 0.0))

    counts = [on, (measured & stopped).to(on.dtype), on * moved]
    added["by_probability"] = _binned(anchor, PROBABILITY_EDGES, counts)
    if rollout.version is not None and policy.version is not None:
        staleness = (policy.version - rollout.version.reshape(-1)).to(on.dtype)
        added["by_staleness"] = _binned(staleness, STALENESS_EDGES, counts)
    added |= {f"histogram/{name}": histogram(x, on) for name, x in histograms.items()}
    return Sums(added, highest)


def _divergence_totals(decision: Decision, side: Tensor, total: Any, largest: Any) -> dict[str, Tensor]:
    """Both ends of the interval, and how often the threshold lies between them."""
    assert decision.divergence is not None
    lower, upper = decision.divergence
    total("divergence", torch.nan_to_num(lower, posinf=0.0))
    total("divergence/finite", lower < torch.inf)
    total("divergence/infinite", lower == torch.inf)
    largest("max/divergence", lower)
    found = {"divergence": lower}
    if upper is not lower:
        total("divergence/upper", torch.nan_to_num(upper, posinf=0.0))
        total("divergence/upper_finite", upper < torch.inf)
        found["divergence_upper"] = upper
    if decision.max_increase is not None and decision.max_decrease is not None:
        bound = either(side > 0, decision.max_increase, decision.max_decrease, like=lower)
        total("undecided", (lower <= bound) & (bound < upper))
        total("decidable", lower >= 0)
    return found


def _max(x: Tensor) -> Tensor:
    return x.amax() if x.numel() else x.new_full((), -torch.inf)


def _binned(x: Tensor, edges: tuple[float, ...], columns: list[Tensor]) -> Float[Tensor, "bins f"]:
    """Σ of each column over each bin of x; the bins are [−inf, e₀), [e₀, e₁), …, [e_last, inf)."""
    place = torch.zeros_like(x, dtype=torch.int8)
    for edge in edges:
        place += x >= edge
    index = place.long()
    empty = torch.zeros(len(edges) + 1, dtype=columns[0].dtype, device=x.device)
    return torch.stack([empty.scatter_add(0, index, column) for column in columns], dim=-1)


def bin_of(x: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Which histogram bin a number falls into; HALF is the one around 0.

    The leading bits of a float32, its exponent and three bits of its mantissa, already are a logarithmic scale.
    """
    leading = x.abs().to(torch.float32).view(torch.int32) >> (23 - MANTISSA_BITS)
    step = (leading - FIRST_BIN).clamp(0, HALF)
    return HALF + torch.sign(x).to(torch.int32) * step


def histogram(x: Float[Tensor, " n"], on: Float[Tensor, " n"]) -> Float[Tensor, " bins"]:
    """How many of the tokens that count (on = 1) fall into each bin."""
    return torch.zeros(NUM_BINS, dtype=on.dtype, device=on.device).scatter_add(0, bin_of(x).long(), on)


def rates(sums: Sums) -> dict[str, float]:
    """Named metrics from totals; the only place that waits for the device.

    Add sums over micro-batches and ranks *before* asking: rates of parts do not average to the rate of the whole.
    Warns if most tokens were dropped.

    Returns:
        `trustrl/<name>` → value, for every metric the totals suffice for. See `trustrl.metrics.METRICS`.
    """
    totals = Totals()
    for part in (sums.added, sums.highest):
        values = _flatten(part).tolist() if part else []
        for name in sorted(part):
            size = part[name].numel()
            chunk, values = values[:size], values[size:]
            totals[name] = chunk[0] if part[name].ndim == 0 else _nested(chunk, part[name].shape)
    found = {}
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
    return found


def dropped_because(metrics: Mapping[str, float]) -> str:
    """Returns the kinds of fault in a step's metrics, in words, without their counts."""
    return "; ".join(meaning for name, meaning in FAULTS.items() if metrics.get(f"trustrl/fault_{name}"))


def _nested(values: list[float], shape: torch.Size) -> list[Any]:
    if len(shape) == 1:
        return values
    width = math.prod(shape[1:])
    return [_nested(values[i : i + width], shape[1:]) for i in range(0, len(values), width)]


def raise_on_faults(sums: Sums) -> None:
    """Raises if any token in the loss had a fault; waits for the device.

    Raises:
        NonFiniteError: with the count of each kind.
    """
    counts = {name.removeprefix("fault/"): int(x) for name, x in sums.added.items() if name.startswith("fault/")}
    found = {name: count for name, count in counts.items() if count}
    if found:
        listed = ", ".join(f"{name}: {count}" for name, count in found.items())
        raise NonFiniteError(
            f"Tokens in the loss must be finite and possible, got faults at {listed}. "
            "trustrl.check(policy, rollout) says where; on_nonfinite='drop' leaves them out and counts them."
        )
