"""Runs a recipe on verl: writes the data as Parquet, starts `main_ppo`, and translates its log to trustrl's metrics."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from trustrl.errors import EngineError
from trustrl.optional_imports import require
from trustrl.runner import trackers
from trustrl.runner.checkpoints import Survey, checkpoints_in, fault_of, is_marked, refuse_foreign, write_manifest
from trustrl.runner.directory import RunDirectory, write_whole
from trustrl.runner.processes import Progress, ends_with_its_parent
from trustrl.runner.recipe import Recipe
from trustrl.runner.verl_command import HELD_OUT, TRAIN, command, hydra
from trustrl.world import models
from trustrl.world.tasks import load
from trustrl.world.verl_dataset import write_parquet

POLLING_SECONDS = 0.5
PREFIX, TRACKER = "global_step_", "latest_checkpointed_iteration.txt"
NEEDED = ("actor", "data.pt")
"""Parts of a checkpoint. Without `data.pt`, verl restarts the data from the beginning without an error."""

NAMES = {
    "critic/score/mean": "reward", "actor/pg_loss": "loss", "actor/grad_norm": "grad_norm", "actor/lr": "learning_rate",
    "response_length/mean": "completion_length", "actor/entropy": "entropy",
}  # fmt: skip
"""verl's metric names and trustrl's. All of `actor/trustrl/*` is kept too."""

KEPT = ("response_length/clip_ratio", "response_length/max", "critic/advantages/min", "critic/advantages/max")
"""Metrics that `trustrl explain` reads, kept under verl's names."""

ACCURACY = re.compile(r"val-core/.*/(?:acc|reward)/mean@\d+")


def require_packages(recipe: Recipe) -> None:
    """Raises if verl or the recipe's tracker is not installed. Imports neither.

    Raises:
        MissingPackageError: If one is not installed.
    """
    require("verl", advice='Run `pip install "trustrl[verl]"`.')
    trackers.require_package(recipe)


