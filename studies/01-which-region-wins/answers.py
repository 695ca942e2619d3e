"""Tables, verdicts and figures of the first study in docs/results, which follow from the comparison's runs.

    python studies/01-which-region-wins/answers.py

A verdict is a rule on numbers: *yes* or *no* if the paired difference in final accuracy has p < 0.05 after Holm's
correction over all differences in the page's table, else *undecided*. The correction was added after the runs.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from collect import DATA
from curves import draw
from findings import Difference, Key, by_seed, differences, family, over_seeds, p_value, rows, runs, steps

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from holm import LEVEL, holm
from pages import fill

RESULTS = Path(__file__).parents[2] / "docs/results"
PAGE, TABLES = RESULTS / "first-study.md", RESULTS / "first-study-tables.md"
TIER_1 = ("pg-is", "ppo", "cispo", "dppo-binary-tv", "dppo-topk-tv", "troll", "drpo", "ipo")
RIVALS = ("dppo-binary-kl", "dppo-topk-kl", "dppo-full-tv", "cppo", "trm", "gspo", "sapo", "spo", "kpop")
"""Published settings, run in `stale` only. `minirl`, `tis`, `icepop` and `mis` equal PPO there: nothing mismatches."""

SETTINGS = ("stale", "mismatch", "both")
SEEDS = range(5)
VARIED = ("stale", "stale-unscaled", "stale-batch-scaled", "stale-llama")
"""Question j: the base setting, two other advantages, and another model family."""

REWARD = "mean_reward"

FAMILIES: dict[str, tuple[Sequence[str], list[tuple[str, str]]]] = {
    "index": (["stale"], [(arm, "ppo") for arm in RIVALS]),
    "a": (SETTINGS, [(arm, "pg-is") for arm in TIER_1[1:]]),
    "b": (SETTINGS, [("dppo-binary-tv", "ppo"), ("dppo-topk-tv", "ppo"), ("dppo-topk-tv", "dppo-binary-tv")]),
    "c": (["both"], [("dppo-binary-tv", "dppo-binary-tv-proximal"), ("troll-behavior", "troll")]),
    "e": (SETTINGS, [("troll", "dppo-binary-tv"), ("troll", "dppo-topk-tv"), ("troll", "ppo")]),
    "f": (("mismatch", "stale-4", "stale", "both"), [("dppo-binary-tv", "ipo")]),
    "g": (["stale"], [("drpo", "drpo-12.5"), ("drpo-12.5", "pg-is"), ("drpo", "ppo")]),
    "j": (VARIED, [("dppo-binary-tv", "ppo"), ("troll", "dppo-binary-tv")]),
}
"""Differences in final accuracy on each page; Holm's correction counts all of them."""


def judged(found: dict[Key, Difference], setting: str, arm: str, other: str) -> str:
    """Returns a sentence that names the better arm, the difference, and whether it exceeds noise."""
    one = found.get((setting, arm, other))
    if one is None:
        return f"{setting}: not run."
    word = {1: "yes", -1: "no, the other way round", 0: "undecided"}[one.sign]
    return (
        f"{setting}: **{word}**, `{arm}` − `{other}` = {one}, p = {one.p:.3f}, with Holm {one.holm:.3f}, "
        f"{one.seeds} seeds."
    )


def verdict_a(found: dict[Key, Difference]) -> str:
    """Returns the verdict on training with a region against training without one."""
    lines = []
    for setting in SETTINGS:
        made = list(runs().get((setting, "pg-is"), {}).values())
        if not made:
            continue
        better = [arm for arm in TIER_1[1:] if found[setting, arm, "pg-is"].sign > 0]
        alone = [
            arm
            for arm in TIER_1[1:]
            if found[setting, arm, "pg-is"].mean > 0 and found[setting, arm, "pg-is"].p < LEVEL
        ]
        fallen = sum(run["collapsed"] for run in made)
        held = {arm: sum(run["collapsed"] for run in runs().get((setting, arm), {}).values()) for arm in TIER_1[1:]}
        word = "yes" if better and fallen > len(made) / 2 else "partly" if better else "undecided" if fallen else "no"
        lines.append(
            f"- {setting}: **{word}**. Without a region {over_seeds(setting, 'pg-is', 'accuracy_after')['mean']:.3f} "
            f"(before: {over_seeds(setting, 'pg-is', 'accuracy_before')['mean']:.3f}); {fallen} of {len(made)} runs "
            f"collapsed. Ahead of it after Holm's correction: {_names(better)}; with p < {LEVEL:g} on its own: "
            f"{_names(alone)}. Collapsed with a region: {_counts(held)}."
        )
    return "\n".join(lines)


