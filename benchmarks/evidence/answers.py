"""Every table, verdict and figure of docs/results that follows from the comparison's runs.

    python benchmarks/evidence/answers.py

A verdict is a rule on numbers, written down here before the runs were looked at: *yes* or *no* where the 95 % interval
of the difference, paired by seed, excludes 0, else *undecided*.
"""

import json
from collections.abc import Sequence
from pathlib import Path

from collect import DATA
from curves import draw
from findings import Difference, difference, differences, over_seeds, rows, runs, steps
from pages import fill

RESULTS = Path(__file__).parents[2] / "docs/results"
README = RESULTS.parents[1] / "README.md"
TIER_1 = ("pg-is", "ppo", "cispo", "dppo-binary-tv", "dppo-topk-tv", "troll", "drpo", "ipo")
RIVALS = ("dppo-binary-kl", "dppo-topk-kl", "dppo-full-tv", "cppo", "trm", "gspo", "sapo", "spo", "kpop")
"""As published, in `stale` only; `minirl`, `tis`, `icepop` and `mis` are PPO there, where nothing mismatches."""

SETTINGS = ("stale", "mismatch", "both")
SEEDS = range(5)
VARIED = ("stale", "stale-unscaled", "stale-batch-scaled", "stale-llama")
"""Question j: the setting as it stands, two other advantages, another family of models."""


def judged(setting: str, arm: str, other: str, name: str = "accuracy_after") -> str:
    """One sentence: who was ahead, by how much, and whether that is more than noise."""
    found = difference(setting, arm, other, name)
    if found is None:
        return f"{setting}: not run."
    word = {1: "yes", -1: "no, the other way round", 0: "undecided"}[found.sign]
    return f"{setting}: **{word}**, `{arm}` − `{other}` = {found}, {found.seeds} seeds."


def verdict_a() -> str:
    """Without a region against with one."""
    lines = []
    for setting in SETTINGS:
        made = list(runs().get((setting, "pg-is"), {}).values())
        if not made:
            continue
        found = {arm: difference(setting, arm, "pg-is") for arm in TIER_1[1:]}
        better = [arm for arm, one in found.items() if one is not None and one.sign > 0]
        fell = sum(run["accuracy_after"] < run["accuracy_before"] for run in made)
        held = {arm: sum(run["collapsed"] for run in runs().get((setting, arm), {}).values()) for arm in TIER_1[1:]}
        word = "yes" if better and fell > len(made) / 2 else "partly" if better else "no"
        lines.append(
            f"- {setting}: **{word}**. Without a region {over_seeds(setting, 'pg-is', 'accuracy_after')['mean']:.3f} "
            f"(before: {over_seeds(setting, 'pg-is', 'accuracy_before')['mean']:.3f}); {fell} of {len(made)} runs "
            f"ended below where they began and {sum(run['collapsed'] for run in made)} collapsed. Ahead of it with an "
            f"interval that excludes 0: {_names(better)}. Collapsed with a region: {_counts(held)}."
        )
    return "\n".join(lines)


def _names(arms: Sequence[str]) -> str:
    return ", ".join(f"`{arm}`" for arm in arms) or "none"


def _counts(found: dict[str, int]) -> str:
    return ", ".join(f"`{arm}` {count}" for arm, count in found.items() if count) or "none"


def bullets(settings: Sequence[str], arm: str, other: str) -> str:
    return "\n".join(f"- {judged(setting, arm, other)}" for setting in settings)


def steady(settings: Sequence[str], arm: str, other: str) -> str:
    """Spread over seeds and collapses of two arms."""
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
    page = RESULTS / "a-no-region.md"
    fill(page, "verdict", verdict_a())
    fill(
        page,
        "table",
        "\n".join([*rows(SETTINGS, TIER_1), "", *differences(SETTINGS, [(a, "pg-is") for a in TIER_1[1:]])]),
    )


