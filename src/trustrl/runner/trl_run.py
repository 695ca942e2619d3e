"""Runs a recipe on TRL in this process, with `TrustRegionGRPOTrainer` and trustrl's metrics file."""

import json
import os
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError, TrustRLError
from trustrl.optional_imports import need, require
from trustrl.runner import trackers
from trustrl.runner.checkpoints import Survey, checkpoints_in, refuse_foreign, rotate
from trustrl.runner.commit_points import Committer, loss_before, take_back
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import Seal, fault_of, is_marked, write_manifest
from trustrl.runner.plan import launcher
from trustrl.runner.processes import Progress, is_main_process, take_a_port
from trustrl.runner.recipe import Recipe, check_enough
from trustrl.runner.signing import load_key
from trustrl.runner.trl_arguments import grpo_fields, lora_fields, trainer_arguments
from trustrl.runs.metric_names import CUT, OF_ROLLOUT, TRL_KEPT
from trustrl.world import models, tasks

PREFIX = "checkpoint-"
NEEDED = {
    "model weights": ("model", "pytorch_model", "adapter_model", "global_step"),
    "optimizer state": ("optimizer", "global_step"),
    "scheduler state": ("scheduler.pt", "global_step"),
    "trainer state": ("trainer_state.json",),
}
"""Parts of a checkpoint, and the prefixes of their file names. DeepSpeed keeps several parts in `global_step*`."""


def require_packages(recipe: Recipe) -> None:
    """Raises if TRL, the recipe's tracker, or vLLM if the recipe samples with it is not installed. Imports none.

    Raises:
        MissingPackageError: If one is not installed.
    """
    require("trl", advice='Run `pip install "trustrl[trl]"`.')
    trackers.require_package(recipe)
    if recipe.sampler.kind == "vllm":
        from trustrl.engines.vllm.options import require_vllm

        require_vllm()


def train(recipe: Recipe, directory: RunDirectory, progress: Progress) -> None:
    """Trains from the newest intact checkpoint, and evaluates before and after.

    With transformers as the sampler, a run that was killed and resumed gives the same result as an uninterrupted run.
    Checkpoints do not contain vLLM's random state, so with vLLM the samples after a resume differ.

    Raises:
        ConfigError: If the number of processes differs from the recipe's, or the trainer refuses a setting.
    """
    if (ranks := int(os.environ.get("WORLD_SIZE", "1"))) != recipe.engine.ranks:
        raise ConfigError(
            f"The run must have engine.nodes × engine.ranks_per_node = {recipe.engine.ranks} processes, got {ranks}. "
            f"Start it with `{launcher(recipe)} ...`."
        )
    main = is_main_process()
    take_a_port()
    if recipe.sampler.kind == "vllm" and recipe.engine.device == "cpu":
        from trustrl.engines.vllm.options import set_cpu_environment

        set_cpu_environment()  # before vllm is imported
    with trackers.tracked(recipe, directory.path.resolve()), warnings.catch_warnings():
        # TRL 1.16 reads a name that transformers 5.23 has deprecated, once for each batch.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing` is deprecated", FutureWarning)
        _train(recipe, directory, progress, main)


def _train(recipe: Recipe, directory: RunDirectory, progress: Progress, main: bool) -> None:
    need("transformers.utils.logging", extra="trl").disable_progress_bar()  # `progress` replaces it
    args = _arguments(recipe, directory)  # transformers joins the ranks here
    seal, (done, checkpoint) = _agreed(recipe, directory, progress, main)
    if done and main:
        progress.log(f"resuming after step {done}")
    committer = Committer(directory) if main else None
    if done >= recipe.schedule.steps:  # the run was killed between its last checkpoint and its result
        _evaluate(recipe, directory, progress, done, _loaded(recipe, checkpoint))
        if committer is not None:
            _commit(committer, done)
        return
    trainer = _trainer(recipe, directory, progress, args, seal, committer)
    _evaluate(recipe, directory, progress, 0, trainer.model)
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    _evaluate(recipe, directory, progress, recipe.schedule.steps, trainer.model)
    if committer is not None:
        _commit(committer, recipe.schedule.steps)


def _commit(committer: Committer, step: int) -> dict[str, dict[str, Any]]:
    """Commits the run's files. The record counts the updates that are done, so its step 0 is step 1 of the metrics."""
    return committer.commit(step, recorded=step - 1)


