"""The corpus of bad inputs: each case changes a healthy batch, and declares its verdict for a region's needs.

Verdicts, never silence:
  exact    the result is right: that of the batch the case names as equivalent (itself, untouched, by default)
  drop     the changed tokens leave the loss as if they were outside it, and are counted
  bounded  the result is right, or the token is left out and counted because its term leaves float32
  an error class
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from trustrl import MissingDataError, RecordError, preset

BAD = ((1, 3), (2, 5))
"""The tokens that cases change: in the loss, advantage of either sign."""

MASKED = (0, 1)
"""A token outside the loss."""

Raw = dict[str, torch.Tensor]


@dataclass
class BadInput:
    """One case."""

    name: str
    change: Callable[[Raw], None]
    verdict: str | type[Exception] = "exact"
    reads: str = "always"
    """Which field the region must read for the verdict to apply; otherwise the result is exact."""

    fault: str = ""
    """The fault counter of a drop."""

    equivalent: Callable[[Raw], None] | None = None
    only: Callable[[str], bool] = field(default=lambda name: True)
    presets: Callable[[str], bool] = field(default=lambda name: True)
    """The presets that the case is run with."""


CASES: list[BadInput] = []


def case(
    name, verdict="exact", reads="always", fault="", equivalent=None, only=lambda name: True, presets=lambda name: True
):
    def add(change):
        CASES.append(BadInput(name, change, verdict, reads, fault, equivalent, only, presets))
        return change

    return add


def put(field, value, where=BAD):
    def change(raw):
        raw[field] = raw[field].clone()
        for at in where:
            raw[field][at] = value

    return change


NAN, INF = torch.nan, torch.inf

for name, reads in (("policy", "always"), ("behavior", "behavior"), ("proximal", "proximal")):
    for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF), ("a log-prob of +0.5", 0.5)):
        case(f"{name}: {label} at tokens in the loss", "drop", reads, name)(put(name, value))
    for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF)):
        case(f"{name}: {label} outside the loss")(put(name, value, [MASKED]))
    case(f"{name}: log-prob −0.0 is certainty", "bounded", reads)(put(name, -0.0))
    case(f"{name}: a subnormal log-prob", "bounded", reads)(put(name, -1e-40))
    case(f"{name}: +1e-4, rounding above certainty", "bounded", reads)(put(name, 1e-4))
    case(f"{name}: log-prob −100", "bounded", reads)(put(name, -100.0))
    case(f"{name}: log-prob −200", "bounded", reads)(put(name, -200.0))
    case(f"{name}: log-prob −1e30", "bounded", reads)(put(name, -1e30))

for label, value in (("NaN", NAN), ("+inf", INF), ("-inf", -INF)):
    case(f"advantage: {label} at tokens in the loss", "drop", "always", "advantage")(put("advantage", value))
    case(f"advantage: {label} outside the loss")(put("advantage", value, [MASKED]))
for value in (1e30, -1e30, 1e38, 1e-42, -0.0):
    case(f"advantage: {value}", "bounded")(put("advantage", value))


def put_column(field, value, column=2):
    def change(raw):
        raw[field] = raw[field].clone()
        for at in BAD:
            raw[field][(*at, column)] = value

    return change


for side, field_name in (("anchor", "topk_logp"), ("policy", "policy_topk")):
    for label, value in (("NaN", NAN), ("+inf", INF), ("+0.5", 0.5)):
        case(f"top-K of the {side}: {label} in a column", "drop", "topk", "support")(put_column(field_name, value))
for side, field_name in (("anchor", "full_anchor"), ("policy", "full_policy")):
    for label, value in (("NaN", NAN), ("+inf", INF), ("+0.5", 0.5)):
        case(f"vocabulary of the {side}: {label} in a column", "drop", "full", "support")(put_column(field_name, value))
case("top-K of the policy: −inf in a column", "bounded", "topk")(put_column("policy_topk", -INF))
case("top-K: the anchor's −inf is no cell", "exact", "topk", equivalent=put_column("topk_ids", -1))(
    put_column("topk_logp", -INF)
)


def repeat_a_column(raw):
    raw["topk_ids"], raw["topk_logp"], raw["policy_topk"] = (
        torch.cat([raw[name], raw[name][..., :1]], -1) for name in ("topk_ids", "topk_logp", "policy_topk")
    )


case("top-K: a duplicate id counts once", "exact", "topk")(repeat_a_column)


def shuffle_columns(raw):
    order = torch.randperm(raw["topk_ids"].shape[-1], generator=torch.Generator().manual_seed(0))
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., order]


case("top-K: columns in any order", "exact", "topk")(shuffle_columns)


def empty_columns(raw):
    raw["topk_ids"] = torch.full_like(raw["topk_ids"], -1)


def empty_and_broken_columns(raw):
    empty_columns(raw)
    raw["topk_logp"] = torch.full_like(raw["topk_logp"], NAN)


case("top-K: values of empty columns are not read", "exact", "topk", equivalent=empty_columns)(empty_and_broken_columns)


def sampled_outside(raw):
    """A token id that is in no column (and, for a full vocabulary, stays in range)."""
    raw["tokens"] = raw["tokens"].clone()
    for at in BAD:
        raw["topk_ids"][at] = torch.where(raw["topk_ids"][at] == raw["tokens"][at], 10_000, raw["topk_ids"][at])


case("top-K: the sampled token outside of it", "bounded", "topk")(sampled_outside)


def first_column_only(raw):
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., :1]


def no_columns(raw):
    for name in ("topk_ids", "topk_logp", "policy_topk"):
        raw[name] = raw[name][..., :0]


fixed_k = lambda name: name != "troll"  # noqa: E731  (a recorder may stop early for TROLL's tail mass)
case("top-K: K below the region's k", RecordError, "topk", only=fixed_k)(first_column_only)
case("top-K: K = 0", RecordError)(no_columns)
case("top-K: other ids than the policy's columns", RecordError, "topk")(
    lambda raw: raw.update(policy_topk=raw["policy_topk"][..., :-1])
)
case("top-K: float ids", RecordError)(lambda raw: raw.update(topk_ids=raw["topk_ids"].float()))
case("top-K: of the other anchor", MissingDataError, "topk")(lambda raw: raw.update(topk_of=None))
case("top-K: missing", MissingDataError, "topk")(lambda raw: raw.update(topk_ids=None))
case("top-K: the policy's side missing", MissingDataError, "topk")(lambda raw: raw.update(policy_topk=None))
case("vocabulary: missing", MissingDataError, "full")(lambda raw: raw.update(full_anchor=None))
case("vocabulary: the policy's side missing", MissingDataError, "full")(lambda raw: raw.update(full_policy=None))
case("vocabulary: sizes differ", RecordError, "full")(lambda raw: raw.update(full_policy=raw["full_policy"][..., :-1]))
case("token id −1 at tokens in the loss", "drop", "support", "support")(put("tokens", -1))
reads_topk = lambda name: preset(name).needs().topk > 0  # noqa: E731
case("token id beyond the vocabulary", "drop", "full", "support", presets=lambda name: not reads_topk(name))(
    put("tokens", 10_000)
)
# Where the columns already hold the sampled token's mass, its log-prob would count twice.
case("token id in no column", "bounded", "topk", presets=reads_topk)(put("tokens", 10_000))


def lift_other_columns(field):
    """Columns other than the sampled token's that sum to 20 while none exceeds 1."""

    def change(raw):
        raw[field] = raw[field].clone()
        for at in BAD:
            others = raw["topk_ids"][at] != raw["tokens"][at]
            raw[field][at] = torch.where(others, -1e-3, raw[field][at])

    return change