def train(recipe: Recipe, directory: RunDirectory, progress: Progress) -> None:
    """Writes the data, starts verl from the newest intact checkpoint, and translates its log line by line.

    Raises:
        ConfigError: If other users own the checkpoint or can write to it.
        EngineError: If verl exits with an error, which is in `verl.log`, or if all checkpoints are damaged.
    """
    folder = directory.path.resolve()
    model = models.path(recipe.model.name)
    batches, checkpoint = last_checkpoint(directory, progress)
    done = batches * recipe.schedule.updates_per_batch
    _write_data(recipe, folder)
    directory.forget_after(done)
    if done:
        progress.log(f"resuming after step {done}")
    log = folder / f"verl-{time.time_ns()}.jsonl"  # verl truncates the file it is given
    environment = {**trackers.environment(recipe, folder), **os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
    with (folder / "verl.log").open("ab") as output:
        # A new session, so that Ray's processes do not outlive the run.
        process = subprocess.Popen(
            [*command(recipe, folder, model), *resumption(checkpoint)], stdout=output, stderr=subprocess.STDOUT,
            env=environment, cwd=folder, start_new_session=True, preexec_fn=ends_with_its_parent,
        )  # fmt: skip
        try:
            _follow(process, log, recipe, directory, progress)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                _wait_or_kill(process)
    log.unlink(missing_ok=True)
    if process.returncode:
        last = (folder / "verl.log").read_text(encoding="utf-8", errors="replace").splitlines()[-15:]
        raise EngineError(
            f"verl must exit without an error, got code {process.returncode}. The end of its log:\n" + "\n".join(last)
        )


def _write_data(recipe: Recipe, folder: Path) -> None:
    task = load(recipe.task.name, **recipe.task.settings)
    held_out = recipe.evaluation.count if task.endless else min(recipe.evaluation.count, len(task.rows("held_out")))
    wanted = {TRAIN: ("train", recipe.task.problems), HELD_OUT: ("held_out", held_out)}
    for name, (split, count) in wanted.items():
        if not (folder / name).exists():
            write_parquet(
                folder / name, recipe.task.name, split, count=count, seed=recipe.schedule.seed, chat=recipe.task.chat,
                **recipe.task.settings,
            )  # fmt: skip


def last_checkpoint(directory: RunDirectory, progress: Progress) -> tuple[int, Path | None]:
    """Returns the batches and path of the newest intact checkpoint, or (0, None) if the run has not saved one.

    verl records the number of its newest complete checkpoint. A manifest also marks it, and lists its files.

    Raises:
        ConfigError: If other users own the checkpoint or can write to it.
        EngineError: If all checkpoints of the run are damaged.
    """
    folder = directory.checkpoints
    saved = _saved_batches(folder)

    def complete(checkpoint: Path) -> bool:
        return is_marked(checkpoint) or int(checkpoint.name.removeprefix(PREFIX)) <= saved

    def fault(checkpoint: Path) -> str | None:
        if not directory.trust_checkpoints:
            refuse_foreign(directory.path, checkpoint)
        missing = next((name for name in NEEDED if not (checkpoint / name).exists()), None)
        return fault_of(checkpoint) if missing is None else f"{missing} is missing"

    found = checkpoints_in(folder, PREFIX)
    if saved > 0:
        found.setdefault(saved, folder / f"{PREFIX}{saved}")  # a deleted checkpoint is a fault too
    survey = Survey(dict(sorted(found.items(), reverse=True)), complete, fault)
    survey.refuse_if_none_is_left()
    if survey.rejected:
        # Before renaming, because the next checkpoint that verl saves there is not complete yet.
        write_whole(folder / TRACKER, str(survey.step))
        survey.set_aside(progress.log)
    return survey.step, survey.chosen


def resumption(checkpoint: Path | None) -> list[str]:
    """Returns the settings that make verl load exactly this checkpoint."""
    if checkpoint is None:
        return ["trainer.resume_mode=disable"]
    return ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={hydra(checkpoint.resolve())}"]


def _saved_batches(folder: Path) -> int:
    """Returns the number of verl's newest complete checkpoint, or 0 if the file is missing or truncated."""
    file = folder / TRACKER
    text = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    return int(text) if re.fullmatch(r"[0-9]{1,18}", text) else 0


def _mark(folder: Path) -> None:
    """Writes the manifest of verl's newest complete checkpoint, unless it has one."""
    newest = folder / f"{PREFIX}{_saved_batches(folder)}"
    if newest.is_dir() and not is_marked(newest):
        with suppress(FileNotFoundError):  # verl has just replaced it
            write_manifest(newest)


def _follow(process: Any, log: Path, recipe: Recipe, directory: RunDirectory, progress: Progress) -> None:
    read, began = 0, time.time()
    while True:
        ended = process.poll() is not None
        text = log.read_bytes()[read:] if log.exists() else b""
        whole = text[: text.rfind(b"\n") + 1]
        read += len(whole)
        for line in whole.splitlines():
            found = json.loads(line)
            _translate(found["step"], found["data"], recipe, directory, progress, time.time() - began)
        _mark(directory.checkpoints)
        if ended:
            return
        time.sleep(POLLING_SECONDS)


def _translate(
    batch: int, data: Mapping[str, Any], recipe: Recipe, directory: RunDirectory, progress: Progress, seconds: float
) -> None:
    step = batch * recipe.schedule.updates_per_batch
    for name, value in data.items():
        known = any(row["step"] == step for row in directory.rows("evaluation"))
        if ACCURACY.fullmatch(name) and not known:
            directory.append("evaluation", {"step": step, "accuracy": value, "count": recipe.evaluation.count})
            progress.log(f"held-out accuracy {value:.3f} at step {step}")
    if "actor/grad_norm" in data:
        row = {"step": step, **metrics_of(data), "seconds": round(seconds, 2)}
        directory.append("metrics", row)
        progress.step(row)


def metrics_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """Returns verl's metrics of one step under trustrl's names.

    Example:
        >>> metrics_of({"critic/score/mean": 0.5, "actor/trustrl/masked_share": 0.01, "perf/throughput": 9.0})
        {'reward': 0.5, 'trustrl/masked_share': 0.01}
        >>> metrics_of({"response_length/clip_ratio": 0.25})
        {'response_length/clip_ratio': 0.25}
    """
    found = {ours: data[theirs] for theirs, ours in NAMES.items() if theirs in data}
    found |= {name: data[name] for name in KEPT if name in data}
    prefix = "actor/trustrl/"
    return found | {name.removeprefix("actor/"): value for name, value in data.items() if name.startswith(prefix)}


def _wait_or_kill(process: Any) -> None:
    try:
        process.wait(timeout=20)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