def _names(arms: Sequence[str]) -> str:
    return ", ".join(f"`{arm}`" for arm in arms) or "none"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"`{arm}` {count}" for arm, count in found.items() if count) or "none"


def bullets(found: dict[Key, Difference], settings: Sequence[str], arm: str, other: str) -> str:
    return "\n".join(f"- {judged(found, setting, arm, other)}" for setting in settings)


def numbers(page: str, arms: Sequence[str]) -> str:
    """Returns a page's two tables: its arms, and the differences that its verdicts are about."""
    settings, pairs = FAMILIES[page]
    return "\n".join([*rows(settings, arms), "", *differences(settings, pairs)])


def many() -> str:
    """Returns the number of differences and the number that stay significant under each correction."""
    pages = [family(*one) for one in FAMILIES.values()]
    every = {key: one for page in pages for key, one in page.items()}
    within = {key for page in pages for key, one in page.items() if one.sign}
    overall = sum(p < LEVEL for p in holm([one.p for one in every.values()]))
    listed = ", ".join(f"`{arm}` − `{other}` in `{setting}`" for setting, arm, other in sorted(within))
    return (
        f"The questions have {len(every)} different differences in final accuracy. Taken one by one, "
        f"{sum(one.p < LEVEL for one in every.values())} have p < {LEVEL:g}. Holm's correction within each "
        f"question leaves {len(within)}: {listed}. Over all questions at once it leaves {overall}."
    )


def steady(settings: Sequence[str], arm: str, other: str) -> str:
    """Returns a comparison of two arms by their spread over seeds and their collapses."""
    lines = []
    for setting in settings:
        parts = []
        for one in (arm, other):
            made = list(runs().get((setting, one), {}).values())
            if made:
                sd = over_seeds(setting, one, "accuracy_after")["sd"] or 0.0
                parts.append(f"`{one}` sd {sd:.3f}, {sum(run['collapsed'] for run in made)} of {len(made)} collapsed")
        if parts:
            lines.append(f"- {setting}: {'; '.join(parts)}.")
    return "\n".join(lines)


def question_a() -> None:
    fill(TABLES, "verdict a", verdict_a(family(*FAMILIES["a"])))
    fill(TABLES, "table a", numbers("a", TIER_1))


def question_b() -> None:
    arms = ("ppo", "dppo-binary-tv", "dppo-topk-tv")
    found = family(*FAMILIES["b"])
    fill(
        TABLES,
        "verdict b",
        "Final accuracy, Binary TV higher than PPO?\n\n"
        + bullets(found, SETTINGS, "dppo-binary-tv", "ppo")
        + "\n\nFinal accuracy, Top-K TV higher than PPO?\n\n"
        + bullets(found, SETTINGS, "dppo-topk-tv", "ppo")
        + "\n\nMean reward over training:\n\n"
        + slower("dppo-binary-tv", "ppo")
        + "\n\nStability:\n\n"
        + steady(SETTINGS, "dppo-binary-tv", "ppo"),
    )
    fill(TABLES, "table b", numbers("b", arms))
    draw("b-dppo-ppo", SETTINGS, arms)


def slower(arm: str, other: str) -> str:
    """Returns the sign of the difference in mean reward in every setting with sixteen updates on a rollout."""
    settings = ("stale", "both", *VARIED[1:])
    means = {setting: sum(made) / len(made) for setting in settings if (made := by_seed(setting, arm, other, REWARD))}
    below = sum(mean < 0 for mean in means.values())
    adjusted = holm([p_value(by_seed(setting, arm, other, REWARD)) for setting in means])
    listed = ", ".join(f"{setting} {mean:+.3f}" for setting, mean in means.items())
    return (
        f"- `{arm}` − `{other}` is negative in {below} of {len(means)} settings with sixteen updates on a rollout: "
        f"{listed}. The smallest p of the {len(means)} after Holm's correction is {min(adjusted):.3f}; the settings "
        "share seeds and code, so they are not independent."
    )


