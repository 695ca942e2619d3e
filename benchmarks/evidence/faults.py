"""Runs that evaluate `trustrl explain`: real TRL and vLLM runs with one seeded fault each, and healthy runs.

    python benchmarks/evidence/faults.py RUNS                # all missing runs, in an environment with vLLM
    python benchmarks/evidence/faults.py RUNS --only stale-1

Each run is a separate process and leaves a run directory as `trustrl run` does. The start-up checks would reject most
of these faults before the first step, so they are disabled in runs with a seeded fault. Severities and seeds were fixed
before any of these runs, and the rules of `trustrl explain` were frozen before that.
"""

import argparse
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

RECIPES = Path(__file__).parents[2] / "recipes"
TINY = ["schedule.steps=64", "schedule.checkpoint_every=64", "evaluation.count=200"]
SMOLLM2 = [
    "schedule.steps=12",
    "schedule.checkpoint_every=12",
    "schedule.prompts_per_step=2",
    "optimiser.warmup_steps=0",
    "evaluation.count=16",
]
RECORDS = ["records.sample=0.5"]

Fault = Callable[[Any, random.Random], None]
"""Function that breaks a trainer before it trains."""


def never_synced(trainer: Any, every: int | None) -> None:
    """Syncs weights to the sampler before the first batch, and then only at every n-th sync or never again."""
    sync, calls = trainer.vllm_generation.sync_weights, 0

    def seldom() -> None:
        nonlocal calls
        if calls == 0 or (every and calls % every == 0):
            sync()
        calls += 1

    trainer.vllm_generation.sync_weights = seldom


def sampled_with(trainer: Any, **settings: float) -> None:
    """Makes the sampler use settings that the trainer does not know."""
    for name, value in settings.items():
        if not hasattr(trainer.vllm_generation, name):
            raise SystemExit(f"TRL's VLLMGeneration has no {name}.")
        setattr(trainer.vllm_generation, name, value)


def head_left_behind(trainer: Any, noise: float | None) -> None:
    """Stops weight syncs from updating vLLM's copy of a tied head.

    The copy stays as loaded (`noise` 0), is off by noise of `noise` times its standard deviation, or is random (None),
    as after a start with dummy weights.
    """
    from trustrl.engines.vllm import weight_reload

    model = weight_reload.model_runner_of(trainer.vllm_generation.llm).model
    heads = weight_reload.tied_heads(model)
    if not heads:
        raise SystemExit("This model has no tied head.")
    draw = torch.Generator().manual_seed(0)
    for head in heads:
        kept = head.weight.data.clone()
        other = torch.randn(kept.shape, generator=draw).to(kept) * kept.float().std().to(kept)
        head.weight.data.copy_(other if noise is None else kept + noise * other)
        head.quant_method.process_weights_after_loading(head)  # packs a copy
        head.weight.data.copy_(kept)
    weight_reload.tied_heads = lambda model: []


def broken_reward(trainer: Any, broken: Callable[[int, int], bool]) -> None:
    """Sets some rewards to NaN: those for which `broken(step, number of the completion)` is True."""
    (reward,) = trainer.reward_funcs

    def with_nan(*args: Any, **kwargs: Any) -> list[float]:
        step = kwargs["trainer_state"].global_step
        return [float("nan") if broken(step, i) else one for i, one in enumerate(reward(*args, **kwargs))]

    trainer.reward_funcs[0] = with_nan


@dataclass(frozen=True)
class Run:
    """One run: a recipe, its changed settings, and its fault."""

    recipe: str
    settings: list[str]
    cause: str | None = None
    """The cause that `trustrl explain` should name; None for a healthy run."""

    severity: str = ""
    fault: Fault | None = None
    since: bool = False
    """True if the run was added after the first evaluation, for a rule that was added then."""


def tiny(*settings: str, **more: Any) -> Run:
    return Run("mismatch", [*TINY, *settings], **more)


