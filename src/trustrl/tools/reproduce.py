"""Figures of DPPO's paper, drawn from runs, and a verdict on the claim that each makes: `trustrl reproduce`.

The paper prints its figures as curves without numbers, so there are no numbers to compare with. Each claim comes from
the text of the paper or of its repository. A figure whose claim was not found there has no verdict.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trustrl.errors import MissingDataError
from trustrl.optional_imports import need
from trustrl.runs.figure_style import COLOURS, LINES, saved
from trustrl.runs.run import Row, Run
from trustrl.runs.run_verdict import collapsed, mean_of, rollouts, windows

Verdict = Literal["reproduced", "not reproduced", "too short to tell", "no claim"]

FEWEST_UPDATES = 500
"""Updates of a run below which nothing is said about its stability."""

FEWEST_TOKENS = 10_000
FEWEST_RARE = 100
MOST_TOKENS = 200_000
"""Tokens read for a figure of tokens, from the first files of the records."""

RARE, COMMON = 0.1, 0.9
"""Probabilities below and above which figure 2 compares tokens."""

REWARD, MISMATCH = "reward", "trustrl/mismatch_gap_abs_mean"
MASKED, ENTROPY = "trustrl/masked_probability_mean", "entropy"
TITLES = {
    REWARD: "reward", MISMATCH: "mean |π' − μ|", MASKED: "mean μ of masked tokens", ENTROPY: "entropy (nats)",
}  # fmt: skip

Labelled = Sequence[tuple[str, Run]]


@dataclass(frozen=True, kw_only=True)
class PaperFigure:
    """A figure of the paper."""

    claim: str
    """The statement that it supports; empty if none was found as text."""

    curves: tuple[str, ...] = ()
    """Metrics to draw by step; none for a figure of tokens."""

    steady: Callable[[Mapping[str, Any]], bool] = lambda _region: False
    """Returns True for a region whose runs stay stable, by the claim."""

    unsteady: Callable[[Mapping[str, Any]], bool] = lambda _region: False
    """Returns True for a region whose runs collapse, by the claim."""


def _dppo(region: Mapping[str, Any]) -> bool:
    return region.get("kind") == "dppo" and region.get("anchor") != "proximal"


FIGURES = {
    "dppo-2": PaperFigure(
        claim="with equal weights in sampler and trainer, the ratio π'/μ spreads most where μ is small, and |π' − μ| "
        "does not"
    ),
    "dppo-3": PaperFigure(
        claim="DPPO stays stable; methods without a trust region collapse", curves=(REWARD, MISMATCH), steady=_dppo,
        unsteady=lambda region: region.get("kind") in ("pg-is", "cispo", "minirl"),
    ),
    "dppo-4": PaperFigure(
        claim="a region around the sampler's policy stays stable; one around the trainer's own collapses",
        curves=(REWARD, MISMATCH), steady=_dppo,
        unsteady=lambda region: region.get("kind") == "dppo" and region.get("anchor") == "proximal",
    ),
    "dppo-5": PaperFigure(
        claim="a mask of nothing but large falls of the probability at A < 0 keeps a run stable that collapses without",
        curves=(REWARD, MISMATCH), steady=_dppo, unsteady=lambda region: region.get("kind") == "pg-is",
    ),
    "dppo-6": PaperFigure(claim="PPO's clip masks tokens of lower probability than DPPO", curves=(MASKED, ENTROPY)),
    "dppo-7": PaperFigure(claim="", curves=(REWARD, MISMATCH, ENTROPY)),
    **{f"dppo-{number}": PaperFigure(claim="", curves=(REWARD, MISMATCH)) for number in range(13, 18)},
}  # fmt: skip


@dataclass(frozen=True)
class Reproduction:
    """One figure and what the runs say about its claim."""

    verdict: Verdict
    evidence: list[str]
    """One sentence for each number that the verdict rests on."""


def reproduce(name: str, runs: Labelled, file: Path) -> Reproduction:
    """Draws a figure of the paper from runs and judges its claim.

    Raises:
        MissingDataError: If no run has what the figure shows.
        MissingPackageError: If matplotlib is not installed, or pyarrow for a figure of tokens.
    """
    figure = FIGURES[name]
    need("matplotlib", extra="plots").use("Agg")
    if not figure.curves:
        tokens = {label: fresh_tokens(run) for label, run in runs}
        _draw_tokens(tokens, file)
        return spread(tokens)
    _draw_curves(figure.curves, runs, file)
    if not figure.claim:
        judged = Reproduction("no claim", ["The claim of this figure was not found as text."])
    else:
        judged = masked(runs) if MASKED in figure.curves else stability(figure, runs)
    return Reproduction(judged.verdict, judged.evidence + (_without_gap(runs) if MISMATCH in figure.curves else []))


def _without_gap(runs: Labelled) -> list[str]:
    """Returns a sentence for each run without recorded log-probs of its sampler."""
    return [
        f"{label}: {TITLES[MISMATCH]} is 0 at every step, so its log μ is the trainer's own. A run with sampler.kind = "
        "'vllm', or on verl, measures the gap."
        for label, run in runs
        if run.rows and all(row.get(MISMATCH) == 0 for row in run.rows)
    ]


def stability(figure: PaperFigure, runs: Labelled) -> Reproduction:
    """Judges a claim that some regions stay stable and others collapse, by the rule for collapsed runs.

    That nothing collapsed does not refute the claim, because a longer run may.
    """
    said, fell = [], dict[bool, list[bool]]({True: [], False: []})
    short = False
    for label, run in runs:
        region = run.settings.region or {}
        steady = figure.steady(region)
        if not steady and not figure.unsteady(region):
            said.append(f"{label}: the claim says nothing about its region.")
            continue
        has_collapsed = collapsed(run.rows, run.evaluations, run.settings.updates_per_batch or 1)
        ends = tuple(mean_of(part, MISMATCH) for part in (_tenth(run.rows), _tenth(run.rows[::-1])))
        grew = (
            ""
            if None in ends or ends == (0, 0)
            else f", {TITLES[MISMATCH]} {ends[0]:.2g} at first and {ends[1]:.2g} at last"
        )
        said.append(
            f"{label}: {'collapsed' if has_collapsed else 'did not collapse'} in {_updates(run)} updates{grew}; "
            f"{'stable' if steady else 'collapsing'} by the claim."
        )
        short |= _updates(run) < FEWEST_UPDATES and not has_collapsed
        fell[steady].append(has_collapsed)
    if any(fell[True]):
        return Reproduction("not reproduced", said)
    if short or not fell[True] or not any(fell[False]):
        return Reproduction("too short to tell", said)
    return Reproduction("reproduced", said)


def masked(runs: Labelled) -> Reproduction:
    """Judges the claim of figure 6: every run with PPO's clip masks rarer tokens than every run of DPPO."""
    means: dict[str, list[float]] = {"ppo": [], "dppo": []}
    said, short = [], False
    for label, run in runs:
        kind, mean = (run.settings.region or {}).get("kind"), mean_of(run.rows, MASKED)
        if mean is not None and kind in means:
            means[kind].append(mean)
            short |= _updates(run) < FEWEST_UPDATES
            said.append(f"{label}: the tokens that it masked had a mean μ of {mean:.3f} in {_updates(run)} updates.")
    if short or not all(means.values()):
        return Reproduction("too short to tell", said)
    return Reproduction("reproduced" if max(means["ppo"]) < min(means["dppo"]) else "not reproduced", said)