def question_b() -> None:
    page, arms = RESULTS / "b-dppo-ppo.md", ("ppo", "dppo-binary-tv", "dppo-topk-tv")
    fill(
        page,
        "verdict",
        "Final accuracy, Binary TV higher than PPO?\n\n"
        + bullets(SETTINGS, "dppo-binary-tv", "ppo")
        + "\n\nFinal accuracy, Top-K TV higher than PPO?\n\n"
        + bullets(SETTINGS, "dppo-topk-tv", "ppo")
        + "\n\nStability:\n\n"
        + steady(SETTINGS, "dppo-binary-tv", "ppo")
        + "\n\nSpeed is the mean reward over training, in the second table.",
    )
    pairs = [("dppo-binary-tv", "ppo"), ("dppo-topk-tv", "ppo"), ("dppo-topk-tv", "dppo-binary-tv")]
    fill(page, "table", "\n".join([*rows(SETTINGS, arms), "", *differences(SETTINGS, pairs)]))
    draw("b-dppo-ppo", SETTINGS, arms)


def question_c() -> None:
    page = RESULTS / "c-anchors.md"
    pairs = [("dppo-binary-tv", "dppo-binary-tv-proximal"), ("troll-behavior", "troll")]
    arms = [arm for pair in pairs for arm in pair]
    fill(page, "verdict", "\n".join(f"- {judged('both', *pair)}" for pair in pairs))
    fill(page, "table", "\n".join([*rows(["both"], arms), "", *differences(["both"], pairs)]))
    draw("c-anchors", ["both"], arms)


def question_e() -> None:
    page, arms = RESULTS / "e-dppo-troll.md", ("dppo-binary-tv", "dppo-topk-tv", "troll")
    text = "TROLL higher than Binary TV?\n\n" + bullets(SETTINGS, "troll", "dppo-binary-tv")
    text += "\n\nTROLL higher than Top-K TV?\n\n" + bullets(SETTINGS, "troll", "dppo-topk-tv")
    fill(page, "verdict", text)
    pairs = [("troll", "dppo-binary-tv"), ("troll", "dppo-topk-tv")]
    fill(page, "table", "\n".join([*rows(SETTINGS, arms), "", *differences(SETTINGS, pairs)]))
    draw("e-dppo-troll", SETTINGS, arms)


def question_f() -> None:
    page, arms = RESULTS / "f-direction.md", ("dppo-binary-tv", "ipo")
    settings = ("mismatch", "stale-4", "stale", "both")
    found = {setting: difference(setting, *arms) for setting in settings}
    fill(page, "verdict", bullets(settings, *arms) + "\n\n" + _growth(found))
    fill(page, "table", "\n".join([*rows(settings, arms), "", *differences(settings, [arms])]))
    draw("f-direction", settings, arms)


def _growth(found: dict[str, Difference | None]) -> str:
    """Whether the difference grows with the number of updates: the intervals of first and last must not overlap."""
    first, last = found["mismatch"], found["stale"]
    if first is None or last is None:
        return "Whether it grows with staleness was not measured."
    word = "yes" if last.low > first.high else "no, it shrinks" if last.high < first.low else "undecided"
    return f"Does the advantage of the signed mask grow from 1 to 16 updates? **{word}**: {first} at 1, {last} at 16."


def question_g() -> None:
    page, arms = RESULTS / "g-drpo.md", ("drpo", "drpo-12.5", "pg-is", "ppo")
    pairs = [("drpo", "drpo-12.5"), ("drpo-12.5", "pg-is"), ("drpo", "ppo")]
    fill(page, "verdict", "\n".join(f"- {judged('stale', *pair)}" for pair in pairs))
    fill(page, "table", "\n".join([*rows(["stale"], arms), "", *differences(["stale"], pairs)]))
    draw("g-drpo", ["stale"], arms)


