"""Three regions on two-digit addition in verl's `main_ppo` on Ray, with vLLM as the sampler on a CPU.

    TRUSTRL_VLLM_PYTHON=<vLLM's environment>/bin/python python studies/09-engines-learn/verl_learning.py run
    python studies/09-engines-learn/verl_learning.py draw     # writes docs/figures/verl-learning.png
    python studies/09-engines-learn/verl_learning.py table    # prints the table of docs/results/engines.md

One run is 30 training steps of 128 completions with 8 updates each (two epochs of four mini-batches). The sampler uses
bfloat16, the trainer float32. One run uses two FSDP2 ranks. Runs that docs/data/verl-learning.json already holds are
skipped.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs/data/verl-learning.json"
FIGURE = Path(__file__).parents[2] / "docs/figures/verl-learning.png"
STEPS, EPOCHS, MINI_BATCHES = 30, 2, 4
REGIONS = ["dppo-binary-tv", "dppo-topk-tv", "troll"]
RUNS = [*((region, 1, 1) for region in REGIONS), ("dppo-topk-tv", 2, 1), *((region, 1, 2) for region in REGIONS)]
"""(region, FSDP2 ranks, seed)."""

KEPT = {
    "reward": "critic/score/mean",
    "masked_share": "actor/trustrl/masked_share",
    "projected_share": "actor/trustrl/projected_share",
    "divergence_mean": "actor/trustrl/divergence_mean",
    "gap_abs_mean": "actor/trustrl/gap_abs_mean",
    "ratio_mean": "actor/trustrl/ratio_mean",
    "mismatch_abs_mean": "actor/trustrl/mismatch_abs_mean",
    "grad_norm": "actor/grad_norm",
    "seconds": "timing_s/step",
    "sync_seconds": "timing_s/update_weights",
    "generation_seconds": "timing_s/gen",
    "update_seconds": "timing_s/update_actor",
}


def train(region: str, ranks: int, seed: int) -> dict:
    """Runs `main_ppo` once. The metrics come from verl's file logger."""
    from trustrl.world import models
    from trustrl.world.verl_dataset import write_parquet

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        files = [
            write_parquet(out / "train.parquet", "arithmetic", "train", count=2000, seed=seed),
            write_parquet(out / "held_out.parquet", "arithmetic", "held_out", count=400, seed=seed),
        ]
        settings = [
            f"data.train_files={files[0]}", f"data.val_files={files[1]}", "data.train_batch_size=16",
            f"data.seed={seed}",
            "data.max_prompt_length=16", "data.max_response_length=8", "--plain-prompts",
            f"actor_rollout_ref.model.path={models.path('tiny')}", "actor_rollout_ref.rollout.name=vllm_cpu",
            "actor_rollout_ref.rollout.dtype=bfloat16", "actor_rollout_ref.rollout.n=8",
            f"actor_rollout_ref.rollout.seed={seed}", f"actor_rollout_ref.actor.ppo_epochs={EPOCHS}",
            f"actor_rollout_ref.actor.ppo_mini_batch_size={16 // MINI_BATCHES}",
            "actor_rollout_ref.actor.optim.lr=3e-4", f"actor_rollout_ref.actor.data_loader_seed={seed}",
            f"actor_rollout_ref.actor.policy_loss.loss_mode=trustrl-{region}", f"trainer.n_gpus_per_node={ranks}",
            "actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig",
            "+actor_rollout_ref.actor.policy_loss.metrics=all",
            f"trainer.total_training_steps={STEPS}", "trainer.val_before_train=True", f"trainer.test_freq={STEPS}",
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True",
            "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
            "trainer.logger=[file]", "trainer.save_freq=-1", f"hydra.run.dir={out / 'hydra'}",
        ]  # fmt: skip
        environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(out / "steps.jsonl"), "HF_HUB_OFFLINE": "1"}
        start = time.perf_counter()
        command = [sys.executable, "-W", "ignore", "-m", "trustrl_verl_cpu", *settings]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500, cwd=out)
        if done.returncode:
            sys.exit(done.stdout[-2000:] + done.stderr[-4000:])
        logs = [json.loads(line)["data"] for line in (out / "steps.jsonl").read_text().splitlines()]
    steps = [log for log in logs if "actor/grad_norm" in log]
    held_out = [
        value for log in logs for name, value in log.items() if name.startswith("val-core/") and "mean@1" in name
    ]
    return {
        "region": region, "ranks": ranks, "seed": seed, "seconds": time.perf_counter() - start, "held_out": held_out,
        "steps": {short: [step.get(name) for step in steps] for short, name in KEPT.items()},
    }  # fmt: skip


