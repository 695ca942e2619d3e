"""The plan of the second study: arms, grids, seeds and stages, and the choice of each arm's setting from tuning runs.

docs/results/registration-2.md registers the plan. Change neither alone.
"""

import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from synonym_training import Run

import trustrl

DATA = Path(__file__).parents[2] / "docs/results/data"
RATES = (1e-3, 1.8e-3, 3.2e-3, 5.6e-3, 1e-2)
FINE_RATES = tuple(round(10 ** (-3 + step / 14), 6) for step in range(15))
"""Learning rates of an arm without a threshold: as many runs over the same range."""


def ratio(low: float) -> dict[str, Any]:
    """Returns a clip that is higher upwards by the published proportion, 0.28 to 0.2."""
    return {"ratio": {"max_decrease": low, "max_increase": round(1.4 * low, 4)}}


PILOT_RATES = (1.8e-3, 3.2e-3, 5.6e-3)
POWER_SETTINGS: dict[str, tuple[float, dict[str, Any]]] = {
    "pg-is": (1.8e-3, {}),
    "ppo": (3.2e-3, ratio(0.6)),
    "dppo-binary-tv": (1.8e-3, {"max_increase": 0.3}),
    "dppo-topk-tv": (3.2e-3, {"max_increase": 0.1}),
    "troll": (1.8e-3, {"bound": 0.1}),
}
"""The best settings of the pilot at 1.8e-3 and 3.2e-3, without TROLL at 3.2e-3, for the paired standard deviation."""

PILOT_THRESHOLDS: dict[str, tuple[dict[str, Any], ...]] = {
    "pg-is": ({},),
    "ppo": tuple(map(ratio, (0.1, 0.2, 0.4, 0.6, 0.8))),
    "dppo-binary-tv": tuple({"max_increase": bound} for bound in (0.02, 0.05, 0.1, 0.15, 0.3)),
    "dppo-topk-tv": tuple({"max_increase": bound} for bound in (0.05, 0.1, 0.15, 0.3, 0.5)),
    "troll": tuple({"bound": bound} for bound in (0.01, 0.05, 0.1, 0.2, 1.0)),
}
"""Values tried in the pilot, from which THRESHOLDS were placed."""

THRESHOLDS: dict[str, tuple[dict[str, Any], ...]] = {
    "pg-is": (),
    "ppo": tuple(map(ratio, (0.2, 0.5, 0.8))),
    "dppo-binary-tv": tuple({"max_increase": bound} for bound in (0.05, 0.15, 0.3)),
    "dppo-topk-tv": tuple({"max_increase": bound} for bound in (0.05, 0.15, 0.3)),
    "troll": tuple({"bound": bound} for bound in (0.05, 0.1, 0.2)),
    "score-centering": (
        {},
        {"weight": {"kind": "tis", "max_ratio": 2.0}},
        {"weight": {"kind": "tis", "max_ratio": 5.0}},
    ),
    "ipo": tuple({"max_increase": bound} for bound in (0.05, 0.15, 0.3)),
}
"""Three values of each arm's threshold. Top-K has K = 20 and TROLL k = 64, as published."""

PRIMARY = ("pg-is", "ppo", "dppo-binary-tv", "dppo-topk-tv", "troll", "score-centering")
"""Arms of the deciding stage. `ipo` is tuned for the question of direction."""

OPTIONAL = "score-centering"
"""The arm that takes part if trustrl has its preset when tuning starts."""

QUESTIONS = (
    ("PPO against no region", "ppo", "pg-is"),
    ("Binary DPPO against PPO", "dppo-binary-tv", "ppo"),
    ("Top-K against Binary", "dppo-topk-tv", "dppo-binary-tv"),
    ("TROLL against the better DPPO", "troll", "better-dppo"),
)
"""The four primary questions. `better-dppo` has the higher mean in the tuning runs, not in the deciding ones."""

SECONDARY = (
    ("Score centering against no region", "score-centering", "pg-is"),
    ("Score centering against PPO", "score-centering", "ppo"),
)
VARIANTS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "ppo-proximal": ("ppo", "ppo", {"anchor": "proximal"}),
    "dppo-binary-tv-proximal": ("dppo-binary-tv", "dppo-binary-tv", {"anchor": "proximal"}),
    "dppo-decoupled": ("dppo-binary-tv", "dppo-decoupled", {}),
    "troll-behavior": ("troll", "troll", {"anchor": "behavior"}),
}
"""Arms of the stage on anchors: the tuned arm they vary, their preset, and what they change."""