def question_c() -> None:
    settings, pairs = FAMILIES["c"]
    found, arms = family(settings, pairs), [arm for pair in pairs for arm in pair]
    fill(TABLES, "verdict c", "\n".join(f"- {judged(found, 'both', *pair)}" for pair in pairs))
    fill(TABLES, "table c", numbers("c", arms))
    draw("c-anchors", settings, arms)


def question_e() -> None:
    arms = ("ppo", "dppo-binary-tv", "dppo-topk-tv", "troll")
    asked = {"Binary TV": "dppo-binary-tv", "Top-K TV": "dppo-topk-tv", "PPO": "ppo"}
    found = family(*FAMILIES["e"])
    said = [f"TROLL higher than {name}?\n\n{bullets(found, SETTINGS, 'troll', arm)}" for name, arm in asked.items()]
    fill(TABLES, "verdict e", "\n\n".join(said))
    fill(TABLES, "table e", numbers("e", arms))
    draw("e-dppo-troll", SETTINGS, arms)


def question_f() -> None:
    arms = ("dppo-binary-tv", "ipo")
    settings, pairs = FAMILIES["f"]
    found = family(settings, pairs)
    fill(TABLES, "verdict f", bullets(found, settings, *arms) + "\n\n" + _growth(found, *arms))
    fill(TABLES, "table f", numbers("f", arms))
    draw("f-direction", settings, arms)


def _growth(found: dict[Key, Difference], *arms: str) -> str:
    """Returns whether the difference grows with the updates: the first and last intervals must not overlap."""
    first, last = (found.get((setting, *arms)) for setting in ("mismatch", "stale"))
    if first is None or last is None:
        return "Whether it grows with staleness was not measured."
    word = "yes" if last.low > first.high else "no, it shrinks" if last.high < first.low else "undecided"
    return f"Does the advantage of the signed mask grow from 1 to 16 updates? **{word}**: {first} at 1, {last} at 16."


def question_g() -> None:
    arms = ("drpo", "drpo-12.5", "pg-is", "ppo")
    settings, pairs = FAMILIES["g"]
    found = family(settings, pairs)
    fill(TABLES, "verdict g", "\n".join(f"- {judged(found, 'stale', *pair)}" for pair in pairs))
    fill(TABLES, "table g", numbers("g", arms))
    draw("g-drpo", settings, arms)


def question_j() -> None:
    """Writes whether each verdict holds: the varied setting must give the same one."""
    arms = ("ppo", "dppo-binary-tv", "troll")
    questions = ("Binary TV higher than PPO?", "TROLL higher than Binary TV?")
    said, found = [], family(*FAMILIES["j"])
    for asked, pair in zip(questions, FAMILIES["j"][1], strict=True):
        made = [found.get((setting, *pair)) for setting in VARIED]
        signs = {one.sign for one in made if one is not None}
        word = (
            "not all run" if None in made else "the same verdict in each" if len(signs) == 1 else "the verdict changes"
        )
        said.append(f"{asked} **{word.capitalize()}.**\n\n{bullets(found, VARIED, *pair)}")
    fill(TABLES, "verdict j", "\n\n".join(said))
    fill(TABLES, "table j", numbers("j", arms))
    draw("j-estimators", VARIED, arms)


