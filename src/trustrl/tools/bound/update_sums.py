"""Sums over the recorded sequences of each update. They add over files, in float64."""

import io
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.config.statistics import Anchor
from trustrl.errors import RecordError
from trustrl.recording import Piece
from trustrl.tools.audit import Replay, age

COLUMNS = (
    "step", "update", "sequence", "advantage", "behavior_logp", "proximal_logp", "policy_logp", "kept",
    "divergence_lower", "divergence_upper", "sampler_version",
)  # fmt: skip

SUMS = (
    "sequences", "tokens", "faulty", "unrewarded", "inside", "reward", "gap", "gap²", "reward·gap", "reward·gap²",
    "(reward·gap)²", "sampled_tv", "lower_tv", "upper_tv",
)  # fmt: skip
"""Sums over the sequences of an update. A sequence's gap is Σ_t (r_t − 1), and its sampled TV is Σ_t ½|r_t − 1|, which
estimates the sum of its TVs without bias. `inside` counts tokens with a TV of at most δ. Sequences with a faulty
token, and those without a reward, count in `faulty` and `unrewarded` only."""

LARGEST = ("lower_tv", "upper_tv", "tokens", "age")
"""Largest TV bounds of a token, number of tokens of a sequence, and age of a rollout in updates."""


@dataclass(frozen=True, slots=True, eq=False)
class Rewards:
    """Rewards by sequence id, sorted by id."""

    sequence: Int[Tensor, " s"]
    reward: Float[Tensor, " s"]

    def of(self, sequence: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Returns the reward of each sequence, NaN if it is unknown."""
        indices = torch.searchsorted(self.sequence, sequence).clamp(max=len(self.sequence) - 1)
        return torch.where(self.sequence[indices] == sequence, self.reward[indices], torch.nan)

    def __reduce__(self) -> tuple[Any, ...]:
        """Serializes the rewards into the pickle.

        Worker processes would otherwise receive them in shared memory, of which containers have 64 MB by default.
        """
        return _rewards_from_bytes, (_to_bytes(self.sequence, self.reward),)


@dataclass(frozen=True, slots=True, eq=False)
class UpdateSums:
    """Sums and maxima by update. `a + b` is those over both; addition is associative up to rounding."""

    updates: Int[Tensor, "u 2"]
    """Step and update, sorted."""

    sums: Float[Tensor, "u k"]
    """Columns as in `SUMS`."""

    largest: Float[Tensor, "u m"]
    """Columns as in `LARGEST`."""

    def __add__(self, other: "UpdateSums") -> "UpdateSums":
        """Adds the sums of the same update, and keeps the larger maxima."""
        both = (torch.cat([getattr(part, name) for part in (self, other)]) for name in ("updates", "sums", "largest"))
        return by_update(*both)

    def to_bytes(self) -> bytes:
        """Serializes the sums for another process. `from_bytes` loads them without executing code."""
        return _to_bytes(self.updates, self.sums, self.largest)

    @classmethod
    def from_bytes(cls, data: bytes) -> "UpdateSums":
        """Loads sums that `to_bytes` wrote."""
        return cls(*_from_bytes(data))


def _to_bytes(*tensors: Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(list(tensors), out)
    return out.getvalue()


def _from_bytes(data: bytes) -> list[Tensor]:
    return torch.load(io.BytesIO(data), weights_only=True)


def _rewards_from_bytes(data: bytes) -> Rewards:
    return Rewards(*_from_bytes(data))


def by_update(updates: Int[Tensor, "n 2"], sums: Float[Tensor, "n k"], largest: Float[Tensor, "n m"]) -> UpdateSums:
    """Adds the rows of the same update."""
    names, indices = updates.unique(dim=0, return_inverse=True)
    return UpdateSums(
        names,
        sums.new_zeros(len(names), sums.shape[1]).index_add(0, indices, sums),
        largest.new_full((len(names), largest.shape[1]), -torch.inf).scatter_reduce(
            0, indices.unsqueeze(1).expand_as(largest), largest, "amax"
        ),
    )


def sums_of(piece: Piece, rewards: Rewards, delta: float, anchor: Anchor = "behavior") -> UpdateSums:
    """Sums over the sequences of a piece.

    Args:
        piece: Whole sequences, each at one update.
        rewards: Rewards of the run.
        delta: TV up to which a token is inside.
        anchor: Log-probs to read as μ's. `proximal` is right if trainer and sampler agree before the first update.
    """
    columns, run = piece.columns, piece.run
    if f"{anchor}_logp" not in columns:
        other = "proximal" if anchor == "behavior" else "behavior"
        advice = f" If sampler and trainer agree before the first update, pass --anchor {other}."
        raise RecordError(
            f"The records must have {anchor}_logp, the log-probs of the policy that sampled, but it is null."
            f"{advice if f'{other}_logp' in columns else ''}"
        )
    tokens, tv = Replay(piece).tv(anchor)
    ratio_gap = torch.expm1(tokens.log_ratio)
    num = int(run[-1]) + 1

    def total(x: Tensor) -> Tensor:
        return torch.zeros(num, dtype=torch.float64).index_add(0, run, x.double())

    def most(x: Tensor) -> Tensor:
        return torch.full((num,), -torch.inf, dtype=torch.float64).scatter_reduce(0, run, x.double(), "amax")

    ones = torch.ones_like(ratio_gap)
    length, gap = total(ones), total(ratio_gap)
    first = torch.searchsorted(run, torch.arange(num))
    reward = rewards.of(columns["sequence"][first])
    faulty, known = total(~tokens.usable) > 0, reward.isfinite()
    counts, known = ~faulty & known, known | faulty
    reward = reward.where(counts, 0.0)
    rows = {
        "sequences": ones[:num], "tokens": length, "inside": total(tv.upper <= delta), "reward": reward,
        "gap": gap, "gap²": gap**2, "reward·gap": reward * gap, "reward·gap²": reward * gap**2,
        "(reward·gap)²": (reward * gap) ** 2, "sampled_tv": total(ratio_gap.abs() / 2),
        "lower_tv": total(tv.lower), "upper_tv": total(tv.upper),
    }  # fmt: skip
    rows = {name: x.where(counts, 0.0) for name, x in rows.items()} | {
        "faulty": faulty.double(), "unrewarded": (~known).double(),
    }  # fmt: skip
    largest = {"lower_tv": most(tv.lower), "upper_tv": most(tv.upper), "tokens": length, "age": most(age(columns))}
    return by_update(
        torch.stack([columns["step"][first], columns["update"][first]], 1).long(),
        torch.stack([rows[name] for name in SUMS], 1),
        torch.stack([largest[name].where(counts, -torch.inf) for name in LARGEST], 1),
    )