def spread(tokens: Mapping[str, tuple[list[float], list[float]]]) -> Reproduction:
    """Judges the claim of figure 2 by the 99th percentiles of |log π'/μ| and |π' − μ| at rare and common tokens."""
    said, verdicts = [], list[bool]()
    short = False
    for label, (sampler, trainer) in tokens.items():
        gaps = [
            (math.exp(mu), abs(pi - mu), abs(math.exp(pi) - math.exp(mu)))
            for mu, pi in zip(sampler, trainer, strict=True)
        ]
        rare = [gap[1:] for gap in gaps if gap[0] < RARE]
        common = [gap[1:] for gap in gaps if gap[0] > COMMON]
        if len(gaps) < FEWEST_TOKENS or min(len(rare), len(common)) < FEWEST_RARE:
            short = True
            said.append(
                f"{label}: {len(gaps):,} tokens, {len(rare):,} of them below μ = {RARE} and "
                f"{len(common):,} above {COMMON}."
            )
            continue
        (rare_ratio, rare_tv), (common_ratio, common_tv) = (
            [sorted(values)[int(0.99 * len(values))] for values in zip(*part, strict=True)] for part in (rare, common)
        )
        said.append(
            f"{label}: 99th percentile below μ = {RARE} and above {COMMON}: |log π'/μ| {rare_ratio:.2g} and "
            f"{common_ratio:.2g}, |π' − μ| {rare_tv:.2g} and {common_tv:.2g}, over {len(gaps):,} tokens."
        )
        verdicts.append(rare_ratio > 2 * common_ratio and rare_tv <= 2 * common_tv)
    if short or not verdicts:
        return Reproduction("too short to tell", said)
    return Reproduction("reproduced" if all(verdicts) else "not reproduced", said)


