"""Runs a recipe on verl: writes the data as Parquet, starts `main_ppo`, and translates its log to trustrl's metrics."""

import json
import os
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, EngineError
from trustrl.files import last_lines, write_whole
from trustrl.optional_imports import need, require
from trustrl.runner import trackers
from trustrl.runner.checkpoints import Survey, checkpoints_in, refuse_foreign
from trustrl.runner.commit_points import Committer, loss_before, take_back
from trustrl.runner.directory import RunDirectory
from trustrl.runner.evaluation_sets import passed_on_verl, problems_of
from trustrl.runner.manifests import Seal, fault_of, is_marked, write_manifest
from trustrl.runner.processes import Progress, ends_with_its_parent
from trustrl.runner.ray_cluster import wait_for_nodes
from trustrl.runner.recipe import Recipe, check_enough
from trustrl.runner.signing import load_key
from trustrl.runner.verl_command import ANSWERS, HELD_OUT, TRAIN, command, hydra, quoted
from trustrl.runner.verl_cpu_settings import PACKAGE
from trustrl.runs.metric_names import ACCURACY, ADVANTAGES, AT_LIMIT, LONGEST, VERL_NAMES
from trustrl.world import models
from trustrl.world.tasks import Task, load
from trustrl.world.verl_dataset import SOURCE, benchmark_row, verl_row, write_parquet, write_rows

POLLING_SECONDS = 0.5
QUIET_SECONDS = 600.0
"""Seconds without a step after which a run warns. Three times its longest step, if that is longer."""

PREFIX, TRACKER = "global_step_", "latest_checkpointed_iteration.txt"
NEEDED = ("actor", "data.pt")
"""Parts of a checkpoint. Without `data.pt`, verl restarts the data from the beginning without an error."""

KEPT = (AT_LIMIT, LONGEST, *ADVANTAGES)
"""Metrics that `trustrl explain` reads, kept under verl's names."""


def require_packages(recipe: Recipe) -> None:
    """Raises if verl, the package that runs it on a CPU, or the recipe's tracker is not installed. Imports nothing.

    Raises:
        MissingPackageError: If one is not installed.
    """
    on_cpu = recipe.engine.device == "cpu"
    for name in ("verl", PACKAGE) if on_cpu else ("verl",):
        require(name, advice=f'Run `pip install "trustrl[{"verl,verl-cpu" if on_cpu else "verl"}]"`.')
    trackers.require_package(recipe)