def accuracies(settings: Sequence[str], arms: Sequence[str]) -> str:
    """Returns held-out accuracy after training, with a row for each region and a column for each setting."""
    lines = [f"| region | {' | '.join(settings)} |", "|---" * (len(settings) + 1) + "|"]
    for arm in arms:
        cells = []
        for setting in settings:
            after = over_seeds(setting, arm, "accuracy_after")
            if not after["n"]:
                cells.append("–")
                continue
            fallen = sum(run["collapsed"] for run in runs()[setting, arm].values())
            half = "" if after["low"] is None else f" ± {(after['high'] - after['low']) / 2:.3f}"
            cells.append(f"{after['mean']:.3f}{half}{f', {fallen} collapsed' if fallen else ''} ({after['n']})")
        lines.append(f"| `{arm}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def overview() -> None:
    """Writes the list of runs, the missing ones, and the chosen thresholds."""
    made = runs()
    settings = [s for s in ("on-policy", "stale-4", *SETTINGS) if any(key[0] == s for key in made)]
    extra = sorted({arm for _, arm in made} - {*TIER_1, *RIVALS})
    fill(PAGE, "overview", accuracies(settings, (*TIER_1, *extra)))
    fill(TABLES, "rivals", numbers("index", RIVALS))
    fill(PAGE, "many", many())
    missing = [
        f"{setting}: `{arm}`, seed {seed}"
        for setting in SETTINGS
        for arm in TIER_1
        for seed in SEEDS
        if seed not in made.get((setting, arm), {})
    ]
    total = sum(map(len, made.values()))
    hours = sum(run["seconds"] for one in made.values() for run in one.values()) / 3600
    said = "; ".join(missing) if missing else "none of the 8 regions × 3 settings × 5 seeds"
    fill(TABLES, "missing", f"{total} runs, {hours:.1f} hours of run time (two at a time). Missing: {said}.")
    tuned = json.loads((DATA / "tuning.json").read_text())
    lines = ["| region | tried: mean held-out accuracy of two seeds | chosen |", "|---|---|---|"]
    for arm, values in tuned["tried"].items():
        tried = ", ".join(f"{name} ({_value(one['region'])}) {one['mean']:.3f}" for name, one in values.items())
        lines.append(f"| `{arm}` | {tried} | {tuned['best'][arm]} |")
    fill(TABLES, "tuning", "\n".join(lines))
    gaps = {setting: _mean_step(setting, "trustrl/mismatch_abs_mean") for setting in ("mismatch", "both")}
    fill(
        PAGE,
        "mismatch",
        "The bf16 sampler is a mild mismatch on a model this small: the mean |Δ log p| between vLLM and the trainer is "
        f"{gaps['mismatch']:.4f} nats in `mismatch` and {gaps['both']:.4f} in `both`.",
    )
    draw("overview", SETTINGS, TIER_1)


def _mean_step(setting: str, name: str) -> float:
    """Returns a metric's mean over all steps that have it, of all runs in a setting."""
    made = [rows for (one, _), seeds in steps().items() if one == setting for rows in seeds.values()]
    values = [row[name] for rows in made for row in rows if row[name] is not None]
    return sum(values) / len(values)


def did_not_work() -> None:
    """Writes the regions that did not improve, in the comparison and during threshold tuning."""
    lines = []
    for (setting, arm), made in sorted(runs().items()):
        before, after = (over_seeds(setting, arm, f"accuracy_{when}")["mean"] for when in ("before", "after"))
        if after <= before:
            lines.append(f"- `{arm}` in `{setting}`: {before:.3f} → {after:.3f}, mean of {len(made)} seeds.")
    fill(PAGE, "comparison", "\n".join(lines) or "None in the comparison.")
    tuned = json.loads((DATA / "tuning.json").read_text())["tried"]
    fell = [
        f"- `{arm}` at {_value(one['region'])} ({name}): {one['before']:.3f} → {one['mean']:.3f}"
        for arm, values in tuned.items()
        for name, one in values.items()
        if one["mean"] <= one["before"]
    ]
    fill(PAGE, "learned nothing", "\n".join(fell) or "None while tuning.")


def _value(region: dict) -> str:
    """Returns the varied number: the larger of two bounds."""
    rest = {key: value for key, value in region.items() if key != "preset"}
    value = next(iter(rest.values()))
    return f"{value['max_increase'] if isinstance(value, dict) else value:g}"


def main() -> None:
    for question in (
        overview,
        question_a,
        question_b,
        question_c,
        question_e,
        question_f,
        question_g,
        question_j,
        did_not_work,
    ):
        question()


if __name__ == "__main__":
    main()
