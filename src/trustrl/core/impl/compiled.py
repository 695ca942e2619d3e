"""Cleaning and decision of regions that read recorded columns, on a CPU with a C++ compiler.

`torch.compile` turns the sums over the columns into one loop in float32 (`compiled_rows`), which also bounds their
error. A token whose distance lies within the error of a bound, or whose columns may be faulty, goes through the
definition, and so does a token that TROLL projects. Verdicts and counts are therefore the definition's. What reads one
number per token is the definition too: compiled, its masks in float64 take longer than the torch operations.

The loop is compiled once for each kind of region and record, and once more when the number of tokens first changes:
from then on that number is dynamic. Each time takes some seconds. If a process uses many kinds, torch.compile gives up
and the same function runs as torch operations.
"""

import functools
import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trustrl.config.axes import Needs, Region, reads_ages
from trustrl.config.statistics import TopKKL
from trustrl.core.clean import CleanTokens, OnNonFinite, advantage_per_token, clean_tokens, require_fields
from trustrl.core.decision import Decision, decide
from trustrl.core.divergences import Interval
from trustrl.core.impl import eager
from trustrl.core.impl.compiled_rows import WIDEST, ColumnSums, sum_columns
from trustrl.core.partition import CellSums, column_faults, flat_columns
from trustrl.core.projection import SLACK, ProjectedTokens
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK, check_pair
from trustrl.errors import TrustRLWarning
from trustrl.kernels.id_columns import Columns

DTYPES = torch.float32, torch.bfloat16, torch.float16
"""Dtypes of log-probs that float32 holds exactly."""

KINDS = "dppo", "troll"
"""Regions that `judge` covers."""


def covers(policy: PolicyTokens, rollout: RolloutTokens, region: Region, needs: Needs) -> bool:
    """Returns True if `Compiled` applies: DPPO or TROLL on recorded columns, token by token, on a CPU."""
    if region.kind not in KINDS or getattr(region, "correction", None) is not None or reads_ages(region):
        return False
    if (
        region.needs().sequences
        or not needs.topk
        or needs.fills
        or (needs.own_topk == "known" and policy.topk is not None)
    ):
        return False
    if rollout.topk is None or rollout.topk.ids.shape[-1] > WIDEST:
        return False
    columns = policy.logp, policy.topk_logp, rollout.topk.logp
    return all(x is not None and x.dtype in DTYPES and x.device.type == "cpu" for x in columns)


@functools.cache
def _compiled() -> Any:
    return torch.compile(sum_columns)  # pyright: ignore[reportUnknownMemberType]


@functools.cache
def works() -> bool:
    """Returns True if torch.compile works here, and warns otherwise."""
    try:
        torch.compile(torch.exp)(torch.zeros(2))  # pyright: ignore[reportUnknownMemberType]
    except Exception as error:  # whatever a compiler raises
        warnings.warn(
            "impl='compiled' must have a C++ compiler that torch.compile can call, got "
            f"{type(error).__name__}: {(str(error).splitlines() or ['no message'])[0]}. The loss runs as torch "
            "operations instead, with the same results. Install g++, or use impl='eager'.",
            TrustRLWarning,
            stacklevel=2,
        )
        return False
    return True


class Request(NamedTuple):
    """The arguments of `Compiled.clean`, and the columns as it reads them."""

    policy: PolicyTokens
    rollout: RolloutTokens
    region: Any
    needs: Needs
    on_nonfinite: OnNonFinite
    columns: Columns


class Compiled:
    """The functions of `eager` for one call with a region that `covers` accepts."""

    def __init__(self, region: Any) -> None:
        self.region = region
        self.decision: Decision | None = None

    def clean(
        self, policy: PolicyTokens, rollout: RolloutTokens, needs: Needs, *, on_nonfinite: OnNonFinite
    ) -> CleanTokens:
        """Returns the result of `eager.clean`. The decision, which is part of finding doubtful tokens, is kept."""
        check_pair(policy, rollout)
        require_fields(policy, rollout, needs)
        columns, resolution = flat_columns(policy, rollout, needs)
        tokens, self.decision = _judge(Request(policy, rollout, self.region, needs, on_nonfinite, columns), resolution)
        return tokens

    def decide(self, tokens: CleanTokens, region: Region) -> Decision:
        """Returns the result of `eager.decide`."""
        assert self.decision is not None
        assert region == self.region
        return self.decision

    reduced_loss = staticmethod(eager.reduced_loss)
    collect = staticmethod(eager.collect)


def _judge(request: Request, resolution: float) -> tuple[CleanTokens, Decision]:
    """Returns the tokens and the decision of the definition."""
    policy, rollout, region, needs, on_nonfinite, columns = request
    sums = _summed(request, resolution)
    sampled = replace(needs, topk=0, tail_mass=0.0, projects=False)
    tokens = clean_tokens(policy, rollout, sampled, on_nonfinite=on_nonfinite)
    cells = CellSums(*sums[:3], sums.distance, resolution, columns)
    tokens = replace(tokens, partition=cells)
    doubtful = tokens.in_loss & ~(sums.doubt <= 0)
    if needs.projects:
        decision = _inside_ball(tokens, sums.distance)
        near = ~(sums.distance + sums.error < region.bound * (1 + SLACK))
    else:
        decision = decide(tokens, region)
        near = _near(decision, sums.error)
    rows = (doubtful | (tokens.usable & near)).nonzero().squeeze(-1)
    if not rows.numel():
        none = sums.doubt.new_zeros(())
        return replace(tokens, faults={**tokens.faults, **dict.fromkeys(column_faults(columns), none)}), decision
    again, part = _judge_again(request, rows)
    tokens = _corrected_tokens(request, tokens, rows, again)
    return tokens, _corrected_decision(decision, tokens, rows, part)


