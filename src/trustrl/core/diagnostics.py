"""Sums over tokens that merge across micro-batches, ranks and steps, and the metrics computed from them.

`Sums` holds no means: sums add, extremes take the extreme, histograms add bin by bin, and `rates` divides last. One
call costs a few dozen reductions over the tokens and does not wait for the device. Ranks exchange two vectors of fixed
length (see `Sums.flat`), regardless of the number of tokens.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.core.clean import CleanTokens
from trustrl.core.decision import Decision
from trustrl.core.eager_sums import SumInputs, add_up
from trustrl.core.metric_entries import Totals
from trustrl.core.metrics import FAULTS, METRICS, MOSTLY_DROPPED, Choice, chosen
from trustrl.core.numerics import largest_exponent
from trustrl.core.records import PolicyTokens
from trustrl.core.sum_table import (
    FIRST_BIN,
    HALF,
    LARGEST_LOG_RATIO,
    MANTISSA_BITS,
    NUM_BINS,
    PROBABILITY_EDGES,
    STALENESS_EDGES,
)
from trustrl.errors import NonFiniteError, RecordError, TrustRLWarning

RESERVED = {metric.name for metric in METRICS if f"extra/{metric.name}" not in metric.reads}
"""Metric names that a region's own values must not use, because they would replace the metric."""

EDGES = {"by_probability": PROBABILITY_EDGES, "by_staleness": STALENESS_EDGES}
"""Edges of the bins of each binned sum."""


@dataclass(frozen=True, slots=True)
class Sums:
    """Totals over a set of tokens. `a + b` is the totals over both sets."""

    added: dict[str, Tensor]
    """Sums and histograms, which add."""

    highest: dict[str, Tensor]
    """Maxima, and negated minima, so that one reduction serves both."""

    def __add__(self, other: "Sums") -> "Sums":
        """Merges two sets of totals. A name that only one of them has is kept."""
        added = _merged(self.added, other.added, torch.add)
        return Sums(added, _merged(self.highest, other.highest, torch.maximum))

    def flat(self) -> tuple[Float[Tensor, " a"], Float[Tensor, " h"]]:
        """Returns two vectors for collectives. All-reduce the first with SUM and the second with MAX, then `unflat`."""
        return _flatten(self.added), _flatten(self.highest)

    def unflat(self, added: Float[Tensor, " a"], highest: Float[Tensor, " h"]) -> "Sums":
        """Returns sums in this layout from two vectors in the form that `flat` returns."""
        return Sums(_unflatten(self.added, added), _unflatten(self.highest, highest))


def _merged(a: dict[str, Tensor], b: dict[str, Tensor], merge: Callable[[Tensor, Tensor], Tensor]) -> dict[str, Tensor]:
    return a | {name: merge(a[name], x) if name in a else x for name, x in b.items()}


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
    columns: list[Tensor] = field(default_factory=list)  # pyright: ignore[reportUnknownVariableType]
    """The numbers that `binned` adds up in bins, once it has made them."""

    def count_all(self, name: str, x: Tensor) -> None:
        """Counts where x is True, on any token."""
        self.added[name] = torch.count_nonzero(x)

    def count(self, name: str, x: Tensor) -> None:
        """Counts where x is True, on usable tokens."""
        self.count_all(name, self.usable & x)

    def sum(self, name: str, x: Tensor) -> None:
        """Sums x over usable tokens. x must be finite everywhere: a dot product is cheapest, and 0 · inf is NaN."""
        self.added[name] = torch.dot(self.on, x.to(self.on.dtype))

    def same(self, name: str, other: str) -> None:
        """Takes a sum that is there already."""
        self.added[name] = self.added[other]

    def max(self, name: str, x: Tensor) -> None:
        """Takes the maximum of x over usable tokens."""
        self.highest[name] = _max(torch.where(self.usable, x, -torch.inf))

    def histogram(self, name: str, x: Tensor) -> None:
        """Counts usable tokens in the bins of x."""
        self.added[name] = histogram(x, self.on)

    def binned(self, name: str, x: Tensor, masked: Tensor, gap: Tensor) -> None:
        """Sums usable tokens, masked ones and |gap| in the bins of x."""
        if not self.columns:  # every row bins the same columns
            self.columns.extend([self.on, (self.usable & masked).to(self.on.dtype), self.on * gap.abs()])
        self.added[name] = _binned(x, EDGES[name], self.columns)

    def sums(self) -> dict[str, Tensor]:
        """Returns all sums in one dtype. Counts are converted together, by two kernels."""
        counts = {name: x for name, x in self.added.items() if not x.is_floating_point()}
        converted = torch.stack(list(counts.values())).to(self.on.dtype).unbind()
        return self.added | dict(zip(counts, converted, strict=True))


def collect(
    tokens: CleanTokens,
    decision: Decision,
    overflow: Tensor,
    policy: PolicyTokens,
    terms: dict[str, Tensor],
) -> Sums:
    """Returns the totals of one micro-batch that `rates` reads."""
    dtype = tokens.log_ratio.dtype
    totals = _Totals(tokens.usable, tokens.usable.to(dtype))
    inputs = sum_inputs(tokens, decision, overflow, policy)
    if inputs.entropy is not None:
        inputs = inputs._replace(entropy=inputs.entropy.to(dtype))
    add_up(totals, inputs, **constants(dtype))
    return Sums(totals.sums() | other_sums(tokens, decision, terms), totals.highest)


