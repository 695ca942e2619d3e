"""The corpus of bad inputs: each case changes a healthy batch and states the one outcome that is right.

A case applies to the presets whose region reads the changed field. For every other preset the change must go unnoticed.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch

from trustrl import preset
from trustrl.errors import MissingDataError, RecordError

BAD = ((1, 3), (2, 5))
"""The tokens that cases change: in the loss, advantage of either sign."""

MASKED = (0, 1)
"""A token outside the loss."""

Raw = dict[str, torch.Tensor]

needs_of = cache(lambda name: preset(name).needs())


def bad_tokens(raw: Raw) -> torch.Tensor:
    """Returns the mask of the tokens in `BAD`."""
    found = torch.zeros_like(raw["in_loss"])
    for at in BAD:
        found[at] = True
    return found


@dataclass(frozen=True)
class Raises:
    """The loss raises this error."""

    error: type[Exception]


@dataclass(frozen=True)
class Dropped:
    """The tokens leave the loss as if they were outside it, and this fault is counted for each of them."""

    fault: str
    tokens: Callable[[Raw], torch.Tensor] = bad_tokens


@dataclass(frozen=True)
class Rounded:
    """The result is that of the same batch in float64, and these faults are counted, by preset.

    A token whose term leaves float32 counts as an overflow, and has no gradient.
    """

    counted: Callable[[str], dict[str, int]] = lambda name: {}


@dataclass(frozen=True)
class Same:
    """Nothing is counted, and the result is that of the healthy batch after this change, none by default."""

    after: Callable[[Raw], None] = lambda raw: None


@dataclass(frozen=True)
class SameInFloat64:
    """Nothing is counted, and the result is that of the changed batch in float64."""


Outcome = Raises | Dropped | Rounded | Same | SameInFloat64


@dataclass(frozen=True)
class BadInput:
    """One case."""

    name: str
    change: Callable[[Raw], None]
    outcome: Outcome
    reads: str
    """The field that a region must read for the outcome to apply."""

    presets: Callable[[str], bool]
    """The presets that the case is made for."""

    def is_read_by(self, name: str) -> bool:
        """Returns whether the preset's region reads the changed field."""
        needs = needs_of(name)
        return {
            "always": True,
            "behavior": "behavior" in needs.anchors,
            "proximal": "proximal" in needs.anchors,
            "topk": needs.topk > 0,
            "full": needs.full,
            "support": needs.full or needs.topk > 0,
            "sequences": needs.sequences or needs.reduction is not None,
        }[self.reads]


CASES: list[BadInput] = []


def case(name, outcome, reads="always", presets=lambda name: True):
    def add(change):
        CASES.append(BadInput(name, change, outcome, reads, presets))
        return change

    return add


def reads_topk(name):
    return needs_of(name).topk > 0


def put(field, value, where=BAD):
    def change(raw):
        raw[field] = raw[field].clone()
        for at in where:
            raw[field][at] = value

    return change


NAN, INF = torch.nan, torch.inf


def certain_columns(name):
    """Certainty contradicts the sampled token's own column, and leaves no mass for the other columns of a top-K."""
    if reads_topk(name):
        return {"mass": 2, "column": 2}
    return {"column": 2} if needs_of(name).full else {}


def impossible_columns(name):
    """Such a log-prob contradicts the sampled token's own column."""
    return {"column": 2} if reads_topk(name) or needs_of(name).full else {}


CAPPED = {
    "cispo", "tis", "tis-product", "score-centering", "dppo-binary-tv-scaling", "dppo-binary-kl-scaling",
    "dppo-topk-tv-scaling", "dppo-topk-kl-scaling", "dppo-binary-tv-capped",
    "dppo-topk-tv-capped",
}  # fmt: skip
"""Presets that cap the weight or have none, which therefore never overflows."""

MASKED_FIRST = {
    "dis",
    "divergence-gate",
    "flash-reinforce",
    "icepop",
    "kpop",
    "mis",
    "mis-product",
    "sapo",
    "trm-sampled",
    "vespo",
}
"""Presets that mask both tokens of a vanishing μ, or weigh them with 0, before a weight overflows."""