def smollm2(*settings: str, **more: Any) -> Run:
    return Run("smollm2", [*SMOLLM2, "region.preset=dppo-binary-tv", *settings], **more)


def tied(*settings: str, **more: Any) -> Run:
    return tiny("model.name=tiny-tied", *settings, **more)


FP32 = "sampler.dtype=float32"
STALE, HOT, CUT, HEAD, NAN, RATE = (
    "stale weights",
    "wrong temperature",
    "truncated support",
    "tied head not synced",
    "non-finite values",
    "learning rate too large",
)

RUNS = {
    "stale-1": tiny(
        FP32, *RECORDS, cause=STALE, severity="never after the first batch", fault=lambda t, _: never_synced(t, None)
    ),
    "stale-2": tied(cause=STALE, severity="every 8th batch", fault=lambda t, _: never_synced(t, 8)),
    "stale-3": tiny(
        "region.preset=cispo",
        "schedule.updates_per_batch=4",
        cause=STALE,
        severity="every 3rd batch",
        fault=lambda t, _: never_synced(t, 3),
    ),
    "stale-4": smollm2(
        *RECORDS, cause=STALE, severity="never after the first batch", fault=lambda t, _: never_synced(t, None)
    ),
    "temperature-1": tiny(FP32, cause=HOT, severity="1.1", fault=lambda t, _: sampled_with(t, temperature=1.1)),
    "temperature-2": tied(*RECORDS, cause=HOT, severity="0.8", fault=lambda t, _: sampled_with(t, temperature=0.8)),
    "temperature-3": tiny(
        "region.preset=dppo-topk-tv",
        *RECORDS,
        cause=HOT,
        severity="1.3",
        fault=lambda t, _: sampled_with(t, temperature=1.3),
    ),
    "temperature-4": smollm2(*RECORDS, cause=HOT, severity="1.2", fault=lambda t, _: sampled_with(t, temperature=1.2)),
    "top-p-1": tiny(FP32, cause=CUT, severity=".98", fault=lambda t, _: sampled_with(t, top_p=0.98)),
    "top-p-2": tied("region.preset=ppo", cause=CUT, severity=".9", fault=lambda t, _: sampled_with(t, top_p=0.9)),
    "top-p-3": tiny(*RECORDS, cause=CUT, severity=".8", fault=lambda t, _: sampled_with(t, top_p=0.8)),
    "top-p-4": smollm2(*RECORDS, cause=CUT, severity=".95", fault=lambda t, _: sampled_with(t, top_p=0.95)),
    "head-1": tied(*RECORDS, cause=HEAD, severity="random", fault=lambda t, _: head_left_behind(t, None)),
    "head-2": tied(FP32, cause=HEAD, severity="noise of .05", fault=lambda t, _: head_left_behind(t, 0.05)),
    "head-3": tied(*RECORDS, cause=HEAD, severity="stays as loaded", fault=lambda t, _: head_left_behind(t, 0.0)),
    "head-4": smollm2(*RECORDS, cause=HEAD, severity="noise of .1", fault=lambda t, _: head_left_behind(t, 0.1)),
    "nan-1": tiny(
        cause=NAN,
        severity="1 % of rewards",
        fault=lambda t, r: broken_reward(t, lambda step, i: r.random() < 0.01),
    ),
    "nan-2": tied(
        FP32, cause=NAN, severity="one whole batch", fault=lambda t, _: broken_reward(t, lambda step, i: step == 30)
    ),
    "nan-3": tiny(
        *RECORDS,
        cause=NAN,
        severity="all from step 40 on",
        fault=lambda t, _: broken_reward(t, lambda step, i: step >= 40),
    ),
    "nan-4": smollm2(
        cause=NAN,
        severity="20 % of rewards",
        fault=lambda t, r: broken_reward(t, lambda step, i: r.random() < 0.2),
    ),
    "rate-1": tiny("schedule.updates_per_batch=1", "optimiser.learning_rate=1e-2", cause=RATE, severity="× 33"),
    "rate-2": tied("schedule.updates_per_batch=4", "optimiser.learning_rate=3e-3", cause=RATE, severity="× 10"),
    "rate-3": tiny(
        "region.preset=pg-is",
        *RECORDS,
        "schedule.updates_per_batch=8",
        "optimiser.learning_rate=5e-3",
        cause=RATE,
        severity="× 17",
    ),
    "rate-4": smollm2("optimiser.learning_rate=1e-3", cause=RATE, severity="× 100"),
    "healthy-1": tiny(FP32, *RECORDS),
    "healthy-2": tiny("schedule.updates_per_batch=4"),
    "healthy-3": tiny("region.preset=cispo", "schedule.updates_per_batch=1"),
    "healthy-4": tiny("region.preset=dppo-topk-tv", *RECORDS),
    "healthy-5": tied(),
    "healthy-6": tied("region.preset=ppo", *RECORDS),
    "healthy-7": tied(FP32, "region.preset=dppo-binary-kl", "schedule.updates_per_batch=4"),
    "healthy-8": tied("sampler.temperature=0.8"),
    "healthy-9": tiny("sampler.kind=transformers", FP32, "region.preset=troll", "schedule.updates_per_batch=4"),
    "healthy-10": tiny("sampler.temperature=1.2", "region.preset=drpo", *RECORDS),
    "healthy-11": smollm2(*RECORDS),
    "healthy-12": smollm2("region.preset=ppo"),
    "nan-5": tiny(
        since=True,
        cause=NAN,
        severity=".5 % of rewards",
        fault=lambda t, r: broken_reward(t, lambda step, i: r.random() < 0.005),
    ),
    "nan-6": tied(
        FP32,
        "region.preset=ppo",
        since=True,
        cause=NAN,
        severity="3 % of rewards",
        fault=lambda t, r: broken_reward(t, lambda step, i: r.random() < 0.03),
    ),
    "nan-7": smollm2(
        since=True,
        cause=NAN,
        severity="one reward",
        fault=lambda t, _: broken_reward(t, lambda s, i: s == 4 and i == 3),
    ),
    "healthy-13": tiny("schedule.updates_per_batch=4", "region.preset=troll", since=True),
    "healthy-14": tied(FP32, since=True),
}