ANCHOR_QUESTIONS = (
    ("PPO: π' against μ", "ppo-proximal", "ppo"),
    ("Binary DPPO: π' against μ", "dppo-binary-tv-proximal", "dppo-binary-tv"),
    ("TROLL: μ against π'", "troll-behavior", "troll"),
    ("Decoupled against Binary DPPO", "dppo-decoupled", "dppo-binary-tv"),
    ("Symmetric against signed", "ipo", "dppo-binary-tv"),
)

CAP = 2.0
"""Largest weight π/μ of the capped arms."""

CAPPED = {
    "cispo": ("pg-is", "cispo"),
    "dppo-binary-tv-capped": ("dppo-binary-tv", "dppo-binary-tv"),
    "dppo-topk-tv-capped": ("dppo-topk-tv", "dppo-topk-tv"),
}
"""Arms of the follow-up on weights: the arm that they cap, whose grid they have, and their preset."""

CAP_OTHERS = ("pg-is", "ppo", "dppo-binary-tv", "dppo-topk-tv")
"""Tuned arms that the follow-up runs again, with its own seeds."""

CAP_QUESTIONS = (
    ("A cap alone against no region", "cispo", "pg-is"),
    ("Binary DPPO: a cap against none", "dppo-binary-tv-capped", "dppo-binary-tv"),
    ("Top-K DPPO: a cap against none", "dppo-topk-tv-capped", "dppo-topk-tv"),
    ("Top-K DPPO with a cap against PPO", "dppo-topk-tv-capped", "ppo"),
    ("Top-K DPPO with a cap against a cap alone", "dppo-topk-tv-capped", "cispo"),
)

CAP_SIZES = (2.0, 3.0, 5.0, None)
CAP_SIZE_ARMS = {"dppo-binary-tv": None, "dppo-binary-tv-capped": CAP}
"""Caps of the exploratory stage `cap-size`, and the arms whose settings it takes, with the cap each was tuned with."""

UPDATES, UPDATE_ARMS = (1, 4), ("pg-is", "ppo", "dppo-binary-tv", "troll")
UPDATE_RATES = (1.8e-3, 3.2e-3, 5.6e-3, 1e-2, 1.8e-2, 3.2e-2)
"""Numbers of updates other than 16 of the exploratory stage, its arms, and the learning rates that it tunes."""

PILOT_SEEDS, POWER_SEEDS = range(900, 903), range(930, 942)
FIRST_SEEDS, TUNE_SEEDS = range(2000, 2004), range(2000, 2016)
"""Tuning tries every setting with the first seeds, and the best FINALISTS of each arm with all."""

FINALISTS = 4
DECIDE_SEEDS = range(10000, 10060)
ANCHOR_SEEDS = DECIDE_SEEDS[:40]
"""Variants are run with seeds of the deciding stage, whose runs of the arms that they vary serve both."""

UPDATE_SEEDS = DECIDE_SEEDS[:20]
CAP_SEEDS = range(10100, 10140)
CAP_SIZE_SEEDS = CAP_SEEDS[:20]


PREPARATION = ("pilot", "power")
STAGES = ("tune", "decide", "anchors", "updates-tune", "updates", "cap-tune", "cap", "cap-size")
"""Stages before the registration, and the registered ones, in the order in which they were run."""


def file_of(stage: str) -> Path:
    """Returns the stage's file of results: one JSON object for each run."""
    return DATA / f"evidence2-{stage}.jsonl"


def known(arms: Iterable[str]) -> list[str]:
    """Returns the arms whose preset this version of trustrl has."""
    return [arm for arm in arms if arm in trustrl.presets()]


def preset_of(arm: str) -> str:
    """Returns the preset of an arm."""
    return CAPPED[arm][1] if arm in CAPPED else arm


def grid(arm: str) -> list[tuple[float, dict[str, Any]]]:
    """Returns an arm's 15 settings: learning rate and overrides of its preset."""
    cap = {"max_ratio": CAP} if arm in CAPPED else {}
    thresholds = THRESHOLDS[CAPPED[arm][0] if arm in CAPPED else arm]
    if not thresholds:
        return [(rate, cap) for rate in FINE_RATES]
    return [(rate, {**overrides, **cap}) for rate in RATES for overrides in thresholds]


