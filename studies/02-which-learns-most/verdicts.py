"""Verdicts of the second study from its result files, by the registered rules.

    python studies/02-which-learns-most/verdicts.py tuning   # the chosen setting of each arm
    python studies/02-which-learns-most/verdicts.py decide   # the four questions and the secondary ones
    python studies/02-which-learns-most/verdicts.py anchors  # anchors, direction, decoupling
    python studies/02-which-learns-most/verdicts.py power    # paired deviations of the pilot; what the seeds can show

Each command prints Markdown.
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import study
from scipy import stats

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))
from holm import LEVEL, holm

MARGIN = 0.02
"""Smallest difference in area that matters. Registered."""

POWER = 0.8
Areas = Mapping[str, Mapping[int, float]]
"""Area under held-out accuracy by arm and seed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's difference, paired by seed, and its verdict."""

    question: str
    arm: str
    other: str
    seeds: int
    mean: float
    low: float
    high: float
    """Ends of the 95% t interval."""

    sd: float
    p: float
    """Of no difference, adjusted by Holm over the family."""

    p_margin: float
    """Of a difference of at least the margin (TOST), adjusted by Holm over the family."""

    wilcoxon: float
    """Unadjusted p of the signed-rank test. It does not enter the verdict."""

    @property
    def verdict(self) -> str:
        """`equal within 0.02`, `ahead`, `behind` or `undecided`, in this order."""
        if self.p_margin < LEVEL:
            return f"equal within {MARGIN:g}"
        if self.p < LEVEL:
            return "ahead" if self.mean > 0 else "behind"
        return "undecided"


def area(run: Mapping[str, Any]) -> float:
    """Returns the registered metric of a run: the area under held-out accuracy."""
    return run["auc"]


def last_accuracy(run: Mapping[str, Any]) -> float:
    """Returns the held-out accuracy after the last rollout, which is not registered."""
    return run["accuracy"][-1]


def areas(
    runs: Iterable[Mapping[str, Any]], measure: Callable[[Mapping[str, Any]], float] = area
) -> dict[str, dict[int, float]]:
    """Returns the area, or another measure, of each run by arm and seed."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        found.setdefault(run["name"], {})[run["seed"]] = measure(run)
    return found


def p_of_margin(differences: Sequence[float]) -> float:
    """Returns the larger p of the two one-sided t tests against −margin and +margin."""
    return max(
        float(stats.ttest_1samp(differences, -MARGIN, alternative="greater").pvalue),
        float(stats.ttest_1samp(differences, MARGIN, alternative="less").pvalue),
    )


def answers(found: Areas, questions: Iterable[tuple[str, str, str]]) -> list[Answer]:
    """Returns the answers to a family of questions, adjusted together. Skips questions about an arm without runs."""
    made = []
    for question, arm, other in questions:
        if arm in found and other in found:
            seeds = sorted(found[arm].keys() & found[other].keys())
            made.append((question, arm, other, np.array([found[arm][seed] - found[other][seed] for seed in seeds])))
    differs = holm([float(stats.ttest_1samp(gaps, 0.0).pvalue) for *_, gaps in made])
    matches = holm([p_of_margin(gaps) for *_, gaps in made])
    return [
        Answer(
            question, arm, other, len(gaps), float(gaps.mean()),
            *map(float, stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), stats.sem(gaps))),
            float(gaps.std(ddof=1)), p, p_margin, float(stats.wilcoxon(gaps).pvalue),
        )
        for (question, arm, other, gaps), p, p_margin in zip(made, differs, matches, strict=True)
    ]  # fmt: skip


def power_of_margin(sd: float, seeds: int, level: float) -> float:
    """Returns the probability that TOST finds two equal arms equal within the margin."""
    bound = stats.t.ppf(1 - level, seeds - 1)
    one_sided = 1 - stats.nct.cdf(bound, seeds - 1, MARGIN * math.sqrt(seeds) / sd)
    return max(0.0, float(2 * one_sided - 1))


def detectable(sd: float, seeds: int, level: float) -> float:
    """Returns the difference that a two-sided t test finds with a power of 0.8."""
    bound = stats.t.ppf(1 - level / 2, seeds - 1)
    low, high = 0.0, 20 * sd / math.sqrt(seeds)
    for _ in range(60):
        middle = (low + high) / 2
        reached = 1 - stats.nct.cdf(bound, seeds - 1, middle * math.sqrt(seeds) / sd)
        low, high = (middle, high) if reached < POWER else (low, middle)
    return high


def seeds_needed(sd: float, mean: float, level: float, most: int = 100_000) -> int | None:
    """Returns the number of seeds at which a question with this mean and deviation is decided either way."""
    for seeds in sorted({round(10 * 1.05**step) for step in range(200)}):
        if seeds > most:
            return None
        equal = abs(mean) < MARGIN and power_of_margin(sd * MARGIN / (MARGIN - abs(mean)), seeds, level) >= POWER
        if equal or detectable(sd, seeds, level) <= abs(mean):
            return seeds
    return None


def table(found: Sequence[Answer], lasts: Sequence[Answer] | None = None) -> str:
    """Returns a Markdown table of answers on the area, with the differences in last accuracy if they are given."""
    lines = [
        "| question | difference | seeds | area [95%] | "
        + "last accuracy [95%] | " * (lasts is not None)
        + "sd | p, Holm | p of the margin, Holm | Wilcoxon p | verdict on the area | seeds to decide |",
        "|---" * (10 + (lasts is not None)) + "|",
    ]
    for place, one in enumerate(found):
        last = "" if lasts is None else f"{shown(lasts[place])} | "
        more = "–"
        if one.verdict == "undecided":
            needed = seeds_needed(one.sd, one.mean, LEVEL / len(found))
            more = "more than 100,000" if needed is None else f"about {needed}"
        lines.append(
            f"| {one.question} | `{one.arm}` − `{one.other}` | {one.seeds} | {one.mean:+.4f} [{one.low:+.4f}, "
            f"{one.high:+.4f}] | {last}{one.sd:.4f} | {one.p:.3g} | {one.p_margin:.3g} | {one.wilcoxon:.3g} | "
            f"**{one.verdict}** | {more} |"
        )
    return "\n".join(lines)


def shown(one: Answer) -> str:
    """Returns the difference with its interval."""
    return f"{one.mean:+.3f} [{one.low:+.3f}, {one.high:+.3f}]"


def half_interval(values: Any) -> Any:
    """Returns half of the 95% t interval of the mean over the first axis."""
    return stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)


def arms_table(found: Areas) -> str:
    """Returns a Markdown table of each arm's mean area."""
    lines = [
        "| arm | seeds | area, mean ± half of the 95% interval | interquartile mean | sd |",
        "|---|---|---|---|---|",
    ]
    for arm, by_seed in found.items():
        values = np.array(list(by_seed.values()))
        half = half_interval(values) if len(values) > 1 else math.nan
        spread = values.std(ddof=1) if len(values) > 1 else math.nan
        lines.append(
            f"| `{arm}` | {len(values)} | {values.mean():.4f} ± {half:.4f} | "
            f"{stats.trim_mean(values, 0.25):.4f} | {spread:.4f} |"
        )
    return "\n".join(lines)