MASKED_IF_RISING = {"dppo-binary-kl", "dppo-topk-kl", "m2po", "opsm", "ppo", "trm"}
"""Presets that mask the first of them, whose advantage is positive; the second overflows."""


def vanishing_behavior(**in_sequences):
    """`in_sequences`: tokens of sequences whose mean ratio overflows, by preset; a mean hides a smaller excess."""

    def counted(name):
        if name in ("gmpo", "gspo"):
            return {"overflow": in_sequences[name]} if in_sequences else {}
        if name in CAPPED | MASKED_FIRST:
            return {}
        return {"overflow": 1 if name in MASKED_IF_RISING else 2}

    return counted


def vanishing_proximal(name):
    return {"overflow": 2} if name == "troll" else {}


def impossible_proximal(name):
    found = {
        "troll": 2, "troll-gspo": 14, "dppo-decoupled": 2, "icepop": 1, "mis": 1, "tis": 1, "divergence-gate": 1,
        "mis-product": 1, "tis-product": 1,
    }  # fmt: skip
    return {"overflow": found[name]} if name in found else {}


COUNTED = {
    "policy": (certain_columns, impossible_columns, impossible_columns),
    "behavior": (lambda name: {}, vanishing_behavior(), vanishing_behavior(gmpo=7, gspo=8)),
    "proximal": (lambda name: {}, vanishing_proximal, impossible_proximal),
}
"""What is counted where a log-prob is about 0, −100 or −200, and −1e30."""

for name, (about_0, about_100, about_1e30) in COUNTED.items():
    reads = "always" if name == "policy" else name
    for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF), ("a log-prob of +0.5", 0.5)):
        case(f"{name}: {label} at tokens in the loss", Dropped(name), reads)(put(name, value))
    for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF)):
        case(f"{name}: {label} outside the loss", Same())(put(name, value, [MASKED]))
    case(f"{name}: log-prob −0.0 is certainty", Rounded(about_0), reads)(put(name, -0.0))
    case(f"{name}: a subnormal log-prob", Rounded(about_0), reads)(put(name, -1e-40))
    case(f"{name}: +1e-4, rounding above certainty", Rounded(about_0), reads)(put(name, 1e-4))
    case(f"{name}: log-prob −100", Rounded(about_100), reads)(put(name, -100.0))
    case(f"{name}: log-prob −200", Rounded(about_100), reads)(put(name, -200.0))
    case(f"{name}: log-prob −1e30", Rounded(about_1e30), reads)(put(name, -1e30))

for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF)):
    case(f"advantage: {label} at tokens in the loss", Dropped("advantage"))(put("advantage", value))
    case(f"advantage: {label} outside the loss", Same())(put("advantage", value, [MASKED]))
for value in (1e30, -1e30, 1e-42, -0.0):
    case(f"advantage: {value}", Rounded())(put("advantage", value))
case("advantage: 1e+38", Rounded(lambda name: {"overflow": 2}))(put("advantage", 1e38))


def put_column(field, value, column=2):
    def change(raw):
        raw[field] = raw[field].clone()
        for at in BAD:
            raw[field][(*at, column)] = value

    return change


for side, field_name in (("anchor", "topk_logp"), ("policy", "policy_topk")):
    for label, value in (("NaN", NAN), ("+inf", INF), ("+0.5", 0.5)):
        case(f"top-K of the {side}: {label} in a column", Dropped("support"), "topk")(put_column(field_name, value))
for side, field_name in (("anchor", "full_anchor"), ("policy", "full_policy")):
    for label, value in (("NaN", NAN), ("+inf", INF), ("+0.5", 0.5)):
        case(f"vocabulary of the {side}: {label} in a column", Dropped("support"), "full")(
            put_column(field_name, value)
        )
case("top-K of the policy: −inf in a column", Rounded(), "topk")(put_column("policy_topk", -INF))
case("top-K: the anchor's −inf is no cell", Same(put_column("topk_ids", -1)), "topk")(put_column("topk_logp", -INF))


def repeat_a_column(raw):
    raw["topk_ids"], raw["topk_logp"], raw["policy_topk"] = (
        torch.cat([raw[name], raw[name][..., :1]], -1) for name in ("topk_ids", "topk_logp", "policy_topk")
    )


