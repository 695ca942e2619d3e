"""Registration of the third edition: 14 kinds of fault on stock TRL and stock verl, and healthy runs.

    python studies/06-fault-found/faults.py    # prints the table of the page

Each kind has three strengths. TRL makes two runs at each, verl one at the weakest and one at the strongest. Seeds and
settings that are no fault follow from the number of the run alone. Written before any of these runs; the rules of
`trustrl explain` were committed before that. `nan`, `None` and `inf` come from the reward function.
"""

import random
from dataclasses import dataclass

from seeded_runs import BF16, FP32, PLAIN, RUNS, TIED, Seeded, rate, seed_of as seed_of_second, updates

FIRST_SEED = 7000
"""Seeds that no pilot and no earlier run used."""

ON_TRL, ON_VERL, HEALTHY_RUNS = 6, 2, 30
STRENGTHS = 3


@dataclass(frozen=True)
class Kind:
    """One kind of fault."""

    name: str
    causes: tuple[str, ...]
    """Names of `trustrl explain` that are right. Two, if both name the same file to repair."""

    strengths: tuple[dict, ...] = ({}, {}, {})
    """The fault in the sampler, the reward or the data, weakest first."""

    settings: tuple[tuple[str, ...], ...] = ((), (), ())
    """Settings of each strength, if they are the fault."""

    needs: tuple[str, ...] = (PLAIN,)
    """Settings without which the fault cannot occur. Faults of the sampler need vLLM."""


def of(name: str, *values: float) -> tuple[dict, ...]:
    """Returns one fault at each value."""
    return tuple({name: value} for value in values)


def limit(tokens: int, *more: str) -> tuple[str, ...]:
    return f"schedule.max_completion_tokens={tokens}", *more


def often(count: int) -> tuple[str, ...]:
    """Returns updates on each batch, at three times the learning rate of the other runs."""
    return updates(count), rate(1e-3)


VLLM = (FP32,)
REWARD_FUNCTION = ("lost rewards", "non-finite values")
RATES = tuple((rate(value),) for value in (3e-3, 1e-2, 3e-2))
CONSTANT = tuple({"reward": "constant", "after": share} for share in (0.6, 0.25, 0.0))
FASTER = (updates(1), rate(1e-3))
LIMITS = (limit(2), limit(1), limit(1, "mask_truncated_completions=1"))

KINDS = (
    Kind("weights that are not synced", ("stale weights",), of("synced_every", 8, 4, 0), needs=VLLM),
    Kind("another temperature", ("wrong temperature",), of("temperature", 1.1, 0.8, 1.4), needs=VLLM),
    Kind("top-p in the sampler", ("truncated support",), of("top_p", 0.98, 0.9, 0.8), needs=VLLM),
    Kind("a tied head left behind", ("tied head not synced",), of("head_noise", 0.08, 0.15, 0.3), needs=(*VLLM, TIED)),
    Kind("special tokens added twice", ("wrong chat template",), of("extra_tokens", 1, 2, 4), needs=VLLM),
    Kind("infinite rewards", ("non-finite values",), of("inf_share", 0.002, 0.01, 0.05)),
    Kind("NaN rewards", REWARD_FUNCTION, of("nan_share", 0.02, 0.1, 0.3)),
    Kind("a verifier that times out", REWARD_FUNCTION, of("none_every", 8, 4, 2)),
    Kind("few different problems", ("duplicated data",), of("problems", 8, 4, 2)),
    Kind("a large learning rate", ("learning rate too large",), settings=RATES),
    Kind("many updates per batch", ("too many updates per batch",), settings=(often(12), often(16), often(24))),
    Kind("a constant reward", ("no learning signal",), CONSTANT),
    Kind("a short length limit", ("completions cut off",), settings=LIMITS),
    Kind("a verifier that pays for zeros", ("entropy collapse",), of("zeros", 0.7, 0.8, 0.88), (FASTER,) * STRENGTHS),
)
"""Kinds in the order of the seeds."""


@dataclass(frozen=True)
class Fault(Seeded):
    """One registered run. `cause` is the kind, or None."""

    causes: tuple[str, ...] = ()
    strength: int = 0
    """1 is the weakest. 0 for a healthy run."""


def _faulty(kind: Kind, engine: str, strength: int, draw: random.Random) -> Fault:
    own = kind.settings[strength]
    count = draw.choice((1, 2))
    # A tied head needs the tied model; verl's sampler computes in the trainer's precision.
    free = [TIED] * (draw.random() < 0.5 and TIED not in kind.needs)
    free += [] if any("updates_per_batch" in one for one in own) else [updates(count)]
    needs = kind.needs if engine == "stock trl" else tuple(one for one in kind.needs if one == TIED)
    if FP32 in needs and draw.random() < 0.5:
        needs = tuple(BF16 if one == FP32 else one for one in needs)
    return Fault(
        engine, (*needs, *free, *own), kind.name, kind.strengths[strength], causes=kind.causes, strength=strength + 1
    )


def _healthy(draw: random.Random) -> Fault:
    settings = [draw.choice((PLAIN, PLAIN, FP32, BF16)), updates(draw.choice((1, 2, 4)))]
    settings += [TIED] * (draw.random() < 0.5)
    settings += [rate(draw.choice((1e-4, 3e-4)))] + ["sampler.temperature=0.9"] * (draw.random() < 0.25)
    return Fault("stock trl", tuple(settings))


def _registered() -> dict[str, Fault]:
    runs: dict[str, Fault] = {}
    for place, kind in enumerate(KINDS, 1):
        for number in range(ON_TRL):
            draw = random.Random(FIRST_SEED + len(runs))
            runs[f"trl-{place:02}-{number + 1}"] = _faulty(kind, "stock trl", number % STRENGTHS, draw)
    for number in range(HEALTHY_RUNS):
        runs[f"trl-healthy-{number + 1:02}"] = _healthy(random.Random(FIRST_SEED + len(runs)))
    for place, kind in enumerate(KINDS, 1):
        for number in range(ON_VERL):
            draw = random.Random(FIRST_SEED + len(runs))
            runs[f"verl-{place:02}-{number + 1}"] = _faulty(kind, "stock verl", 2 * number, draw)
    return runs


FAULTS = _registered()
"""Registered runs by name, in the order of the seeds."""


ORDER = sorted(FAULTS, key=lambda name: (int(name.rpartition("-")[2]) % (ON_TRL if "healthy" in name else 99), name))
"""Order in which runs are made: one of each kind and five healthy ones, then the next, so that a part is balanced."""

ALL = RUNS | FAULTS
"""Runs of this edition and of the second one, whose names differ."""


def seed_of(name: str) -> int:
    return FIRST_SEED + list(FAULTS).index(name) if name in FAULTS else seed_of_second(name)


def table() -> str:
    """Returns the kinds with their strengths and the answers that count as right."""
    lines = ["| | kind | weak | middle | strong | right answer |", "|---|---|---|---|---|---|"]
    for place, kind in enumerate(KINDS, 1):
        cells = [
            ", ".join(
                [f"{key} {value}" for key, value in fault.items()] + [one.partition(".")[2] or one for one in own]
            )
            for fault, own in zip(kind.strengths, kind.settings, strict=True)
        ]
        lines.append(f"| {place} | {kind.name} | {' | '.join(cells)} | {' or '.join(kind.causes)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