def with_better(questions: Iterable[tuple[str, str, str]], settings: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Returns the questions with `better-dppo` named: the DPPO arm with the higher mean in tuning."""
    better = max(("dppo-binary-tv", "dppo-topk-tv"), key=lambda arm: settings[arm]["mean"])
    return [tuple(better if word == "better-dppo" else word for word in one) for one in questions]  # pyright: ignore[reportReturnType]


def tuning() -> str:
    """Returns the chosen setting of each arm."""
    lines = ["| arm | learning rate | threshold | mean area | best of the grid |", "|---|---|---|---|---|"]
    for arm, one in study.chosen(study.read("tune")).items():
        lines.append(f"| `{arm}` | {one['lr']:g} | `{one['overrides']}` | {one['mean']:.4f} | {one['best']:.4f} |")
    return "\n".join(lines)


def decide() -> str:
    """Returns the verdicts of the deciding stage."""
    found = areas(study.read("decide"))
    questions = with_better(study.QUESTIONS, study.chosen(study.read("tune")))
    parts = [arms_table(found), table(answers(found, questions)), table(answers(found, study.SECONDARY))]
    return "\n\n".join(parts)


def anchor_runs() -> list[dict[str, Any]]:
    """Returns the runs of variants and of the arms that they vary, on the variants' seeds."""
    seeds = set(study.ANCHOR_SEEDS)
    return [run for run in study.read("decide") + study.read("anchors") if run["seed"] in seeds]


def anchors() -> str:
    """Returns the verdicts of the stage on anchors, a separate family."""
    found = areas(anchor_runs())
    return "\n\n".join([arms_table(found), table(answers(found, study.ANCHOR_QUESTIONS))])


def power() -> str:
    """Returns paired deviations of the pilot's power runs, and what 60 seeds can show."""
    found = areas(study.read("power"))
    seeds, level = len(study.DECIDE_SEEDS), LEVEL / len(study.QUESTIONS)
    lines = [
        f"| pair | pilot seeds | mean | sd | found with power {POWER} at {seeds} seeds | power to find equality | "
        "seeds for equality |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, other in combinations(found, 2):
        common = sorted(found[arm].keys() & found[other].keys())
        gaps = np.array([found[arm][seed] - found[other][seed] for seed in common])
        sd = float(gaps.std(ddof=1))
        lines.append(
            f"| `{arm}` − `{other}` | {len(gaps)} | {gaps.mean():+.4f} | {sd:.4f} | "
            f"{detectable(sd, seeds, level):.4f} | {power_of_margin(sd, seeds, level):.2f} | "
            f"{seeds_needed(sd, 0.0, level)} |"
        )
    return "\n\n".join([arms_table(found), "\n".join(lines)])


def main() -> None:
    commands = {"tuning": tuning, "decide": decide, "anchors": anchors, "power": power}
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=list(commands))
    print(commands[parser.parse_args().what]())


if __name__ == "__main__":
    main()