case("top-K: a duplicate id counts once", Same(), "topk")(repeat_a_column)


def shuffle_columns(raw):
    order = torch.randperm(raw["topk_ids"].shape[-1], generator=torch.Generator().manual_seed(0))
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., order]


case("top-K: columns in any order", Same(), "topk")(shuffle_columns)


def empty_columns(raw):
    raw["topk_ids"] = torch.full_like(raw["topk_ids"], -1)


def empty_and_broken_columns(raw):
    empty_columns(raw)
    raw["topk_logp"] = torch.full_like(raw["topk_logp"], NAN)


case("top-K: values of empty columns are not read", Same(empty_columns), "topk")(empty_and_broken_columns)


def sampled_outside(raw):
    """A token id that is in no column (and, for a full vocabulary, stays in range)."""
    raw["tokens"] = raw["tokens"].clone()
    for at in BAD:
        raw["topk_ids"][at] = torch.where(raw["topk_ids"][at] == raw["tokens"][at], 10_000, raw["topk_ids"][at])


def may_end_early(name):
    """TROLL and score centering ask for so many columns that a recorder may stop before."""
    return needs_of(name).tail_mass > 0


def mass_of_many(name):
    """Many columns hold nearly all mass here, and the sampled token's comes on top."""
    return {"mass": 2} if may_end_early(name) else {}


case("top-K: the sampled token outside of it", Rounded(mass_of_many), "topk")(sampled_outside)


def first_column_only(raw):
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., :1]


def no_columns(raw):
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., :0]


case("top-K: K below the region's k", Raises(RecordError), "topk", lambda name: not may_end_early(name))(
    first_column_only
)
# A recorder may stop early for the region's tail mass; this one stopped too early.
case("top-K: K below a k with a tail mass", Dropped("narrow", lambda raw: raw["in_loss"]), "topk", may_end_early)(
    first_column_only
)
case("top-K: K = 0", Raises(RecordError))(no_columns)
case("top-K: other ids than the policy's columns", Raises(RecordError))(
    lambda raw: raw.update(policy_topk=raw["policy_topk"][..., :-1])
)
case("top-K: float ids", Raises(RecordError))(lambda raw: raw.update(topk_ids=raw["topk_ids"].float()))
case("top-K: of the other anchor", Raises(MissingDataError), "topk")(lambda raw: raw.update(topk_of=None))
case("top-K: missing", Raises(MissingDataError), "topk")(lambda raw: raw.update(topk_ids=None))
case("top-K: the policy's side missing", Raises(MissingDataError), "topk")(lambda raw: raw.update(policy_topk=None))
case("vocabulary: missing", Raises(MissingDataError), "full")(lambda raw: raw.update(full_anchor=None))
case("vocabulary: the policy's side missing", Raises(MissingDataError), "full")(
    lambda raw: raw.update(full_policy=None)
)
case("vocabulary: sizes differ", Raises(RecordError))(lambda raw: raw.update(full_policy=raw["full_policy"][..., :-1]))
case("token id −1 at tokens in the loss", Dropped("support"), "support")(put("tokens", -1))
case("token id beyond the vocabulary", Dropped("support"), "full", presets=lambda name: not reads_topk(name))(
    put("tokens", 10_000)
)
# Where the columns already hold the sampled token's mass, its log-prob would count twice.
case("token id in no column", Rounded(mass_of_many), "topk", reads_topk)(put("tokens", 10_000))


def lift_other_columns(field):
    """Columns other than the sampled token's that sum to 20 while none exceeds 1."""

    def change(raw):
        raw[field] = raw[field].clone()
        for at in BAD:
            others = raw["topk_ids"][at] != raw["tokens"][at]
            raw[field][at] = torch.where(others, -1e-3, raw[field][at])

    return change


for side, field_name in (("anchor", "topk_logp"), ("policy", "policy_topk")):
    case(f"top-K of the {side}: columns sum to more than 1", Dropped("mass"), "topk")(lift_other_columns(field_name))
