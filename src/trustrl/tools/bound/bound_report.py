"""The bound of every update as named numbers, the object behind `trustrl bound --json`, and as text.

See docs/guides/bound.md.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from trustrl.config.sampling_parameters import is_truncated
from trustrl.config.statistics import Anchor, BinaryKL, BinaryTV, FullKL, FullTV, TopKKL, TopKTV
from trustrl.core.divergences import tv_limit
from trustrl.errors import ConfigError, RecordError
from trustrl.files import finite
from trustrl.recording import read_sequences, storage
from trustrl.recording.record_files import RECORDS
from trustrl.recording.storage import Place
from trustrl.tools.audit import percent, recorded_arm, table, wrapped
from trustrl.tools.bound.theorem import largest_max_tv, largest_sum_tv, max_form, sum_form
from trustrl.tools.bound.update_sums import LARGEST, SUMS, Rewards, UpdateSums

VERSION = 1
"""Format version of the object."""

HEADER = ["step", "age", "inside", "max TV ≥", "surrogate", "max form", "sum form", "over", "needs TV", "bound ≤"]
SAYS = {
    "unchanged": "without a change", "improves": "positive", "limits the loss": "that limit the loss",
    "nothing": "that say nothing",
}  # fmt: skip


class Threshold(NamedTuple):
    """Radius of a ball around μ."""

    tv: float
    kl: float | None
    """Radius in nats that `tv` follows from, by Pinsker's inequality."""

    source: str


class Sequences(NamedTuple):
    """Facts from the sequence table of a run."""

    rewards: Rewards
    longest: int
    """Number of tokens of the longest completion; 0 if no length is recorded."""


def record_folder(path: str | Path) -> Place:
    """Returns the folder of the records in a record folder or run directory."""
    where = storage.place(path)
    if storage.is_file(where):
        raise ConfigError(
            f"RECORDS must be a folder, got the file `{where}`. Pass the folder that contains it: rewards are in its "
            "`sequences`."
        )
    inside = storage.inside(where, RECORDS)
    return inside if storage.is_folder(inside) else where


def read_rewards(folder: Place) -> Sequences:
    """Reads the rewards and lengths of a run's sequences."""
    table = read_sequences(folder)
    rewards = {
        sequence: reward
        for sequence, reward in zip(table["sequence"].to_pylist(), table["reward"].to_pylist(), strict=True)
        if reward is not None and math.isfinite(reward)
    }
    if not rewards:
        raise RecordError(
            f"`{folder}` must have rewards in its sequence table, got none. TRL, verl and `trustrl run` record them "
            "since version 3 of the record; in your own trainer, pass them to `Recorder.add_sequences`."
        )
    lengths = [length for length in table["completion_tokens"].to_pylist() if length is not None]
    ids = sorted(rewards)
    known = Rewards(torch.tensor(ids), torch.tensor([rewards[sequence] for sequence in ids], dtype=torch.float64))
    return Sequences(known, max(lengths, default=0))


def threshold(delta: float | None, regions: Sequence[Mapping[str, Any]]) -> Threshold:
    """Returns the ball to report on: the given TV, the recorded region's bound, or else DPPO's published TV."""
    if delta is not None:
        return Threshold(delta, None, "--delta")
    for settings in regions:
        arm = recorded_arm(settings)
        if arm is None:
            continue
        statistic = None if arm.mask is None else arm.mask.statistic
        ball = getattr(arm.region, "bound", None) if arm.needs.projects else None
        bound = max(statistic.bounds) if statistic else ball
        if bound is None or math.isinf(bound):
            continue
        if isinstance(statistic, (BinaryTV, TopKTV, FullTV)):
            return Threshold(bound, None, "the recorded region")
        if ball is not None or isinstance(statistic, (BinaryKL, TopKKL, FullKL)):
            tv = float(tv_limit(torch.tensor(bound, dtype=torch.float64)))
            return Threshold(tv, bound, "the recorded region, by Pinsker's inequality")
    return Threshold(max(BinaryTV().bounds), None, "the published threshold of DPPO")


