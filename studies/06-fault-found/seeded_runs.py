"""Runs that evaluate `trustrl explain`, second edition: the list. `seeded.py` makes them.

One fault each in the real sampler, reward or optimizer, and healthy runs; TRL and verl; with a region through
`trustrl run`, and stock: TRL's own trainer and loss, of which only `trainer_state.json` is read, and verl's own loss,
of which its log file is read. Kinds, severities and seeds were written down before any of these runs, and the rules of
`trustrl explain` before that.
"""

from dataclasses import dataclass, field
from typing import Any

STALE, HOT, CUT, HEAD, NAN, RATE, SIGNAL, SHORT = (
    "stale weights",
    "wrong temperature",
    "truncated support",
    "tied head not synced",
    "non-finite values",
    "learning rate too large",
    "no learning signal",
    "completions cut off",
)
FP32, BF16 = "sampler.dtype=float32", "sampler.dtype=bfloat16"
PLAIN = "sampler.kind=transformers"
RECORDS = "records.sample=0.5"

FIRST_SEED = 1900
"""Seeds that no earlier run used."""


@dataclass(frozen=True)
class Seeded:
    """One run."""

    engine: str
    """ "trl", "verl", "stock trl" or "stock verl"."""

    settings: tuple[str, ...] = ()
    """Changes of the recipe. Stock runs read the same names."""

    cause: str | None = None
    """The cause that `trustrl explain` should name; None for a healthy run."""

    fault: dict[str, Any] = field(default_factory=dict)
    """The fault in the sampler or the reward. Empty if the settings are the fault."""


def trl(*settings: str, **more: Any) -> Seeded:
    return Seeded("trl", settings, **more)


def stock_trl(*settings: str, **more: Any) -> Seeded:
    return Seeded("stock trl", settings, **more)


def verl(*settings: str, **more: Any) -> Seeded:
    return Seeded("verl", settings, **more)


def stock_verl(*settings: str, **more: Any) -> Seeded:
    return Seeded("stock verl", settings, **more)


def updates(count: int) -> str:
    return f"schedule.updates_per_batch={count}"


def region(name: str) -> str:
    return f"region.preset={name}"


def rate(value: float) -> str:
    return f"optimiser.learning_rate={value:g}"


TIED = "model.name=tiny-tied"
SHORTER = "schedule.max_completion_tokens=2"

RUNS = {
    "trl-stale-1": trl(FP32, RECORDS, cause=STALE, fault={"synced_every": 0}),
    "trl-stale-2": trl(TIED, BF16, region("ppo"), cause=STALE, fault={"synced_every": 6}),
    "trl-temperature-1": trl(BF16, RECORDS, cause=HOT, fault={"temperature": 1.15}),
    "trl-temperature-2": trl(TIED, FP32, updates(4), cause=HOT, fault={"temperature": 0.85}),
    "trl-top-p-1": trl(FP32, region("cispo"), cause=CUT, fault={"top_p": 0.95}),
    "trl-top-p-2": trl(TIED, BF16, RECORDS, cause=CUT, fault={"top_p": 0.85}),
    "trl-head-1": trl(TIED, FP32, cause=HEAD, fault={"head_noise": 0.08}),
    "trl-head-2": trl(TIED, BF16, RECORDS, cause=HEAD, fault={"head_noise": 0.3}),
    "trl-nan-1": trl(BF16, cause=NAN, fault={"nan_share": 0.02}),
    "trl-nan-2": trl(PLAIN, TIED, updates(4), cause=NAN, fault={"nan_step": 20}),
    "trl-rate-1": trl(PLAIN, updates(4), rate(4e-3), cause=RATE),
    "trl-rate-2": trl(TIED, FP32, updates(1), rate(1e-2), cause=RATE),
    "trl-signal-1": trl(PLAIN, RECORDS, cause=SIGNAL, fault={"reward": "constant"}),
    "trl-signal-2": trl(TIED, BF16, cause=SIGNAL, fault={"reward": "constant", "from_step": 24}),
    "trl-short-1": trl(PLAIN, SHORTER, cause=SHORT),
    "trl-short-2": trl(TIED, BF16, SHORTER, updates(4), cause=SHORT),
    "trl-healthy-1": trl(BF16, RECORDS),
    "trl-healthy-2": trl(PLAIN, TIED, region("troll"), updates(4)),
    "trl-healthy-3": trl(FP32, region("ppo"), RECORDS),
    "trl-healthy-4": trl(TIED, BF16, region("cispo"), updates(1), "sampler.temperature=0.9"),
    "stock-trl-stale": stock_trl(FP32, cause=STALE, fault={"synced_every": 0}),
    "stock-trl-temperature": stock_trl(TIED, FP32, cause=HOT, fault={"temperature": 1.25}),
    "stock-trl-top-p": stock_trl(BF16, cause=CUT, fault={"top_p": 0.9}),
    "stock-trl-nan": stock_trl(PLAIN, cause=NAN, fault={"nan_share": 0.05}),
    "stock-trl-rate": stock_trl(PLAIN, updates(4), rate(5e-3), cause=RATE),
    "stock-trl-signal": stock_trl(PLAIN, TIED, cause=SIGNAL, fault={"reward": "constant"}),
    "stock-trl-healthy-1": stock_trl(TIED, BF16),
    "stock-trl-healthy-2": stock_trl(PLAIN, updates(4), "logging_steps=4"),
    "verl-stale": verl(RECORDS, cause=STALE, fault={"synced_every": 0}),
    "verl-temperature": verl(TIED, RECORDS, cause=HOT, fault={"temperature": 1.2}),
    "verl-top-p": verl(cause=CUT, fault={"top_p": 0.9}),
    "verl-head": verl(RECORDS, cause=HEAD, fault={"head_noise": 0.1}),
    "verl-nan": verl(TIED, cause=NAN, fault={"nan_share": 0.02}),
    "verl-rate-1": verl(updates(4), rate(1e-2), cause=RATE),
    "verl-rate-2": verl(TIED, updates(1), rate(1e-2), cause=RATE),
    "verl-signal": verl(cause=SIGNAL, fault={"reward": "constant"}),
    "verl-healthy-1": verl(RECORDS),
    "verl-healthy-2": verl(TIED, region("ppo"), updates(1)),
    "stock-verl-stale": stock_verl(TIED, cause=STALE, fault={"synced_every": 4}),
    "stock-verl-temperature": stock_verl(cause=HOT, fault={"temperature": 0.8}),
    "stock-verl-top-p": stock_verl(TIED, cause=CUT, fault={"top_p": 0.8}),
    "stock-verl-nan": stock_verl(cause=NAN, fault={"nan_share": 0.02}),
    "stock-verl-rate": stock_verl(updates(2), rate(1e-2), cause=RATE),
    "stock-verl-signal": stock_verl(TIED, cause=SIGNAL, fault={"reward": "constant"}),
    "stock-verl-healthy-1": stock_verl(),
    "stock-verl-healthy-2": stock_verl(TIED, updates(1)),
}
"""Runs by name, in the order of the seeds."""


def seed_of(name: str) -> int:
    return FIRST_SEED + list(RUNS).index(name)