case("token ids missing", Raises(MissingDataError), "support")(lambda raw: raw.update(tokens=None))
case("token ids as floats", Raises(RecordError))(lambda raw: raw.update(tokens=raw["tokens"].float()))
case("behavior log-probs missing", Raises(MissingDataError), "behavior")(lambda raw: raw.update(behavior=None))
case("proximal log-probs missing", Raises(MissingDataError), "proximal")(lambda raw: raw.update(proximal=None))

for name in ("behavior", "proximal", "policy"):
    case(f"{name}: one token short", Raises(RecordError))(lambda raw, name=name: raw.update({name: raw[name][:, :-1]}))
    case(f"{name}: integers", Raises(RecordError))(lambda raw, name=name: raw.update({name: raw[name].long()}))
    case(f"{name}: on another device", Raises(RecordError))(
        lambda raw, name=name: raw.update({name: raw[name].to("meta")})
    )
    case(f"{name}: in float64 beside float32", SameInFloat64())(
        lambda raw, name=name: raw.update({name: raw[name].double()})
    )
case("policy: a list", Raises(RecordError))(lambda raw: raw.update(policy=[0.0]))
case("advantage: one per column", Raises(RecordError))(lambda raw: raw.update(advantage=raw["advantage"][0]))
case("advantage: integers", Raises(RecordError))(lambda raw: raw.update(advantage=raw["advantage"].long()))
case("advantage: on another device", Raises(RecordError))(lambda raw: raw.update(advantage=raw["advantage"].to("meta")))
case("mask: integers", Raises(RecordError))(lambda raw: raw.update(in_loss=raw["in_loss"].long()))
case("mask: floats", Raises(RecordError))(lambda raw: raw.update(in_loss=raw["in_loss"].float()))
case("mask: three axes", Raises(RecordError))(lambda raw: raw.update(in_loss=raw["in_loss"].unsqueeze(-1)))
case("version: floats", Raises(RecordError))(lambda raw: raw.update(version=raw["behavior"]))
case("versions mixed", Same())(
    lambda raw: raw.update(version=torch.arange(raw["in_loss"].numel()).reshape(raw["in_loss"].shape) % 7)
)
case("versions from the future", Same())(lambda raw: raw.update(version=torch.full(raw["in_loss"].shape, 99)))


def one_row_masked(raw):
    raw["in_loss"] = raw["in_loss"].clone()
    raw["in_loss"][1] = False


def drop_row(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x[[0, 2, 3]]


case("one row masked is one row less", Same(drop_row))(one_row_masked)
case("all masked", SameInFloat64())(lambda raw: raw.update(in_loss=torch.zeros_like(raw["in_loss"])))


def keep(rows, width):
    def change(raw):
        for name, x in raw.items():
            if isinstance(x, torch.Tensor):
                raw[name] = x[:rows, :width]

    return change


case("no sequences: B = 0", SameInFloat64())(keep(0, None))
case("no tokens: T = 0", SameInFloat64())(keep(None, 0))
case("one token each: T = 1", SameInFloat64())(keep(None, 1))
case("one sequence of one token", SameInFloat64())(keep(1, 1))
case("zero standard deviation: every advantage 0", SameInFloat64())(
    lambda raw: raw.update(advantage=torch.zeros_like(raw["advantage"]))
)


def group_of_one(raw):
    """(r − mean)/std of a single reward is 0/0."""
    raw["advantage"] = raw["advantage"].clone()
    raw["advantage"][1] = NAN


def row_of_one(raw):
    tokens = torch.zeros_like(raw["in_loss"])
    tokens[1] = raw["in_loss"][1]
    return tokens


case("a group of one: its row of NaN advantages", Dropped("advantage", row_of_one))(group_of_one)


def not_contiguous(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x.transpose(0, 1).contiguous().transpose(0, 1)


case("tensors that are not contiguous", Same())(not_contiguous)
case("gradients wanted on the behavior side", Same())(lambda raw: raw["behavior"].requires_grad_())
case("gradients wanted on the advantage", Same())(lambda raw: raw["advantage"].requires_grad_())


def packed_without_sequences(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x.reshape(-1, *x.shape[2:])


case("packed tokens without sequence ids", Raises(MissingDataError), "sequences")(packed_without_sequences)