def label(run: Mapping[str, Any]) -> str:
    """Returns the name of a run's setting, without its seed."""
    return f"{run['preset']} lr={run['lr']:.3g} {json.dumps(run['overrides'], sort_keys=True)}"


def threshold(overrides: Mapping[str, Any]) -> str:
    """Returns a threshold as a page shows it."""
    flat = {key: value for one in overrides.values() if isinstance(one, dict) for key, value in one.items()}
    flat |= {key: value for key, value in overrides.items() if not isinstance(value, dict)}
    return ", ".join(f"`{key}={value}`" for key, value in flat.items() if key != "kind") or "–"


def read(stage: str) -> list[dict[str, Any]]:
    """Returns the stage's finished runs. A last line that an interruption cut off is not one."""
    path = file_of(stage)
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]


def by_setting(runs: Iterable[Mapping[str, Any]], arm: str) -> list[dict[int, float]]:
    """Returns areas by seed for each setting of the arm's grid."""
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for run in runs:
        if run["name"] == arm:
            found[label(run)][run["seed"]] = run["auc"]
    return [found[label({"preset": preset_of(arm), "lr": rate, "overrides": one})] for rate, one in grid(arm)]


def finalists(areas: Sequence[Mapping[int, float]]) -> list[int]:
    """Returns the places in the grid of the settings with the highest means over the first seeds, in grid order.

    Empty until every setting has finished these seeds.
    """
    if any(seed not in one for one in areas for seed in FIRST_SEEDS):
        return []
    means = [statistics.fmean(one[seed] for seed in FIRST_SEEDS) for one in areas]
    return sorted(sorted(range(len(areas)), key=lambda at: -means[at])[:FINALISTS])