def fresh_tokens(run: Run) -> tuple[list[float], list[float]]:
    """Returns log μ and log π' of recorded tokens that were sampled with the trainer's own weights.

    π' is the trainer's log-prob at the weights that sampled a token, so both differ by rounding and kernels alone.

    Raises:
        MissingDataError: If no token has both.
        RecordError: If a file cannot be read.
        MissingPackageError: If pyarrow is not installed.
    """
    from trustrl.recording.record_files import read_table
    from trustrl.tools.audit import record_files

    sampler, trainer = list[float](), list[float]()
    seen = set[tuple[int, int]]()
    for file in record_files(list(run.records)):
        columns = ("sequence", "position", "behavior_logp", "proximal_logp")
        rows = read_table(file, columns)[0].select(columns).to_pydict()
        for sequence, position, mu, pi in zip(*rows.values(), strict=True):
            # A row for each update has the same two numbers.
            if mu is not None and pi is not None and mu > -50 and pi > -50 and (sequence, position) not in seen:
                seen.add((sequence, position))
                sampler.append(mu)
                trainer.append(pi)
        if len(sampler) >= MOST_TOKENS:
            break
    if not sampler:
        raise MissingDataError(
            f"{run.path} must have token records with log-probs of sampler and trainer (behavior_logp and "
            "proximal_logp), got none. Record them with [records] in the recipe."
        )
    return sampler, trainer


def _tenth(rows: Sequence[Row]) -> Sequence[Row]:
    return rows[: max(1, len(rows) // 10)]


def _updates(run: Run) -> int:
    """Returns the number of optimizer steps."""
    return run.steps * (1 if run.row_is == "update" or run.recipe else run.settings.updates_per_batch or 1)


def _draw_curves(names: Sequence[str], runs: Labelled, file: Path) -> None:
    plt = need("matplotlib.pyplot", extra="plots")
    figure, axes = plt.subplots(1, len(names), figsize=(4.2 * len(names), 3.4))
    drawn = 0
    for axis, name in zip(axes, names, strict=True):
        for index, (label, run) in enumerate(runs):
            rows = rollouts(run.rows, run.settings.updates_per_batch or 1) if name == REWARD else run.rows
            points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
            if points:
                steps, values = zip(*points, strict=True)
                smooth = windows(values, max(1, len(values) // 20))
                style = {"color": COLOURS[index % len(COLOURS)], "linestyle": LINES[index // len(COLOURS) % len(LINES)]}
                axis.plot(steps, smooth, linewidth=1.5, label=label, **style)
                drawn += 1
        axis.set_title(TITLES[name], fontsize=10, loc="left")
        axis.set_xlabel("update")
        if name != REWARD:  # none of the others is negative
            axis.set_ylim(bottom=0)
        if name == MISMATCH and _without_gap(runs):
            axis.text(
                0.5, 0.5, "runs at 0 recorded no μ of their sampler", transform=axis.transAxes, fontsize=8, ha="center"
            )
    if not drawn:
        raise MissingDataError(
            f"A run must have one of the metrics {', '.join(names)}, got none. Runs of `trustrl run` log them all."
        )
    fullest = max(axes, key=lambda axis: len(axis.lines))
    fullest.legend(frameon=False, fontsize=8)
    saved(figure, axes, file)


def _draw_tokens(tokens: Mapping[str, tuple[list[float], list[float]]], file: Path) -> None:
    plt = need("matplotlib.pyplot", extra="plots")
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6))
    for index, (label, (sampler, trainer)) in enumerate(tokens.items()):
        probability = [math.exp(mu) for mu in sampler]
        gaps = (
            [pi - mu for mu, pi in zip(sampler, trainer, strict=True)],
            [abs(math.exp(pi) - math.exp(mu)) for mu, pi in zip(sampler, trainer, strict=True)],
        )
        for axis, values in zip(axes, gaps, strict=True):
            axis.plot(probability, values, ".", markersize=1.5, alpha=0.4, color=COLOURS[index % 8], label=label)
    for axis, title in zip(axes, ("log π'/μ", "|π' − μ|"), strict=True):
        axis.set_title(title, fontsize=10, loc="left")
        axis.set_xlabel("μ of the sampled token")
    axes[0].legend(frameon=False, fontsize=8, markerscale=5)
    saved(figure, axes, file)