def bound_report(
    update_sums: UpdateSums,
    sequences: Sequences,
    ball: Threshold,
    *,
    horizon: int | None = None,
    reward_range: Sequence[float] | None = None,
    sampling: Mapping[str, Any] | None = None,
    anchor: Anchor = "behavior",
) -> dict[str, Any]:
    """Returns the surrogate, both penalties and the bound for every update.

    Args:
        update_sums: Sums over all files.
        sequences: Rewards of the run.
        ball: Threshold that `update_sums` was counted with.
        horizon: T, the largest number of tokens of a completion; by default the largest recorded one.
        reward_range: Lowest and highest reward that the reward function can return; by default the recorded ones.
        sampling: Sampling settings in run.json.
        anchor: Log-probs that `update_sums` reads as μ's.

    Raises:
        ConfigError: If a recorded completion is longer than the horizon, or a recorded reward is out of range.
        RecordError: If no sequence counts.
    """
    total = dict(zip(SUMS, update_sums.sums.sum(0).tolist(), strict=True))
    if not total["sequences"]:
        raise RecordError(
            f"The records must have sequences with rewards and without faulty tokens, got none: "
            f"{total['unrewarded']:.0f} without a reward, {total['faulty']:.0f} with a faulty token."
        )
    assumptions = _assumptions(update_sums, sequences, horizon, reward_range)
    return {
        "version": VERSION,
        "anchor": anchor,
        **{name: int(total[name]) for name in ("sequences", "tokens", "faulty", "unrewarded")},
        "rewards": [assumptions.low, assumptions.high],
        "xi": assumptions.xi,
        "half_range": assumptions.half_range,
        "horizon": assumptions.horizon,
        "truncated_sampling": None if sampling is None else is_truncated(sampling.get),
        "ball": {
            **ball._asdict(),
            "max_form": max_form(assumptions.xi, assumptions.horizon, ball.tv),
            "sum_form": sum_form(assumptions.xi, assumptions.horizon * ball.tv),
        },
        "updates": [
            _update(place, dict(zip(SUMS, sums, strict=True)), dict(zip(LARGEST, most, strict=True)), assumptions)
            for place, sums, most in zip(
                update_sums.updates.tolist(), update_sums.sums.tolist(), update_sums.largest.tolist(), strict=True
            )
            if sums[SUMS.index("sequences")]
        ],
    }


class _Assumptions(NamedTuple):
    """Numbers that the theorem takes from outside the records, or that stand in for them."""

    low: float
    high: float
    horizon: int

    @property
    def xi(self) -> float:
        """Largest |R|."""
        return max(abs(self.low), abs(self.high))

    @property
    def half_range(self) -> float:
        """Largest |R − c| with c in the middle of the range."""
        return (self.high - self.low) / 2


def _assumptions(
    update_sums: UpdateSums, sequences: Sequences, horizon: int | None, reward_range: Sequence[float] | None
) -> _Assumptions:
    low, high = (float(x) for x in sequences.rewards.reward.aminmax())
    if reward_range is not None:
        if not -math.inf < reward_range[0] <= low <= high <= reward_range[1] < math.inf:
            raise ConfigError(
                f"--rewards must be a finite range that contains every recorded reward, from {low:g} to {high:g}, got "
                f"{reward_range[0]:g} to {reward_range[1]:g}."
            )
        low, high = reward_range
    longest = max(sequences.longest, int(update_sums.largest[:, LARGEST.index("tokens")].max()))
    if horizon is not None and horizon < longest:
        raise ConfigError(
            f"--horizon must be at least {longest}, the length of the longest recorded completion, got {horizon}."
        )
    return _Assumptions(low, high, horizon or longest)


def _update(
    place: Sequence[int], sums: Mapping[str, float], most: Mapping[str, float], assumptions: _Assumptions
) -> dict[str, Any]:
    num = sums["sequences"]
    sum_tv = sums["sampled_tv"] / num
    row = {
        "step": place[0],
        "update": place[1],
        "age": int(most["age"]),
        "sequences": int(num),
        "tokens": int(sums["tokens"]),
        "reward": sums["reward"] / num,
        "inside": sums["inside"] / sums["tokens"],
        "max_tv": [most["lower_tv"], most["upper_tv"]],
        "sum_tv": sum_tv,
        "sum_tv_bounds": [sums["lower_tv"] / num, sums["upper_tv"] / num],
    }
    middle = (assumptions.low + assumptions.high) / 2
    for name, shift, xi in (("published", 0.0, assumptions.xi), ("centered", middle, assumptions.half_range)):
        mean, error = _surrogate(sums, shift)
        worst = max_form(xi, assumptions.horizon, most["lower_tv"]), sum_form(xi, sum_tv)
        penalty = min(worst)
        row[name] = {
            "surrogate": mean,
            "surrogate_error": error,
            "max_form": worst[0],
            "sum_form": worst[1],
            "bound": mean - penalty,
            "over": penalty / abs(mean) if mean else None,
            "positive_below": {
                "max_tv": largest_max_tv(mean, xi, assumptions.horizon),
                "sum_tv": largest_sum_tv(mean, xi),
            },
            "says": _says(mean, penalty, assumptions.high - assumptions.low),
        }
    return finite(row)