def _agreed(recipe: Recipe, directory: RunDirectory, progress: Progress, main: bool) -> tuple[Seal | None, Any]:
    """Returns the seal, which only the first rank has, and the checkpoint that the first rank chose.

    One rank reads the files: a thousand ranks would each read a whole checkpoint.
    """
    seal, message = None, None
    if main:
        try:
            seal = Seal(load_key(progress.log), directory.run_id)
            survey = survey_of(recipe, directory, progress, seal)
            loss = None if survey.chosen is None else survey.losses.get(survey.chosen)
            take_back(directory, survey.chosen, survey.step, loss, progress.log)
            message = (survey.step, survey.chosen)
        except TrustRLError as error:
            message = error
    agreed = _from_first(message, recipe)
    if isinstance(agreed, Exception):
        raise agreed
    return seal, agreed


def _from_first(value: Any, recipe: Recipe) -> Any:
    """Returns the value of the first rank."""
    message = [value]
    if recipe.engine.ranks > 1:
        need("torch.distributed", extra="trl").broadcast_object_list(message, src=0)
    return message[0]


def survey_of(recipe: Recipe, directory: RunDirectory, progress: Progress, seal: Seal) -> Survey:
    """Chooses the newest intact checkpoint, and renames newer ones. Chooses none if the run has not saved one.

    Raises:
        ConfigError: If others wrote the checkpoint, own it or can write to it.
        EngineError: If all checkpoints of the run are damaged, or the run has lost files before all of them.
    """

    def fault(checkpoint: Path) -> str | None:
        if not directory.trust_checkpoints:
            refuse_foreign(directory.path, checkpoint)
        wrong = fault_of(checkpoint, None if directory.trust_checkpoints else seal)
        return wrong or _missing(checkpoint, recipe.engine.ranks) or _step_fault(checkpoint)

    survey = Survey(
        checkpoints_in(directory.checkpoints, PREFIX), is_marked, fault,
        partial(loss_before, directory), accept_loss=directory.accept_loss,
    )  # fmt: skip
    survey.refuse_if_none_is_left()
    survey.set_aside(progress.log)
    return survey


def _missing(checkpoint: Path, ranks: int) -> str | None:
    """Returns the fault if a checkpoint lacks a part. transformers skips some missing parts without an error."""
    _, folders, files = next(os.walk(checkpoint), ("", [], []))
    names = {*folders, *files}
    for what, starts in NEEDED.items():
        if not any(name.startswith(starts) for name in names):
            return f"it has no {what}"
    states = ["rng_state.pth"] if ranks == 1 else [f"rng_state_{rank}.pth" for rank in range(ranks)]
    return next((f"{state} is missing" for state in states if state not in names), None)


def _step_fault(checkpoint: Path) -> str | None:
    """Returns the fault if the trainer's state is not of the step in the directory's name."""
    try:
        step = json.loads((checkpoint / "trainer_state.json").read_bytes().decode())["global_step"]
    except (ValueError, RecursionError, TypeError, KeyError):
        return "trainer_state.json has no global_step"
    fits = isinstance(step, int) and f"{PREFIX}{step}" == checkpoint.name
    return None if fits else f"its trainer_state.json is of step {step!r:.20}"


def _arguments(recipe: Recipe, directory: RunDirectory) -> Any:
    from trl import GRPOConfig  # pyright: ignore[reportAttributeAccessIssue]

    fields = grpo_fields(recipe, str(directory.checkpoints))
    if "activation_checkpointing" in GRPOConfig.__dataclass_fields__:  # transformers 5.23 warns of the old name
        fields["activation_checkpointing"] = fields.pop("gradient_checkpointing")
    try:
        return GRPOConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"engine.settings must be fields of TRL's GRPOConfig, got: {error}.") from None
    except ValueError as error:
        raise ConfigError(f"TRL refuses the recipe's settings: {error}") from None


def _trainer(
    recipe: Recipe,
    directory: RunDirectory,
    progress: Progress,
    args: Any,
    seal: Seal | None,
    committer: Committer | None,
) -> Any:
    from transformers.trainer_callback import PrinterCallback

    from trustrl.engines.trl import TrustRegionGRPOTrainer

    keep, args.save_total_limit = args.save_total_limit, None  # transformers would delete any directory `checkpoint-*`
    if args.use_cpu:
        need("torch", extra="trl").set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    task = tasks.load(recipe.task.name, **recipe.task.settings)
    folder = models.path(recipe.model.name)
    dataset = task.dataset("train", recipe.task.problems, recipe.schedule.seed, recipe.task.chat)
    check_enough(recipe, len(dataset))
    lora = lora_fields(recipe)
    trainer = TrustRegionGRPOTrainer(
        model=folder,
        reward_funcs=task.reward,
        args=args,
        train_dataset=dataset,
        processing_class=_tokenizer(folder),
        callbacks=[_watcher(recipe, directory, progress), _keeper(keep, seal, committer)],
        region=recipe.region,
        recording=recipe.recording(directory.path),
        peft_config=None if lora is None else need("peft", extra="trl").LoraConfig(**lora),
        **trainer_arguments(recipe),
    )
    trainer.remove_callback(PrinterCallback)  # it prints to stdout, which is for data
    return trainer


