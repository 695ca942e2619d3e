"""Counts of region verdicts on recorded tokens. Counts are integers that add over files, processes, and machines."""

import io
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from trustrl.core.clean import possible
from trustrl.core.metrics import PROBABILITY_EDGES, STALENESS_EDGES
from trustrl.recording import Piece
from trustrl.tools.audit.region_replay import Arm, RegionVerdict, Replay, arm, recorded_region

PER_ARM: tuple[str, ...] = (
    "rows",
    "measured",
    "signed",
    "stopped",
    "stopped_at_most",
    "certifiable",
    "outside",
    "inside",
)
REPRODUCED: tuple[str, ...] = ("rows", "kept_differs", "weight_rows", "weight_differs")
POSITION_EDGES = tuple(float(2**power) for power in range(18))
"""Position bins: 0 | 1 | 2-3 | 4-7 | … | 131072 and above."""

BINS = {
    "probability": PROBABILITY_EDGES, "position": POSITION_EDGES, "age": STALENESS_EDGES, "advantage": (0.0,),
}  # fmt: skip
MAX_IDS = 2**22
"""Ids from here on are not counted individually, so that a corrupt file cannot exhaust memory."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenCounts:
    """Counts by name. `a + b` is the counts over both; addition is associative and commutative."""

    counts: dict[str, Int[Tensor, "..."]]

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        """Adds the counts. Tables with fewer columns are padded with zeros."""
        names = self.counts | other.counts
        return TokenCounts({name: _sum([s.counts[name] for s in (self, other) if name in s.counts]) for name in names})

    def __eq__(self, other: object) -> bool:
        """Compares the counts, ignoring trailing columns of zeros."""
        if not isinstance(other, TokenCounts) or self.counts.keys() != other.counts.keys():
            return False
        return all(not _sum([x, -other.counts[name]]).any() for name, x in self.counts.items())

    def to_bytes(self) -> bytes:
        """Serializes the counts for another process. `from_bytes` loads them without executing code."""
        out = io.BytesIO()
        torch.save(self.counts, out)
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> "TokenCounts":
        """Loads counts that `to_bytes` wrote."""
        return cls(torch.load(io.BytesIO(data), weights_only=True))

    @classmethod
    def of(cls, piece: Piece, arms: Sequence[Arm]) -> "TokenCounts":
        """Counts the verdicts of the recorded region, which comes first, and of these regions on one piece."""
        columns, replay = piece.columns, Replay(piece)
        measured = possible(columns["policy_logp"]) & columns["advantage"].isfinite()
        signed = measured & (columns["advantage"] != 0)
        stopped = ~columns["kept"] if "kept" in columns else None
        recorded = None if stopped is None else RegionVerdict(measured, stopped, stopped, None, None)
        verdicts = [recorded, *(replay.verdict(one) for one in arms)]
        there = torch.tensor([one is not None for one in verdicts])
        nothing = torch.zeros_like(signed)
        stopped = torch.stack([nothing if one is None else one.masked & signed for one in verdicts])
        counts = {
            "rows": torch.tensor(len(piece)),
            "sequences": piece.run[-1] + 1,
            "signed": signed.sum(),
            "arms": torch.stack([_of_arm(one, signed) for one in verdicts]),
            "pairs": _pairs(stopped, there, int(signed.sum())),
            "reproduced": _reproduced(piece, replay),
        }
        which, token = stopped.nonzero(as_tuple=True)
        for name, place in _places(piece).items():
            width = len(BINS[name]) + 1
            tokens = torch.bincount(place[signed], minlength=width) * there.unsqueeze(1)
            stops = torch.bincount(which * width + place[token], minlength=width * len(verdicts))
            counts[f"by/{name}"] = torch.stack([tokens, stops.view(len(verdicts), width)])
        if "token_id" in columns:
            counts["ids"] = _by_id(columns["token_id"].long(), signed, which, token, len(verdicts))
        return cls(counts)


def _sum(parts: list[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].ndim:
        width = max(part.shape[-1] for part in parts)
        parts = [pad(part, (0, width - part.shape[-1])) for part in parts]
    return parts[0] + parts[1]


def age(columns: dict[str, Tensor]) -> Int[Tensor, " n"]:
    """Returns the age of each token in updates; 0 while the weights are those that sampled it.

    Adds the steps since the sampler's version, if it is recorded, and the updates within the step (verl, whose steps
    have several; in TRL steps are updates).
    """
    update = columns["update"].long()
    if "sampler_version" not in columns:
        return update
    return (columns["step"] - columns["sampler_version"]).long().clamp(min=0) + update


def _places(piece: Piece) -> dict[str, Int[Tensor, " n"]]:
    """Returns the bin index of each token, by kind of bin."""
    columns = piece.columns
    values = {"position": columns["position"], "age": age(columns), "advantage": columns["advantage"]}
    logp = columns.get("behavior_logp", columns.get("proximal_logp"))
    if logp is not None:
        values["probability"] = logp.double().exp().nan_to_num(0.0)
    return {
        name: torch.bucketize(x.double(), torch.tensor(BINS[name], dtype=torch.float64), right=True)
        for name, x in values.items()
    }


def _of_arm(verdict: RegionVerdict | None, signed: Bool[Tensor, " n"]) -> Int[Tensor, " f"]:
    if verdict is None:
        return torch.zeros(len(PER_ARM), dtype=torch.int64)
    out, inside = verdict.certified or (torch.zeros_like(signed), torch.zeros_like(signed))
    columns = {
        "rows": torch.ones_like(signed), "measured": verdict.measured, "signed": verdict.measured & signed,
        "stopped": verdict.masked & signed, "stopped_at_most": verdict.may_mask & signed,
        "certifiable": verdict.measured if verdict.certified else torch.zeros_like(signed), "outside": out,
        "inside": inside,
    }  # fmt: skip
    return torch.stack([torch.count_nonzero(columns[name]) for name in PER_ARM])


def _pairs(stopped: Bool[Tensor, "r n"], there: Bool[Tensor, " r"], signed: int) -> Int[Tensor, "3 r r"]:
    """Counts, for each pair of regions with a verdict: all tokens, those the first masks, and those both mask."""
    both_there = there.unsqueeze(1) & there
    each = stopped.sum(1).unsqueeze(1) * both_there
    ones = stopped.double()
    return torch.stack([signed * both_there, each, (ones @ ones.T).long()])


def _by_id(ids: Tensor, signed: Tensor, which: Tensor, token: Tensor, num: int) -> Int[Tensor, "r v"]:
    """Counts how often each id occurs with A ≠ 0, then how often each region masks it."""
    known = (ids >= 0) & (ids < MAX_IDS)
    width = 1 << max(int(ids[known].max()) if known.any() else 0, 1).bit_length()
    seen = torch.bincount(ids[known & signed], minlength=width)
    here = known[token]
    stops = torch.bincount(which[here] * width + ids[token[here]], minlength=width * num).view(num, width)
    return torch.cat([seen.unsqueeze(0), stops])


def _reproduced(piece: Piece, replay: Replay) -> Int[Tensor, "4"]:
    """Counts where a replay of the recorded region differs from the records; zeros if it cannot be replayed."""
    region = recorded_region(piece.region)
    again = None if region is None else replay.verdict(arm("again", region))
    if again is None:
        return torch.zeros(len(REPRODUCED), dtype=torch.int64)
    recorded, num = ~piece.columns["kept"], torch.tensor(len(piece))
    differs = (again.masked & ~recorded) | (recorded & ~again.may_mask)
    if again.weight is None:
        return torch.stack([num, differs.sum(), torch.tensor(0), torch.tensor(0)])
    weight, now = piece.columns["weight"], again.weight.float()
    other = ~((weight == now) | (weight.isnan() & now.isnan()))
    return torch.stack([num, differs.sum(), num, other.sum()])