for side, field_name in (("anchor", "topk_logp"), ("policy", "policy_topk")):
    case(f"top-K of the {side}: columns sum to more than 1", "drop", "topk", "mass")(lift_other_columns(field_name))
case("token ids missing", MissingDataError, "support")(lambda raw: raw.update(tokens=None))
case("token ids as floats", RecordError)(lambda raw: raw.update(tokens=raw["tokens"].float()))
case("behavior log-probs missing", MissingDataError, "behavior")(lambda raw: raw.update(behavior=None))
case("proximal log-probs missing", MissingDataError, "proximal")(lambda raw: raw.update(proximal=None))

for name in ("behavior", "proximal", "policy"):
    case(f"{name}: one token short", RecordError)(lambda raw, name=name: raw.update({name: raw[name][:, :-1]}))
    case(f"{name}: integers", RecordError)(lambda raw, name=name: raw.update({name: raw[name].long()}))
    case(f"{name}: on another device", RecordError)(lambda raw, name=name: raw.update({name: raw[name].to("meta")}))
    case(f"{name}: in float64 beside float32")(lambda raw, name=name: raw.update({name: raw[name].double()}))
case("policy: a list", RecordError)(lambda raw: raw.update(policy=[0.0]))
case("advantage: one per column", RecordError)(lambda raw: raw.update(advantage=raw["advantage"][0]))
case("advantage: integers", RecordError)(lambda raw: raw.update(advantage=raw["advantage"].long()))
case("advantage: on another device", RecordError)(lambda raw: raw.update(advantage=raw["advantage"].to("meta")))
case("mask: integers", RecordError)(lambda raw: raw.update(in_loss=raw["in_loss"].long()))
case("mask: floats", RecordError)(lambda raw: raw.update(in_loss=raw["in_loss"].float()))
case("mask: three axes", RecordError)(lambda raw: raw.update(in_loss=raw["in_loss"].unsqueeze(-1)))
case("version: floats", RecordError)(lambda raw: raw.update(version=raw["behavior"]))
case("versions mixed")(
    lambda raw: raw.update(version=torch.arange(raw["in_loss"].numel()).reshape(raw["in_loss"].shape) % 7)
)
case("versions from the future")(lambda raw: raw.update(version=torch.full(raw["in_loss"].shape, 99)))


