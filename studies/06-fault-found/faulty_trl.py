"""Registered runs of stock TRL, made one after another: one process that imports TRL once and forks for each run.

    python studies/06-fault-found/faulty_trl.py RUNS [--only NAME ...] [--pilot]

Skips runs that are done, and can be stopped at any time: an unfinished run begins again. A run ends with a file
`<name>.done` with exit code and seconds, whatever the code. TRL's own trainer and loss; `record(trainer)` records
tokens, which changes nothing in the run, and TRL stores the completions.

`--pilot` shifts every seed, to time a run and to see whether its fault acts, without making a registered run.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from faults import FAULTS, ORDER, seed_of
from faulty_scores import SCORES, faulty_score
from seeded_runs import PLAIN
from seeded_trl import recipe_from, seed_fault, stock_trainer

BATCHES, FEWER, MANY, TO_COLLAPSE = 16, 8, 8, 64
"""Batches of a run, those of a run with at least `MANY` updates on each, and those in which an entropy collapses."""

LIMIT = 1200
PILOT = 100_000
PROBLEMS = 800


def updates_of(name: str) -> int:
    return next(int(one.split("=")[1]) for one in FAULTS[name].settings if "updates_per_batch" in one)


def make(name: str, folder: Path, seed: int) -> None:
    """Makes one run in this process."""
    from trustrl.engines.trl import record

    fault, updates = FAULTS[name].fault, updates_of(name)
    steps = updates * (FEWER if updates >= MANY else TO_COLLAPSE if "zeros" in fault else BATCHES)
    size = [f"schedule.steps={steps}", f"schedule.checkpoint_every={steps}", "schedule.prompts_per_step=8"]
    recipe, fields = recipe_from(FAULTS[name].settings, name, seed, size)
    # A run that breaks off leaves the state of its last checkpoint.
    kept = {
        "log_completions": True,
        "num_completions_to_print": 0,
        "save_steps": updates,
        "save_only_model": True,
        "save_total_limit": 1,
    }
    problems = fault.get("problems", PROBLEMS)
    trainer = stock_trainer(recipe, folder, kept | fields, problems, PROBLEMS // problems)
    if SCORES & {*fault}:
        trainer.reward_funcs[0] = broken(trainer.reward_funcs[0], fault, steps // updates, random.Random(seed))
    else:
        seed_fault(trainer, fault, random.Random(seed))
    if "extra_tokens" in fault:
        add_tokens(trainer, fault["extra_tokens"])
    record(trainer)
    trainer.train()


def broken(
    reward: Callable[..., list[Any]], fault: dict[str, Any], count: int, draw: random.Random
) -> Callable[..., list[Any]]:
    """Returns a reward function with the fault, for a run of `count` batches. TRL calls it once for each."""
    batches = -1

    def faulty(prompts: Any, completions: list[str], **columns: Any) -> list[Any]:
        nonlocal batches
        batches += 1
        scores = reward(prompts, completions, **columns)
        texts = zip(scores, completions, strict=True)
        return [faulty_score(score, text, fault, batches, count, draw) for score, text in texts]

    faulty.__name__ = "reward"
    return faulty


def add_tokens(trainer: Any, count: int) -> None:
    """Gives the sampler prompts that begin with special tokens which the trainer's prompts do not have."""
    generate, begin = trainer.vllm_generation.generate, [trainer.processing_class.bos_token_id] * count

    def prefixed(prompts: list[list[int]], **more: Any) -> Any:
        return generate(prompts=[begin + prompt for prompt in prompts], **more)

    trainer.vllm_generation.generate = prefixed


def forked(name: str, folder: Path, seed: int) -> int:
    """Makes one run in a fork of this process and returns its exit code. 124 if it took too long."""
    shutil.rmtree(folder / name, ignore_errors=True)
    child = os.fork()
    if child == 0:
        os.setsid()
        log = os.open(folder / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1), os.dup2(log, 2)
        code = 1
        try:
            make(name, folder / name, seed)
            code = 0
        except BaseException:  # the log has it, and the parent goes on with the next run
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.2)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 124


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    mine = [name for name in ORDER if FAULTS[name].engine == "stock trl"]
    parser.add_argument("--only", nargs="+", choices=mine, metavar="NAME", default=mine)
    parser.add_argument("--pilot", action="store_true")
    options = parser.parse_args()
    folder = options.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [name for name in options.only if not (folder / f"{name}.done").exists()]
    if any(PLAIN not in FAULTS[name].settings for name in wanted):
        from trustrl.engines.vllm.options import set_cpu_environment

        set_cpu_environment()
        import vllm  # noqa: F401
    import trl.trainer.grpo_trainer  # noqa: F401

    for name in wanted:
        began = time.time()
        code = forked(name, folder, seed_of(name) + PILOT * options.pilot)
        done = {"code": code, "seconds": round(time.time() - began), "pilot": options.pilot}
        (folder / f"{name}.done").write_text(json.dumps(done))
        print(name, done, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