def constants(dtype: torch.dtype) -> dict[str, float]:
    """Returns the constants of the table of sums, for sums in `dtype`."""
    largest = largest_exponent(dtype)
    return {
        "LARGEST_LOG_RATIO": LARGEST_LOG_RATIO,
        "LARGEST_EXPONENT": largest,
        "LARGEST_WEIGHT": math.exp(largest),
    }


def sum_inputs(tokens: CleanTokens, decision: Decision, overflow: Tensor, policy: PolicyTokens) -> SumInputs:
    """Returns the columns of the table of sums, for any implementation."""
    lower, upper = (None, None) if decision.divergence is None else decision.divergence
    bounded = decision.max_increase is not None and decision.max_decrease is not None
    # Undecided tokens are counted only if a larger K would lower their number.
    narrows = lower is not None and bounded and decision.narrows_with_k
    partition, entropy = tokens.partition, policy.entropy
    return SumInputs(
        in_loss=tokens.in_loss,
        usable=tokens.usable,
        overflow=overflow,
        keep=decision.keep,
        advantage=tokens.advantage,
        log_policy=tokens.log_policy,
        log_anchor=tokens.log_anchor,
        log_ratio=tokens.log_ratio,
        weight=decision.weight,
        side=decision.side,
        lower=lower,
        upper=None if upper is lower else upper,
        tail_anchor=None if partition is None else partition.anchor_tail,
        tail_policy=None if partition is None else partition.policy_tail.detach(),
        entropy=None if entropy is None else entropy.detach().reshape(-1),
        mismatch=tokens.log_mismatch,
        staleness=tokens.staleness,
        max_increase=_bound(decision.max_increase, tokens) if narrows else None,
        max_decrease=_bound(decision.max_decrease, tokens) if narrows else None,
        bounded=bounded,
        around_sampler=tokens.anchor == "behavior",
    )


def _bound(bound: float | Tensor | None, tokens: CleanTokens) -> Tensor | None:
    # `torch.where` of two Python numbers is float32: a bound of 0.3 would become 0.30000001.
    return bound if bound is None or isinstance(bound, Tensor) else tokens.log_ratio.new_full((), bound)


def other_sums(tokens: CleanTokens, decision: Decision, terms: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sums that the table does not have: terms of the loss, faults, sequences and the region's own.

    Raises:
        RecordError: If a value of the region has the name of a metric.
    """
    dtype = tokens.log_ratio.dtype
    added = {f"loss/{name}": term.to(dtype) for name, term in terms.items()}
    added |= {f"fault/{name}": count for name, count in tokens.faults.items()}
    added |= count_sequences(tokens)
    for name, x in decision.extra.items():
        if name in RESERVED:
            raise RecordError(f"Decision.extra must not use the name of a metric, got {name!r}. Choose another name.")
        if x.dtype == torch.bool:
            added[f"extra/{name}"] = torch.count_nonzero(tokens.usable & x).to(dtype)
        else:
            added[f"extra/{name}"] = torch.where(tokens.usable, x, 0.0).sum(dtype=dtype)
    return added


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
    return torch.zeros(NUM_BINS, dtype=on.dtype, device=on.device).scatter_add_(0, bin_of(x).long(), on)


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
        if part:  # one copy from the device for all of them
            on_host = _unflatten(part, _flatten(part).cpu())
            # torch leaves the elements of `tolist` untyped.
            totals.update({name: x.tolist() for name, x in on_host.items()})  # pyright: ignore[reportUnknownMemberType]
    named: dict[str, float] = {}
    for metric in METRICS:
        value = metric.value(totals)
        if value is not None:
            named[f"trustrl/{metric.name}"] = value
    known = {name for metric in METRICS for name in metric.reads}
    measured = totals["measured"]
    for name, value in totals.items():
        if name.startswith("extra/") and name not in known and measured:
            named[f"trustrl/{name.removeprefix('extra/')}"] = value / measured
    if named.get("trustrl/dropped_share", 0.0) > MOSTLY_DROPPED:
        warnings.warn(
            f"The loss dropped most of its tokens: {dropped_because(named)}. The batch trains on less than half of "
            "them. trustrl.check(policy, rollout, region) names the first such token.",
            TrustRLWarning,
            stacklevel=2,
        )
    return chosen(named, metrics)


def dropped_because(metrics: Mapping[str, float]) -> str:
    """Describes the kinds of faults in a step's metrics, without their counts."""
    return "; ".join(meaning for name, meaning in FAULTS.items() if metrics.get(f"trustrl/fault_{name}"))


def raise_on_faults(sums: Sums) -> None:
    """Raises if a token in the loss is faulty. Waits for the device."""
    counts = {name.removeprefix("fault/"): int(x) for name, x in sums.added.items() if name.startswith("fault/")}
    faulty = {name: count for name, count in counts.items() if count}
    if faulty:
        listed = ", ".join(f"{name}: {count}" for name, count in faulty.items())
        raise NonFiniteError(
            f"Tokens in the loss must be finite and possible, got faults at {listed}. "
            "trustrl.check(policy, rollout) locates them; on_nonfinite='drop' removes and counts them."
        )