@torch.no_grad()
def _summed(request: Request, resolution: float) -> ColumnSums:
    """Returns the sums over the columns."""
    columns = request.columns
    tail = columns.own_tail_logp
    columns = columns._replace(
        own_logp=columns.own_logp.detach(), own_tail_logp=None if tail is None else tail.detach()
    )
    of = "projection"
    if not request.needs.projects:
        of = "kl" if isinstance(request.region.divergence, TopKKL) else "tv"
    sides = request.policy.logp, getattr(request.rollout, f"{request.needs.anchor}_logp")
    logp, anchor = (x.detach().reshape(-1) for x in sides)
    valid = columns.valid.contiguous().view(torch.uint8)
    return _compiled()(columns, logp, anchor, valid, of, resolution)


def _near(decision: Decision, error: Tensor) -> Tensor:
    """Flags tokens with an end of the interval within its error of a bound. NaN is near."""
    assert decision.divergence is not None
    near = torch.zeros_like(decision.keep)
    for end in decision.divergence:
        bounds: set[Any] = {decision.max_increase, decision.max_decrease}
        for bound in bounds:
            near = near | ~((end - bound).abs() > error)
    return near


def _inside_ball(tokens: CleanTokens, kl: Tensor) -> Decision:
    """Returns TROLL's decision for tokens inside the ball."""
    logp, log_ratio, usable = tokens.logp, tokens.log_ratio, tokens.usable
    kl, none = torch.where(usable, kl, 0.0), torch.zeros_like(kl)
    inside = torch.zeros_like(usable)
    projected = ProjectedTokens(logp, torch.zeros_like(logp), inside, log_ratio, kl, kl, none, none, none)
    weight = torch.exp(log_ratio)
    return Decision(
        torch.ones_like(usable),
        weight,
        logp,
        value=weight * tokens.advantage,
        penalty=projected.pull,
        extra=projected.numbers,
    )


def _judge_again(request: Request, rows: Tensor) -> tuple[CleanTokens, Decision]:
    """Returns the definition's results for some tokens, with gradient."""
    policy, rollout, region, needs, on_nonfinite, columns = request

    def some(x: Any) -> Any:
        return None if x is None else x.index_select(0, rows)

    ids, _, anchor_logp, own_logp, token_ids, anchor_tail, own_tail = (some(x) for x in columns[:7])
    recorded: dict[str, Any] = {name: getattr(rollout, name) for name in ("behavior_logp", "proximal_logp", "in_loss")}
    recorded["advantage"] = advantage_per_token(rollout)
    flat: dict[str, Any] = {name: None if x is None else some(x.reshape(-1)) for name, x in recorded.items()}
    tokens = clean_tokens(
        PolicyTokens(logp=some(policy.logp.reshape(-1)), topk_logp=own_logp, tail_logp=own_tail),
        RolloutTokens(**flat, token_ids=token_ids, topk=TopK(ids, anchor_logp, needs.anchor, anchor_tail)),
        replace(needs, sequences=False),
        on_nonfinite=on_nonfinite,
    )
    return tokens, decide(tokens, region)


def _corrected_tokens(request: Request, tokens: CleanTokens, rows: Tensor, part: CleanTokens) -> CleanTokens:
    """Returns the tokens with the definition's results in some rows. Only these rows have faults in their columns."""
    cells, some = tokens.partition, part.partition
    assert isinstance(cells, CellSums)
    assert some is not None
    put = functools.partial(_put, rows)
    usable = put(tokens.usable, part.usable)
    names = ("log_policy", "log_anchor", "log_ratio", "advantage", "log_mismatch", "logp")
    return replace(
        tokens,
        **{name: put(getattr(tokens, name), getattr(part, name)) for name in names},
        usable=usable,
        counted=tokens.in_loss if request.on_nonfinite == "zero" else usable,
        staleness=None if tokens.staleness is None else torch.where(usable, tokens.staleness, 0.0),
        partition=cells._replace(
            anchor_tail=put(cells.anchor_tail, some.anchor_tail),
            policy_tail=put(cells.policy_tail, some.policy_tail.detach()),
        ),
        faults={**part.faults, **tokens.faults},
    )


def _corrected_decision(decision: Decision, tokens: CleanTokens, rows: Tensor, part: Decision) -> Decision:
    """Returns the decision with the definition's in some rows."""
    put = functools.partial(_put, rows)
    interval = None
    if decision.divergence is not None and part.divergence is not None:
        interval = Interval(*(put(a, b) for a, b in zip(decision.divergence, part.divergence, strict=True)))
    names = ("keep", "weight", "value", "penalty")
    return replace(
        decision,
        **{name: put(getattr(decision, name), getattr(part, name)) for name in names},
        logp=put(tokens.logp, part.logp),
        divergence=interval,
        extra={name: put(x, part.extra[name]) for name, x in decision.extra.items()},
    )


def _put(rows: Tensor, x: Tensor | None, part: Tensor | None) -> Any:
    """Returns x with other numbers in some rows."""
    return None if x is None or part is None else x.index_copy(0, rows, part.to(x.dtype))
