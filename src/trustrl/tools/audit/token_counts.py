"""Counts of region verdicts on recorded tokens. Counts are integers that add over files, processes, and machines."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.nn.functional import pad

from trustrl.config.statistics import Anchor
from trustrl.core.sum_table import PROBABILITY_EDGES, STALENESS_EDGES
from trustrl.recording import Piece
from trustrl.tools.audit.anchored_tokens import usable_in
from trustrl.tools.audit.record_anchor import measured_from
from trustrl.tools.audit.region_replay import Arm, RegionVerdict, Replay

PER_ARM: tuple[str, ...] = (
    "rows", "measured", "signed", "stopped", "stopped_at_most", "certifiable", "outside", "inside",
)  # fmt: skip
REPRODUCED: tuple[str, ...] = ("rows", "kept_differs", "weight_rows", "weight_differs")
POSITION_EDGES = tuple(float(2**power) for power in range(18))
"""Position bins: 0 | 1 | 2-3 | 4-7 | … | 131072 and above."""

BINS = {
    "probability": PROBABILITY_EDGES, "position": POSITION_EDGES, "age": STALENESS_EDGES, "advantage": (0.0,),
}  # fmt: skip
MAX_IDS = 2**22
"""Ids from here on are not counted individually, so that a corrupt file cannot exhaust memory."""

_MAX_BITS = 12
"""Number of sets up to which every combination has a number. With more sets, only combinations that occur have one."""


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
    def of(cls, piece: Piece, arms: Sequence[Arm], anchor: Anchor = "behavior") -> "TokenCounts":
        """Counts the verdicts of the recorded region, which comes first, and of these regions on one piece.

        The recorded region is replayed from its own anchor, and the others read this anchor as μ.
        """
        replay = Replay(piece)
        reproduced = _reproduced(piece, replay)
        if anchor != "behavior":
            piece = measured_from(piece, anchor)
            replay = Replay(piece)
        columns = piece.columns
        measured = usable_in(columns["advantage"], [columns["policy_logp"]])
        signed = measured & (columns["advantage"] != 0)
        masked = ~columns["kept"] if "kept" in columns else None
        recorded = None if masked is None else RegionVerdict(measured, masked, masked, None, None)
        verdicts = [recorded, *(replay.verdict(arm) for arm in arms)]
        there = torch.tensor([verdict is not None for verdict in verdicts])
        nothing = torch.zeros_like(signed)
        sets = TokenSets([signed, *(nothing if verdict is None else verdict.masked & signed for verdict in verdicts)])
        overlaps = sets.overlaps()
        _, *masks = overlaps.diagonal().tolist()
        counts = {
            "rows": torch.tensor(len(piece)),
            "sequences": piece.run[-1] + 1,
            "signed": overlaps[0, 0],
            "arms": torch.tensor([_of_arm(verdict, signed, num) for verdict, num in zip(verdicts, masks, strict=True)]),
            "pairs": _pairs(overlaps, there),
            "reproduced": reproduced,
        }
        for name, place in _places(piece).items():
            histograms = sets.by_bin(place, len(BINS[name]) + 1)
            counts[f"by/{name}"] = torch.stack([histograms[:1] * there.unsqueeze(1), histograms[1:]])
        if "token_id" in columns:
            counts["ids"] = _by_id(columns["token_id"], sets)
        return cls(counts)


class TokenSets:
    """Sets of tokens as one number per token: the combination of sets that contain it.

    A histogram of that number holds every size and overlap, so the tokens are read once, however many sets there are.
    """

    def __init__(self, sets: Sequence[Bool[Tensor, " n"]]) -> None:
        self._sets = sets
        num = len(sets)
        if num <= _MAX_BITS:
            dtype = torch.uint8 if num <= 8 else torch.int32
            self._combination = torch.zeros(len(sets[0]), dtype=dtype)
            for bit, flags in enumerate(sets):
                self._combination |= flags.to(dtype) << bit
            members = torch.arange(2**num) >> torch.arange(num).unsqueeze(1) & 1
        else:
            members, self._combination = torch.stack(list(sets)).unique(dim=1, return_inverse=True)
        self._combination = self._combination.int()
        self._members = members.double()  # exact up to 2^53 tokens, and faster to multiply than integers

    def overlaps(self) -> Int[Tensor, "s s"]:
        """Returns the number of tokens in both sets of each pair. The diagonal holds the sizes."""
        sizes = torch.bincount(self._combination, minlength=self._members.shape[1])
        return ((self._members * sizes) @ self._members.T).long()

    def by_bin(self, place: Int[Tensor, " n"], num_bins: int) -> Int[Tensor, "s b"]:
        """Returns the number of tokens of each set in each bin, from the bin of each token."""
        num = self._members.shape[1]
        if num * num_bins > max(len(place), 2**16):  # many bins, as for token ids: one histogram per set
            places = [place.index_select(0, flags.nonzero().squeeze(1)) for flags in self._sets]
            return torch.stack([torch.bincount(x, minlength=num_bins) for x in places])
        joint = torch.bincount(place.int() * num + self._combination, minlength=num_bins * num)
        return (self._members @ joint.view(num_bins, num).double().T).long()


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
    if "sampler_version" not in columns:
        return columns["update"]
    return (columns["step"] - columns["sampler_version"]).clamp(min=0) + columns["update"]


def _places(piece: Piece) -> dict[str, Int[Tensor, " n"]]:
    """Returns the bin index of each token, by kind of bin."""
    columns = piece.columns
    places = {
        "position": _place_of_whole(columns["position"], POSITION_EDGES),
        "age": _place_of_whole(age(columns), STALENESS_EDGES),
        "advantage": (columns["advantage"] >= 0).int(),
    }
    logp = columns.get("behavior_logp", columns.get("proximal_logp"))
    if logp is not None:
        probability, place = logp.double().exp(), torch.zeros(len(piece), dtype=torch.uint8)
        for edge in PROBABILITY_EDGES:
            place += (probability >= edge).view(torch.uint8)
        places["probability"] = place.int()
    return places


def _place_of_whole(x: Int[Tensor, " n"], edges: Sequence[float]) -> Int[Tensor, " n"]:
    """Returns the bin index of whole numbers, by a table that reaches to the last edge."""
    return _table(edges).index_select(0, x.clamp(0, int(edges[-1])))


@cache
def _table(edges: Sequence[float]) -> Int[Tensor, " t"]:
    whole = torch.arange(int(edges[-1]) + 1, dtype=torch.float64)
    return torch.bucketize(whole, torch.tensor(edges, dtype=torch.float64), right=True).int()


def _of_arm(verdict: RegionVerdict | None, signed: Bool[Tensor, " n"], stopped: int) -> list[int]:
    if verdict is None:
        return [0] * len(PER_ARM)
    exact = verdict.may_mask is verdict.masked
    measured = _size(verdict.measured)
    outside, inside = map(_size, verdict.certified) if verdict.certified else (0, 0)
    columns = {
        "rows": len(signed), "measured": measured, "signed": _size(verdict.measured & signed), "stopped": stopped,
        "stopped_at_most": stopped if exact else _size(verdict.may_mask & signed),
        "certifiable": measured if verdict.certified else 0, "outside": outside, "inside": inside,
    }  # fmt: skip
    return [columns[name] for name in PER_ARM]


def _size(tokens: Bool[Tensor, " n"]) -> int:
    return int(torch.count_nonzero(tokens))


def _pairs(overlaps: Int[Tensor, "s s"], there: Bool[Tensor, " r"]) -> Int[Tensor, "3 r r"]:
    """Counts, for each pair of regions with a verdict: all tokens, those the first masks, and those both mask."""
    both_there = there.unsqueeze(1) & there
    each = overlaps.diagonal()[1:].unsqueeze(1)
    return torch.stack([overlaps[0, 0] * both_there, each * both_there, overlaps[1:, 1:]])


def _by_id(ids: Int[Tensor, " n"], sets: TokenSets) -> Int[Tensor, "r v"]:
    """Counts how often each id occurs with A ≠ 0, then how often each region masks it."""
    low, high = ids.aminmax()
    if low < 0 or high >= MAX_IDS:
        known = (ids >= 0) & (ids < MAX_IDS)
        high = ids.where(known, 0).max()
        ids = ids.where(known, _width(high))
    width = _width(high)
    return sets.by_bin(ids, width + 1)[:, :width]


def _width(largest_id: Tensor) -> int:
    return 1 << max(int(largest_id), 1).bit_length()


def _reproduced(piece: Piece, replay: Replay) -> Int[Tensor, "4"]:
    """Counts where a replay of the recorded region differs from the records; zeros if it cannot be replayed."""
    again = None if replay.recorded is None else replay.verdict(replay.recorded)
    if again is None:
        return torch.zeros(len(REPRODUCED), dtype=torch.int64)
    kept, num = piece.columns["kept"], len(piece)
    differs = _size(again.masked & kept) + _size(~(kept | again.may_mask))
    if again.weight is None:
        return torch.tensor([num, differs, 0, 0])
    weight, now = piece.columns["weight"], again.weight().float()
    other = weight != now
    if other.any():
        other &= ~(weight.isnan() & now.isnan())
    return torch.tensor([num, differs, num, _size(other)])
