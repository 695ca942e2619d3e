"""Kills of TRL runs: aimed inside writes and phases, or at random times. Each run is resumed and compared."""

import json
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from failures import faults, forked, run_state
from failures.forked import Ended

STEPS, CHECKPOINT_EVERY = 8, 2
SETTINGS = (
    f"schedule.steps={STEPS}", f"schedule.checkpoint_every={CHECKPOINT_EVERY}", "evaluation.count=16",
    "evaluation.every=4", "optimiser.learning_rate=5e-4",
)  # fmt: skip
TOKENS_PER_STEP = 4 * 4 * 4
"""Most tokens of one step: prompts, completions and tokens of recipes/sanity.toml."""


@dataclass(frozen=True)
class Kill:
    """One way to end a run."""

    label: str
    faults: Mapping[str, str] = field(default_factory=dict)
    before: Callable[[], None] | None = None
    signalled: tuple[int, float] | None = None
    again: "Kill | None" = None
    """A second kill, during the resumption."""


class World:
    """Scratch folder with an uninterrupted run, made by a process of its own, and the recipe of all runs."""

    def __init__(self, scratch: Path, recipe: Path) -> None:
        self.scratch, self.recipe = scratch, recipe
        self.reference = scratch / "uninterrupted"
        self.log = scratch / "calls.log"

    def arguments(self, folder: Path) -> list[str]:
        """Returns the command of a run that resumes if it can."""
        return ["run", str(self.recipe), *SETTINGS, "--out", str(folder), "--resume"]

    def calls(self, part: str) -> tuple[list[str], float]:
        """Returns the calls of an uninterrupted run on files in a part of its folder, and its seconds."""
        folder = self.scratch / "counted"
        shutil.rmtree(folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        done = forked.run(self.arguments(folder), self.scratch / "counted.log", faults=faults.counting(part, self.log))
        if done.code or run_state.differences(folder, self.reference):
            raise RuntimeError(f"A run in a fork must equal one in a process: {done.said[-2000:]}")
        return faults.calls_in(self.log), done.seconds

    def at_calls(self, part: str, number: int, what: str) -> list[Kill]:
        """Returns kills spread evenly over the calls on files in `part`. Every second one tears a write in half."""
        total = len(self.calls(part)[0])
        wanted = sorted({1 + round(one * (total - 1) / (number - 1)) for one in range(number)})
        return [
            Kill(f"{what}, call {at} of {total}", faults.at_call(part, at, "tear" if index % 2 else "kill", self.log))
            for index, at in enumerate(wanted)
        ]

    def tried(self, kill: Kill) -> dict[str, Any]:
        """Kills a run, resumes it and returns what was lost and what differs."""
        folder = self.scratch / "killed"
        shutil.rmtree(folder, ignore_errors=True)
        first = self._once(folder, kill)
        second = None if kill.again is None else self._once(folder, kill.again)
        state = in_fork(lambda: run_state.state_after(folder), self.scratch)
        last = forked.run(self.arguments(folder), self.scratch / "resumed.log")
        different = ["the resumption failed"]
        if not last.code:
            different = in_fork(lambda: run_state.differences(folder, self.reference), self.scratch)
        resumed_after = _resumed_after(last.said)
        finished = first["ended"].code == 0
        lost = [] if finished else [int(step) for step in state["logged"] if int(step) > resumed_after]
        found = {
            "label": kill.label, "code": first["ended"].code, "said": _sentence(first["ended"]), "hit": first["hit"],
            "ended_before": finished, "second_code": second and second["ended"].code,
            "second_hit": second and second["hit"], "resumed_after": resumed_after, "resume_code": last.code,
            "resume_said": _notices(last), "lost_steps": len(lost),
            "lost_tokens": round(sum(state["logged"][str(step)] for step in lost)),
            "unreadable": state["unreadable"], "logged_but_not_recorded": len(state["logged_but_not_recorded"]),
            "different": different, "left": run_state.leftovers(folder),
        }  # fmt: skip
        if different:
            kept = self.scratch / "failed" / kill.label.replace("/", "-")
            shutil.rmtree(kept, ignore_errors=True)
            shutil.copytree(folder, kept)
        return found

    def _once(self, folder: Path, kill: Kill) -> dict[str, Any]:
        self.log.unlink(missing_ok=True)
        ended = forked.run(
            self.arguments(folder), self.scratch / "killed.log", faults=kill.faults, before=kill.before,
            signalled=kill.signalled,
        )  # fmt: skip
        calls = faults.calls_in(self.log) if kill.faults else []
        hit = calls[-1].replace(str(folder), "").split(" ", 1)[1] if calls else ""
        return {"ended": ended, "hit": hit}


def in_fork(function: Callable[[], Any], scratch: Path) -> Any:
    file = scratch / "answer.json"
    file.unlink(missing_ok=True)
    if forked.in_fork(lambda: _write(file, function())):
        raise RuntimeError("The comparison failed; see above.")
    return json.loads(file.read_text())


def _write(file: Path, data: Any) -> None:
    file.write_text(json.dumps(data))


def _resumed_after(said: str) -> int:
    lines = [line for line in said.splitlines() if "resuming after step " in line]
    return int(lines[-1].rpartition(" ")[2]) if lines else 0


def _notices(ended: Ended) -> list[str]:
    wanted = ("warning:", "error:", "resuming")
    return [line.strip() for line in ended.said.splitlines() if any(word in line for word in wanted)]


def _sentence(ended: Ended) -> str:
    return next((line for line in ended.said.splitlines() if line.startswith("error: ")), "")


def _timed(world: World, number: int, count: int) -> list[Kill]:
    seconds, draw = world.calls("/checkpoints/")[1], random.Random(number)
    name = signal.Signals(number).name
    times = sorted(draw.uniform(0.2, 0.8 * seconds) for _ in range(count))
    return [Kill(f"{name} after {at:.2f} of {seconds:.2f} s", signalled=(number, at)) for at in times]


def _twice(world: World) -> Iterator[Kill]:
    """Kills in the fourth checkpoint, and again while the resumption puts the folder in order."""
    for at in range(1, 11):
        second = Kill("", faults.at_call("/killed", at + 8, "kill", world.log))
        first = faults.at_call("/checkpoints/checkpoint-6", 8 + 9 * at, "tear", world.log)
        yield Kill(f"checkpoint-6, then call {at + 8} of the resumption", first, again=second)


EVALUATION = "trustrl.world.models.accuracy:answer_scores"
ROLLOUT = "trustrl.engines.trl:TrustRegionGRPOTrainer._generate_and_score_completions"
FORWARD = "torch.nn:Module.__call__"


def _logs(world: World) -> list[Kill]:
    return world.at_calls("metrics.jsonl", 8, "metrics") + world.at_calls("evaluation.jsonl", 4, "evaluation")


def _evaluation(_: World) -> list[Kill]:
    calls = (1, 120, 240, 360, 480, 600)
    return [Kill(f"evaluation, module call {at}", before=faults.killed_in(FORWARD, at, EVALUATION)) for at in calls]


def _updates(_: World) -> list[Kill]:
    return [
        *(Kill(f"optimizer step {at}", before=faults.killed_in("torch.optim:AdamW.step", at)) for at in range(1, 9, 2)),
        *(Kill(f"backward pass {at}", before=faults.killed_in("torch:Tensor.backward", at)) for at in range(2, 9, 2)),
    ]


def _rollouts(_: World) -> list[Kill]:
    calls = (1, 200, 400, 600)
    return [Kill(f"rollout, module call {at}", before=faults.killed_in(FORWARD, at, ROLLOUT)) for at in calls]


ROWS: dict[str, Callable[[World], list[Kill]]] = {
    "trl-checkpoint-write": lambda world: world.at_calls("/checkpoints/", 32, "checkpoint write"),
    "trl-record-write": lambda world: world.at_calls("/records", 26, "record write"),
    "trl-log-write": _logs,
    "trl-evaluation": _evaluation,
    "trl-update": _updates,
    "trl-rollout": _rollouts,
    "trl-killed-twice": lambda world: list(_twice(world)),
    "trl-random": lambda world: _timed(world, signal.SIGKILL, 16),
    "trl-term": lambda world: _timed(world, signal.SIGTERM, 6),
    "trl-int": lambda world: _timed(world, signal.SIGINT, 6),
}
"""Rows of this file, and the function that returns their kills."""


def made(world: World, name: str, kills: list[Kill]) -> list[dict[str, Any]]:
    """Makes the kills of a row, and prints each."""
    found = []
    for number, kill in enumerate(kills, 1):
        one = world.tried(kill)
        if one["ended_before"]:
            print(f"{name} {number}/{len(kills)}: {kill.label}: the run had ended before", file=sys.stderr, flush=True)
            continue
        found.append(one)
        good = "exact" if not found[-1]["different"] else f"DIFFERENT: {found[-1]['different']}"
        print(
            f"{name} {number}/{len(kills)}: {kill.label}: {found[-1]['hit']} code {found[-1]['code']}, resumed after "
            f"{found[-1]['resumed_after']}, {found[-1]['lost_steps']} steps lost, {good}",
            file=sys.stderr, flush=True,
        )  # fmt: skip
    return found