def one_row_masked(raw):
    raw["in_loss"] = raw["in_loss"].clone()
    raw["in_loss"][1] = False


def drop_row(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x[[0, 2, 3]]


case("one row masked is one row less", equivalent=drop_row)(one_row_masked)
case("all masked")(lambda raw: raw.update(in_loss=torch.zeros_like(raw["in_loss"])))


def keep(rows, width):
    def change(raw):
        for name, x in raw.items():
            if isinstance(x, torch.Tensor):
                raw[name] = x[:rows, :width]

    return change


case("no sequences: B = 0")(keep(0, None))
case("no tokens: T = 0")(keep(None, 0))
case("one token each: T = 1")(keep(None, 1))
case("one sequence of one token")(keep(1, 1))
case("zero standard deviation: every advantage 0")(lambda raw: raw.update(advantage=torch.zeros_like(raw["advantage"])))


def group_of_one(raw):
    """(r − mean)/std of a single reward is 0/0."""
    raw["advantage"] = raw["advantage"].clone()
    raw["advantage"][1] = NAN


case("a group of one: its row of NaN advantages", "drop", "always", "advantage")(group_of_one)


def not_contiguous(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x.transpose(0, 1).contiguous().transpose(0, 1)


case("tensors that are not contiguous")(not_contiguous)
case("gradients wanted on the behavior side")(lambda raw: raw["behavior"].requires_grad_())
case("gradients wanted on the advantage")(lambda raw: raw["advantage"].requires_grad_())


def packed_without_sequences(raw):
    for name, x in raw.items():
        if isinstance(x, torch.Tensor):
            raw[name] = x.reshape(-1, *x.shape[2:])


case("packed tokens without sequence ids", MissingDataError, "sequences")(packed_without_sequences)