def run_all() -> None:
    """Makes the missing runs one after the other and writes the file after each."""
    done = json.loads(DATA.read_text()) if DATA.exists() else []
    for region, ranks, seed in RUNS:
        if any((r["region"], r["ranks"], r["seed"]) == (region, ranks, seed) for r in done):
            continue
        found = train(region, ranks, seed)
        done.append(found)
        DATA.write_text(json.dumps(done, indent=1) + "\n")
        reward = found["steps"]["reward"]
        print(
            f"{region} on {ranks} rank(s), seed {seed}: "
            f"reward {sum(reward[:3]) / 3:.2f} -> {sum(reward[-3:]) / 3:.2f}, "
            f"held out {found['held_out']}, {found['seconds']:.0f} s", file=sys.stderr,
        )  # fmt: skip


def draw() -> None:
    """Draws the reward and the share of tokens that the region acted on, by step: mean and range over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from trustrl.runs.run_verdict import windows

    styles = {  # the colors of TRL's figure
        ("dppo-binary-tv", 1): ("#0072b2", "-"), ("dppo-topk-tv", 1): ("#009e73", "--"),
        ("troll", 1): ("#d55e00", "-."), ("dppo-topk-tv", 2): ("#555555", ":"),
    }  # fmt: skip
    made = json.loads(DATA.read_text())
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    for (region, ranks), (colour, line) in styles.items():
        runs = [run["steps"] for run in made if (run["region"], run["ranks"]) == (region, ranks)]
        acted = "projected_share" if region == "troll" else "masked_share"
        seeds = f"{len(runs)} seed{'s' * (len(runs) > 1)}"
        label = f"{region}, {seeds}{', two ranks' if ranks == 2 else ''}"
        for axes, name, unit in ((left, "reward", 1), (right, acted, 100)):
            at_each = list(zip(*(windows([unit * x for x in run[name]], 5) for run in runs), strict=True))
            steps, mean = range(1, STEPS + 1), [sum(values) / len(values) for values in at_each]
            axes.plot(steps, mean, line, color=colour, lw=1.6, label=label)
            axes.fill_between(steps, list(map(min, at_each)), list(map(max, at_each)), color=colour, alpha=0.12, lw=0)
    left.set(
        xlabel="training step", ylabel="mean reward of 128 completions", ylim=(0, 1), title="Reward, mean of 5 steps"
    )
    right.set(
        xlabel="training step", ylabel="% of tokens", title="Tokens stopped (DPPO) or projected (TROLL)", ylim=(0, None)
    )
    left.legend(frameon=False, loc="lower right")
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(FIGURE, dpi=150)


def table() -> None:
    """Prints a Markdown table row for each run."""

    def mean(values: list[float]) -> float:
        return sum(values) / len(values)

    for run in json.loads(DATA.read_text()):
        steps, before, after = run["steps"], run["held_out"][0], run["held_out"][-1]
        stopped = mean(steps["projected_share" if run["region"] == "troll" else "masked_share"])
        first, last = mean(steps["reward"][:3]), mean(steps["reward"][-3:])
        a, b, c, d = (f"{x:.2f}" for x in (before, after, first, last))
        print(
            f"| {run['region']} | {run['ranks']} | {run['seed']} | {a} → {b} | {c} → {d} "
            f"| {100 * stopped:.1f}% | {statistics.median(steps['seconds']):.1f} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["run", "draw", "table"])
    {"run": run_all, "draw": draw, "table": table}[parser.parse_args().what]()


if __name__ == "__main__":
    main()