def _watcher(recipe: Recipe, directory: RunDirectory, progress: Progress) -> Any:
    from transformers.trainer_callback import TrainerCallback

    began = time.monotonic()
    every = recipe.evaluation.every

    class Watcher(TrainerCallback):
        """Writes the metrics of each step, and evaluates every `evaluation.every` steps."""

        reward: Mapping[str, Any] = {}

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if every and state.global_step % every == 0 and state.global_step < recipe.schedule.steps:
                _evaluate(recipe, directory, progress, state.global_step, kwargs["model"])

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            if logs is None or "loss" not in logs or not is_main_process():
                return  # without a loss it is TRL's summary at the end
            row = {"step": state.global_step}
            row |= {
                name: value for name, value in logs.items() if name in (*TRL_KEPT, CUT) or name.startswith("trustrl/")
            }
            if "completions/mean_length" in logs:
                row["completion_length"] = logs["completions/mean_length"]
            # TRL logs the metrics of a rollout only at its first update; the later updates train on the same rollout.
            if "reward" in row:
                self.reward = {name: row[name] for name in (*OF_ROLLOUT, CUT, "completion_length") if name in row}
            row = {**row, **self.reward, "seconds": round(time.monotonic() - began, 2)}
            directory.append("metrics", row)
            progress.step(row)

    return Watcher()


def _keeper(keep: int | None, seal: Seal | None, committer: Committer | None) -> Any:
    from transformers.trainer_callback import TrainerCallback

    distributed = need("torch.distributed", extra="trl")

    class Keeper(TrainerCallback):
        """Marks a checkpoint once every rank has written its part, then deletes those beyond `keep`."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if distributed.is_available() and distributed.is_initialized():
                distributed.barrier()
            if seal is not None and committer is not None:
                folder = Path(args.output_dir)
                run_files = _commit(committer, state.global_step)
                write_manifest(folder / f"{PREFIX}{state.global_step}", seal, run_files)
                if keep is not None and keep > 0:
                    rotate(folder, PREFIX, keep, protected=state.best_model_checkpoint)

    return Keeper()


def _evaluate(recipe: Recipe, directory: RunDirectory, progress: Progress, step: int, model: Any) -> None:
    """Evaluates on held-out problems, always with transformers, unless this step was evaluated before.

    Each rank answers its share of the problems. The first one decides, and writes the accuracies.
    """
    main = is_main_process()
    if not _from_first(main and all(row["step"] != step for row in directory.rows("evaluation")), recipe):
        return
    from trustrl.runner.evaluation_sets import Accuracies, problems_of
    from trustrl.world.models.accuracy import Decoding

    schedule, accuracies = recipe.schedule, Accuracies()
    task = tasks.load(recipe.task.name, **recipe.task.settings)
    tokenizer = _tokenizer(models.path(recipe.model.name))
    for block, problems in problems_of(recipe, task):
        n, rows = block.answers or 1, [row for row in problems for _ in range(block.answers or 1)]
        decoding = Decoding(schedule.seed, schedule.max_completion_tokens, block.temperature or 0.0, block.top_p or 1.0)
        scores = _scores_of_all_ranks(model, tokenizer, task, rows, decoding)
        for index, row in enumerate(problems):
            own = scores[index * n : (index + 1) * n]
            accuracies.add(row.get("data_set", recipe.task.name), own, block.pass_at or ())
    if main:
        mean = directory.append_evaluation(step, accuracies.means(), accuracies.passed())
        progress.log(f"held-out accuracy {mean:.3f} at step {step}")


def _scores_of_all_ranks(
    model: Any, tokenizer: Any, task: tasks.Task, rows: list[tasks.Row], chosen: Any
) -> list[float]:
    """Returns the score of one answer to each problem. Each rank answers its share, with its own seed."""
    from trustrl.world.models.accuracy import answer_scores

    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    own = answer_scores(model, tokenizer, task, rows[rank::ranks], chosen._replace(seed=chosen.seed + rank))
    if ranks == 1:
        return own
    parts: list[Any] = [None] * ranks
    need("torch.distributed", extra="trl").all_gather_object(parts, own)
    scores = [0.0] * len(rows)
    for first, part in enumerate(parts):
        scores[first::ranks] = part
    return scores


def _tokenizer(folder: str) -> Any:
    return need("transformers", extra="models").AutoTokenizer.from_pretrained(folder, padding_side="left")


def _loaded(recipe: Recipe, folder: Path) -> Any:
    """Returns a checkpoint's model as the trainer had it: on a CPU, a large one would be evaluated for hours."""
    auto = need("transformers", extra="models").AutoModelForCausalLM
    return auto.from_pretrained(str(folder), dtype=recipe.model.dtype).to(recipe.engine.device)