def question_j() -> None:
    """A verdict holds where the varied setting gives the same one."""
    page, arms = RESULTS / "j-estimators.md", ("ppo", "dppo-binary-tv", "troll")
    pairs = {
        "Binary TV higher than PPO?": ("dppo-binary-tv", "ppo"),
        "TROLL higher than Binary TV?": ("troll", "dppo-binary-tv"),
    }
    said = []
    for asked, pair in pairs.items():
        found = [difference(setting, *pair) for setting in VARIED]
        signs = {one.sign for one in found if one is not None}
        word = (
            "not all run" if None in found else "the same verdict in each" if len(signs) == 1 else "the verdict changes"
        )
        said.append(f"{asked} **{word.capitalize()}.**\n\n{bullets(VARIED, *pair)}")
    fill(page, "verdict", "\n\n".join(said))
    fill(page, "table", "\n".join([*rows(VARIED, arms), "", *differences(VARIED, list(pairs.values()))]))
    draw("j-estimators", VARIED, arms)


def accuracies(settings: Sequence[str], arms: Sequence[str]) -> str:
    """Held-out accuracy after training: a row for each region, a column for each setting."""
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
    """All that was run, what is missing, and which thresholds were chosen."""
    page = RESULTS / "index.md"
    made = runs()
    settings = [s for s in ("on-policy", "stale-4", *SETTINGS) if any(key[0] == s for key in made)]
    extra = sorted({arm for _, arm in made} - {*TIER_1, *RIVALS})
    fill(page, "overview", accuracies(settings, (*TIER_1, *extra)))
    against = differences(["stale"], [(arm, "ppo") for arm in RIVALS])
    fill(page, "rivals", "\n".join([*rows(["stale"], RIVALS), "", *against]))
    fill(README, "results", accuracies(SETTINGS, ("pg-is", "ppo", "dppo-binary-tv", "troll")))
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
    fill(page, "missing", f"{total} runs, {hours:.1f} hours of run time (two at a time). Missing: {said}.")
    tuned = json.loads((DATA / "tuning.json").read_text())
    lines = ["| region | tried: mean held-out accuracy of two seeds | chosen |", "|---|---|---|"]
    for arm, values in tuned["tried"].items():
        tried = ", ".join(f"{name} ({_value(one['region'])}) {one['mean']:.3f}" for name, one in values.items())
        lines.append(f"| `{arm}` | {tried} | {tuned['best'][arm]} |")
    fill(page, "tuning", "\n".join(lines))
    gaps = {setting: _mean_step(setting, "trustrl/mismatch_abs_mean") for setting in ("mismatch", "both")}
    fill(
        page,
        "mismatch",
        "The bf16 sampler is a mild mismatch on a model this small: the mean |Δ log p| between vLLM and the trainer is "
        f"{gaps['mismatch']:.4f} nats in `mismatch` and {gaps['both']:.4f} in `both`.",
    )
    draw("overview", SETTINGS, TIER_1)


def _mean_step(setting: str, name: str) -> float:
    """A metric's mean over all steps of all runs in a setting that have it."""
    made = [rows for (one, _), seeds in steps().items() if one == setting for rows in seeds.values()]
    values = [row[name] for rows in made for row in rows if row[name] is not None]
    return sum(values) / len(values)


def did_not_work() -> None:
    """Regions that ended no better than they began, in the comparison and while thresholds were tuned."""
    page = RESULTS / "did-not-work.md"
    lines = []
    for (setting, arm), made in sorted(runs().items()):
        before, after = (over_seeds(setting, arm, f"accuracy_{when}")["mean"] for when in ("before", "after"))
        if after <= before:
            lines.append(f"- `{arm}` in `{setting}`: {before:.3f} → {after:.3f}, mean of {len(made)} seeds.")
    fill(page, "comparison", "\n".join(lines) or "None in the comparison.")
    tuned = json.loads((DATA / "tuning.json").read_text())["tried"]
    fell = [
        f"- `{arm}` at {_value(one['region'])} ({name}): {one['before']:.3f} → {one['mean']:.3f}"
        for arm, values in tuned.items()
        for name, one in values.items()
        if one["mean"] <= one["before"]
    ]
    fill(page, "tuning", "\n".join(fell) or "None while tuning.")


def _value(region: dict) -> str:
    """The one number that was varied: the larger of two bounds."""
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