FIRST_SEED = 700
"""Seeds that no earlier run used."""


def seed_of(name: str) -> int:
    return FIRST_SEED + list(RUNS).index(name)


def make(name: str, folder: Path) -> None:
    """Makes one run in this process."""
    from trustrl.runner import trl_run
    from trustrl.runner.recipe import load
    from trustrl.runner.run_recipe import run

    wanted = RUNS[name]
    recipe = load(
        str(RECIPES / f"{wanted.recipe}.toml"), [*wanted.settings, f"name={name}", f"schedule.seed={seed_of(name)}"]
    )
    if wanted.fault is not None:
        fault, build, arguments = wanted.fault, trl_run._trainer, trl_run.trainer_arguments

        def broken(*args: Any) -> Any:
            trainer = build(*args)
            fault(trainer, random.Random(seed_of(name)))
            return trainer

        trl_run._trainer = broken
        trl_run.trainer_arguments = lambda recipe: {**arguments(recipe), "startup_checks": False}
    run(recipe, folder / name, resume=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("runs", type=Path)
    parser.add_argument("--only", nargs="+", choices=list(RUNS), metavar="NAME", default=list(RUNS))
    parser.add_argument("--here", action="store_true", help="run in this process")
    options = parser.parse_args()
    for name in options.only:
        if options.here:
            make(name, options.runs)
        elif not (options.runs / name / "result.json").is_file():
            print(name, file=sys.stderr, flush=True)
            subprocess.run([sys.executable, __file__, str(options.runs), "--only", name, "--here"], check=False)


if __name__ == "__main__":
    main()