def train(recipe: Recipe, directory: RunDirectory, progress: Progress) -> None:
    """Writes the data, starts verl from the newest intact checkpoint, and translates its log line by line.

    Raises:
        ConfigError: If others wrote the checkpoint, own it or can write to it.
        EngineError: If verl exits with an error, which is in `verl.log`, or if all checkpoints are damaged.
    """
    folder = directory.path.resolve()
    model = models.path(recipe.model.name)
    seal = Seal(load_key(progress.log), directory.run_id)
    survey = survey_of(directory, progress, seal)
    batches, checkpoint, updates = survey.step, survey.chosen, recipe.schedule.updates_per_batch
    done = batches * updates
    sets = _write_data(recipe, folder)
    loss = None if checkpoint is None else survey.losses.get(checkpoint)
    take_back(directory, checkpoint, done, loss, progress.log)
    committer = Committer(directory)
    wait_for_nodes(recipe.engine.nodes, progress.log)
    if done:
        progress.log(f"resuming after step {done}")
    log = folder / f"verl-{time.time_ns()}.jsonl"  # verl truncates the file it is given
    ours = {**trackers.environment(recipe, folder), "VERL_FILE_LOGGER_PATH": str(log)}
    environment = {**ours, **os.environ, "VERL_FILE_LOGGER_PATH": str(log)}
    # A Ray cluster that is already running has a separate environment, and verl logs in one of its processes.
    passed_on = [f"+ray_kwargs.ray_init.runtime_env.env_vars.{name}={quoted(environment[name])}" for name in ours]
    with (folder / "verl.log").open("ab") as output:
        # A new session, so that Ray's processes do not outlive the run.
        process = subprocess.Popen(
            [*command(recipe, folder, model), *resumption(checkpoint), *passed_on], stdout=output,
            stderr=subprocess.STDOUT, env=environment, cwd=folder, start_new_session=True,
            preexec_fn=ends_with_its_parent,
        )  # fmt: skip
        try:
            _follow(
                process, log, recipe, directory, progress, sets,
                lambda logged: _mark(directory.checkpoints, range(batches + 1, logged + 1), seal, committer, updates),
            )  # fmt: skip
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                try:
                    process.wait(timeout=20)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
    log.unlink(missing_ok=True)
    if process.returncode:
        raise EngineError(
            f"verl must exit without an error, got code {process.returncode}. The end of its log:\n"
            + "\n".join(last_lines(folder / "verl.log", 15))
        )
    logged = max((row["step"] for row in directory.rows("metrics")), default=0)
    if logged < recipe.schedule.steps:
        raise EngineError(
            f"verl must log {recipe.schedule.steps} steps, got {logged}, though it ended without an error. The node "
            f"that writes verl's log must see {folder}. See verl.log there."
        )
    committer.commit(recipe.schedule.steps, recorded=recipe.schedule.steps // updates)


def _write_data(recipe: Recipe, folder: Path) -> dict[str, int]:
    """Writes the data unless it is there. Returns the number of held-out problems by verl's name of their set."""
    task = load(recipe.task.name, **recipe.task.settings)
    wanted = {TRAIN: ("train", recipe.task.problems)}
    if not recipe.evaluation.sets:
        held_out = recipe.evaluation.count if task.endless else min(recipe.evaluation.count, len(task.rows("held_out")))
        wanted[HELD_OUT] = ("held_out", held_out)
    elif not (folder / HELD_OUT).exists():
        write_rows(folder / HELD_OUT, _benchmarks(recipe, task))
    for name, (split, count) in wanted.items():
        if not (folder / name).exists():
            write_parquet(
                folder / name, recipe.task.name, split, count=count, seed=recipe.schedule.seed, chat=recipe.task.chat,
                **recipe.task.settings,
            )  # fmt: skip
    parquet = need("pyarrow.parquet", extra="verl")
    check_enough(recipe, parquet.read_metadata(folder / TRAIN).num_rows)
    return dict(Counter(parquet.read_table(folder / HELD_OUT, columns=["data_source"])["data_source"].to_pylist()))


def _benchmarks(recipe: Recipe, task: Task) -> list[dict[str, Any]]:
    """Returns the problems of all benchmarks, each with the number of its answers and its sampling settings."""
    pairs = [(block, row) for block, problems in problems_of(recipe, task) for row in problems]
    return [
        benchmark_row(
            verl_row(row, index, recipe.task.name, "held_out", recipe.task.settings),
            block.answers or 1, block.temperature or 0.0, block.top_p or 1.0,
        )
        for index, (block, row) in enumerate(pairs)
    ]  # fmt: skip


def survey_of(directory: RunDirectory, progress: Progress, seal: Seal) -> Survey:
    """Chooses the newest intact checkpoint, and renames newer ones. Chooses none if the run has not saved one.

    verl records the number of its newest complete checkpoint. Then `_mark` writes the manifest. trustrl 0.1.0 wrote
    none, so in its runs verl's number decides which checkpoints are complete.

    Raises:
        ConfigError: If others wrote the checkpoint, own it or can write to it.
        EngineError: If all checkpoints of the run are damaged, or the run has lost files before all of them.
    """
    folder = directory.checkpoints
    saved, trusted = _saved_batches(folder), directory.trust_checkpoints
    saved_without_manifest = saved if trusted or seal.run is None else 0

    def complete(checkpoint: Path) -> bool:
        return is_marked(checkpoint) or _batches(checkpoint) <= saved_without_manifest or not checkpoint.is_dir()

    def fault(checkpoint: Path) -> str | None:
        if not trusted:
            refuse_foreign(directory.path, checkpoint)
        wrong = fault_of(checkpoint, None if trusted else seal)
        if wrong is None and not trusted:
            _refuse_files_elsewhere(checkpoint)
        return wrong or next((f"{name} is missing" for name in NEEDED if not (checkpoint / name).exists()), None)

    checkpoints = checkpoints_in(folder, PREFIX)
    if saved > 0:
        checkpoints.setdefault(saved, folder / f"{PREFIX}{saved}")  # a deleted checkpoint is a fault too
    survey = Survey(
        dict(sorted(checkpoints.items(), reverse=True)), complete, fault,
        partial(loss_before, directory), accept_loss=directory.accept_loss,
    )  # fmt: skip
    survey.refuse_if_none_is_left()
    if survey.rejected:
        # Before renaming, because the next checkpoint that verl saves there is not complete yet.
        write_whole(folder / TRACKER, str(survey.step))
        survey.set_aside(progress.log)
    return survey


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


def _batches(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _refuse_files_elsewhere(checkpoint: Path) -> None:
    """Raises if files of a rank are on another node's disk, where verl would load them unverified."""
    for file in sorted((checkpoint / "actor").glob("*_world_size_*_rank_0.pt")):
        start, _, world = file.name.removesuffix("_rank_0.pt").rpartition("_")
        for rank in range(int(world) if world.isdecimal() and len(world) < 8 else 0):
            name = f"{start}_{world}_rank_{rank}.pt"
            if not (checkpoint / "actor" / name).is_file():
                raise ConfigError(
                    f"All files of a checkpoint must be in the run's directory, got {checkpoint} without actor/{name}. "
                    "Put the run on a file system that all nodes share. trustrl cannot verify files on other nodes, "
                    "and verl unpickles them. If you trust all nodes, add --trust-checkpoint."
                )


def _mark(folder: Path, batches: range, seal: Seal, committer: Committer, updates: int) -> None:
    """Writes the manifests of the checkpoints that verl has completed in this process, and of no others.

    verl logs a batch after it has saved its checkpoint. A checkpoint is marked once its batch is in the metrics.
    """
    saved = _saved_batches(folder)
    for batch, checkpoint in sorted(checkpoints_in(folder, PREFIX).items()):
        complete = batch in batches and batch <= saved and all((checkpoint / name).exists() for name in NEEDED)
        if complete and not is_marked(checkpoint):
            run_files = committer.commit(batch * updates, recorded=batch)
            with suppress(FileNotFoundError):  # verl has just deleted it
                write_manifest(checkpoint, seal, run_files)


def _follow(
    process: Any,
    log: Path,
    recipe: Recipe,
    directory: RunDirectory,
    progress: Progress,
    sets: Mapping[str, int],
    mark: Callable[[int], None],
) -> None:
    """Translates verl's log until verl ends. Calls `mark` with the last batch that verl has logged."""
    read, logged, began = 0, 0, time.monotonic()
    stepped, patience = began, QUIET_SECONDS
    while True:
        ended = process.poll() is not None
        whole = _whole_lines(log, read)
        read += len(whole)
        for line in whole.splitlines():
            entry = json.loads(line)
            _translate(entry["step"], entry["data"], recipe, directory, progress, sets, time.monotonic() - began)
            logged = max(logged, entry["step"])
        mark(logged)
        if ended:
            return
        quiet = time.monotonic() - stepped
        if whole:
            stepped, patience = time.monotonic(), max(patience, 3 * quiet)
        elif quiet > patience:
            patience *= 2
            progress.log(
                f"warning: verl has finished no step for {quiet:.0f} s. It may wait for a process that has died: "
                f"see {directory.path / 'verl.log'}. To continue from the last checkpoint, stop this command and run "
                "it again with --resume."
            )
        time.sleep(POLLING_SECONDS)


def _whole_lines(log: Path, read: int) -> bytes:
    """Returns the complete lines behind the first `read` bytes, and reads no others: the log of a long run is large."""
    if not log.exists():
        return b""
    with log.open("rb") as opened:
        opened.seek(read)
        text = opened.read()
    return text[: text.rfind(b"\n") + 1]


def _translate(
    batch: int,
    data: Mapping[str, Any],
    recipe: Recipe,
    directory: RunDirectory,
    progress: Progress,
    sets: Mapping[str, int],
    seconds: float,
) -> None:
    step = batch * recipe.schedule.updates_per_batch
    scores = {name.split("/", 1)[1].rsplit("/", 2)[0]: data[name] for name in data if ACCURACY.fullmatch(name)}
    if scores and not any(row["step"] == step for row in directory.rows("evaluation")):
        counts = {name: sets.get(name, recipe.evaluation.count) for name in scores}  # engine.settings may name others
        names = {name: short if (short := name.removeprefix(SOURCE)) not in scores else name for name in scores}
        passed = {}
        if recipe.evaluation.needs_answers:
            answers = {block.name: block.answers or 1 for block in recipe.evaluation.blocks()}
            lines = sum(counts[name] * answers.get(names[name], 1) for name in scores)
            passed = passed_on_verl(directory.path / ANSWERS / f"{batch}.jsonl", recipe, lines)
        mean = directory.append_evaluation(step, {names[name]: (scores[name], counts[name]) for name in scores}, passed)
        progress.log(f"held-out accuracy {mean:.3f} at step {step}")
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
    metrics = {ours: data[theirs] for theirs, ours in VERL_NAMES.items() if theirs in data}
    metrics |= {name: data[name] for name in KEPT if name in data}
    prefix = "actor/trustrl/"
    return metrics | {name.removeprefix("actor/"): value for name, value in data.items() if name.startswith(prefix)}