def _surrogate(sums: Mapping[str, float], shift: float) -> tuple[float, float | None]:
    """Returns the mean of (R − shift)·Σ_t (r_t − 1) over sequences, and its standard error."""
    num = sums["sequences"]
    mean = (sums["reward·gap"] - shift * sums["gap"]) / num
    squares = sums["(reward·gap)²"] - 2 * shift * sums["reward·gap²"] + shift**2 * sums["gap²"]
    return mean, math.sqrt(max(squares / num - mean**2, 0.0) / (num - 1)) if num > 1 else None


def _says(surrogate: float, penalty: float, reward_range: float) -> str:
    if surrogate == penalty == 0:
        return "unchanged"
    if surrogate > penalty:
        return "improves"
    return "limits the loss" if surrogate - penalty > -reward_range else "nothing"


def text(report: Mapping[str, Any]) -> str:
    """Formats the bound of every update for the terminal."""
    updates = report["updates"]
    several = any(update["update"] for update in updates)
    return "\n".join(
        [
            *wrapped(
                f"{report['sequences']:,} sequences × updates, {report['tokens']:,} tokens × updates; rewards from "
                f"{report['rewards'][0]:g} to {report['rewards'][1]:g}, so ξ = {report['xi']:g}; "
                f"T = {report['horizon']:,}"
            ),
            *wrapped(
                f"μ is {report['anchor']}_logp; δ = {report['ball']['tv']:.3g} in TV, from {report['ball']['source']}"
            ),
            "",
            *table([HEADER, *(_row(update, several) for update in updates)]),
            "",
            *_notes(report),
        ]
    )


def _row(update: Mapping[str, Any], several: bool) -> list[str]:
    published = update["published"]
    return [
        f"{update['step']}.{update['update']}" if several else f"{update['step']}",
        f"{update['age']}",
        percent(update["inside"]),
        _number(update["max_tv"][0]),
        f"{_number(published['surrogate'])}±{_number(published['surrogate_error'], digits=1)}",
        _number(published["max_form"]),
        _number(published["sum_form"]),
        "–" if published["over"] is None else f"{_number(published['over'])}×",
        _number(published["positive_below"]["max_tv"]),
        _number(published["bound"]),
    ]


def _number(x: float | None, digits: int = 2) -> str:
    return "–" if x is None else f"{x:.{digits}g}"


def _notes(report: Mapping[str, Any]) -> list[str]:
    ball, lines = report["ball"], []
    for name, xi in (("published", report["xi"]), ("centered", report["half_range"])):
        counts = Counter(update[name]["says"] for update in report["updates"])
        of = "as published" if name == "published" else "with the middle of the rewards subtracted"
        said = ", ".join(f"{counts[key]} {said}" for key, said in SAYS.items() if counts[key])
        lines += wrapped(f"{len(report['updates'])} updates, bound {of} (ξ = {xi:g}): {said}.")
    kl = "" if ball["kl"] is None else f" (KL ≤ {ball['kl']:g})"
    lines += wrapped(
        f"If every state had TV ≤ {ball['tv']:.3g}{kl}: max form {ball['max_form']:.3g}, sum form at most "
        f"{ball['sum_form']:.3g}. A reward changes by at most {report['rewards'][1] - report['rewards'][0]:g}."
    )
    lines += wrapped(
        "These are estimates, not a guarantee. The max form uses the largest TV that a recorded token proves; other "
        "states may have a larger one. π was trained on the sequences that the surrogate averages."
    )
    if report["truncated_sampling"]:
        lines += wrapped(
            "The sampler excluded tokens (top-p, top-k or min-p): the max form does not hold for such a μ, and the "
            "sum form is estimated too low."
        )
    if report["faulty"] or report["unrewarded"]:
        lines += wrapped(
            f"Left out: {report['faulty']:,} sequences × updates with a faulty token, {report['unrewarded']:,} without "
            "a reward."
        )
    return lines