def chosen(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """Returns each tuned arm's setting with the highest mean area among its finalists.

    Finalists within one standard error of the best, paired by seed, are a tie. Of these the lowest learning rate is
    chosen, then the tightest threshold, which is the first of the grid.

    Raises:
        ValueError: If an arm has not finished tuning.
    """
    found = {}
    for arm in dict.fromkeys(run["name"] for run in runs):
        areas = by_setting(runs, arm)
        last = finalists(areas)
        if not last or any(seed not in areas[at] for at in last for seed in TUNE_SEEDS):
            raise ValueError(f"{arm} lacks tuning runs. Start its tuning stage again to finish them.")
        means = {at: statistics.fmean(areas[at][seed] for seed in TUNE_SEEDS) for at in last}
        best = max(last, key=means.__getitem__)
        for at in last:
            gaps = [areas[best][seed] - areas[at][seed] for seed in TUNE_SEEDS]
            if means[best] - means[at] <= statistics.stdev(gaps) / len(gaps) ** 0.5:
                rate, overrides = grid(arm)[at]
                found[arm] = {"lr": rate, "overrides": overrides, "mean": means[at], "best": means[best]}
                break
    return found


def plan(stage: str, arms: Iterable[str] | None = None) -> list[Run]:
    """Returns the runs of a stage, seed by seed: an interrupted stage has all arms at equal numbers of seeds.

    Tuning's second round is known once its first has finished.
    """
    if stage == "pilot":
        wanted = known(PILOT_THRESHOLDS if arms is None else arms)
        settings = [(arm, rate, one) for rate in PILOT_RATES for arm in wanted for one in PILOT_THRESHOLDS[arm]]
        return [Run(arm, seed, rate, one) for seed in PILOT_SEEDS for arm, rate, one in settings]
    if stage == "power":
        wanted = known(POWER_SETTINGS if arms is None else arms)
        return [Run(arm, seed, *POWER_SETTINGS[arm]) for seed in POWER_SEEDS for arm in wanted]
    if stage == "tune":
        return plan_tuning(stage, known(THRESHOLDS if arms is None else arms))
    if stage == "cap-tune":
        return plan_tuning(stage, list(CAPPED))
    settings = chosen(read("tune"))
    untuned = set(THRESHOLDS) - set(settings) - {OPTIONAL}
    if untuned:
        raise ValueError(f"No tuning runs of {', '.join(sorted(untuned))}. Run `run.py --stage tune` first.")
    if stage == "decide":
        wanted = [arm for arm in PRIMARY if arm in settings] if arms is None else arms
        return [
            Run(arm, seed, settings[arm]["lr"], settings[arm]["overrides"]) for seed in DECIDE_SEEDS for arm in wanted
        ]
    if stage.startswith("updates"):
        return plan_updates(stage, settings)
    if stage.startswith("cap"):
        settings |= chosen(read("cap-tune"))
        if lacking := {*CAPPED} - {*settings}:
            raise ValueError(f"No tuning runs of {', '.join(sorted(lacking))}. Run `run.py --stage cap-tune` first.")
        if stage == "cap-size":
            return plan_sizes(settings)
        return [
            arm_run(arm, seed, settings[arm]["lr"], settings[arm]["overrides"])
            for seed in CAP_SEEDS
            for arm in (*CAP_OTHERS, *CAPPED)
        ]
    made = [("ipo", settings["ipo"], "ipo", {})]
    made += [(preset, settings[base], name, change) for name, (base, preset, change) in VARIANTS.items()]
    return [
        Run(preset, seed, setting["lr"], {**setting["overrides"], **change}, name=name)
        for seed in ANCHOR_SEEDS
        for preset, setting, name, change in made
    ]


def sized(arm: str, cap: float | None) -> str:
    """Returns the name of an arm's runs with a cap: the arm's own if it was tuned with that cap."""
    return arm if cap == CAP_SIZE_ARMS[arm] else f"{arm}@{cap or 'none'}"


def plan_sizes(settings: Mapping[str, Any]) -> list[Run]:
    """Returns Binary DPPO with every cap, in the setting tuned with a cap and in the one tuned without.

    The two that the stage `cap` has are left out.
    """
    return [
        Run(
            "dppo-binary-tv", seed, settings[arm]["lr"], {**settings[arm]["overrides"], "max_ratio": cap},
            name=sized(arm, cap),
        )
        for seed in CAP_SIZE_SEEDS
        for arm, tuned_with in CAP_SIZE_ARMS.items()
        for cap in CAP_SIZES
        if cap != tuned_with
    ]  # fmt: skip


def arm_run(arm: str, seed: int, rate: float, overrides: dict[str, Any]) -> Run:
    """Returns a run of an arm, which may have another name than its preset."""
    return Run(preset_of(arm), seed, rate, overrides, name=arm)


def plan_tuning(stage: str, arms: Sequence[str]) -> list[Run]:
    """Returns the runs of both rounds of tuning, or of the first if it has not finished."""
    runs = read(stage)
    first = [arm_run(arm, seed, *setting) for seed in FIRST_SEEDS for arm in arms for setting in grid(arm)]
    last = {arm: [grid(arm)[at] for at in finalists(by_setting(runs, arm))] for arm in arms}
    return first + [
        arm_run(arm, seed, *setting) for seed in TUNE_SEEDS[len(FIRST_SEEDS) :] for arm in arms for setting in last[arm]
    ]


def plan_updates(stage: str, settings: Mapping[str, Any]) -> list[Run]:
    """Returns the runs with 1 and 4 updates on a rollout: `updates-tune` for learning rates, `updates` with the best.

    The threshold is that of 16 updates.
    """
    arms = [(arm, updates) for updates in UPDATES for arm in UPDATE_ARMS]

    def run(arm: str, updates: int, rate: float, seed: int) -> Run:
        return Run(arm, seed, rate, settings[arm]["overrides"], updates=updates, name=f"{arm}@{updates}")

    if stage == "updates-tune":
        return [run(*arm, rate, seed) for seed in FIRST_SEEDS for arm in arms for rate in UPDATE_RATES]
    rates = chosen_rates(read("updates-tune"))
    return [run(*arm, rates[f"{arm[0]}@{arm[1]}"], seed) for seed in UPDATE_SEEDS for arm in arms]


def chosen_rates(runs: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the learning rate with the highest mean area for each arm and number of updates.

    Raises:
        ValueError: If a learning rate lacks a seed.
    """
    found: dict[str, dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for run in runs:
        found[run["name"]][run["lr"]].append(run["auc"])
    lacking = [name for name, made in found.items() if {*made} != {*UPDATE_RATES} or {*map(len, made.values())} != {4}]
    if lacking or len(found) != len(UPDATES) * len(UPDATE_ARMS):
        raise ValueError("Tuning is not complete. Run `run.py --stage updates-tune` first.")
    return {name: max(made, key=lambda rate: statistics.fmean(made[rate])) for name, made in found.items()}
