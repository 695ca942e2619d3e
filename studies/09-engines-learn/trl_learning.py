"""Four regions on two-digit addition in TRL on one CPU core: three seeds, on-policy and with 8 updates per batch.

    python studies/09-engines-learn/trl_learning.py run [--workers 2]  # runs missing from docs/data/trl-learning.json
    python studies/09-engines-learn/trl_learning.py draw               # writes docs/figures/trl-learning.png

One run is 100 optimizer steps of 128 completions. On-policy, the regions are nearly the same algorithm. The second
setting makes 8 updates from each batch of rollouts, where the regions act.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs/data/trl-learning.json"
FIGURE = Path(__file__).parents[2] / "docs/figures/trl-learning.png"
REGIONS = ["ppo", "dppo-binary-tv", "dppo-topk-tv", "troll"]
SEEDS = [0, 1, 2]
SETTINGS = {"on-policy": 1, "8 updates per batch": 8}
KEPT = ("trustrl/masked_share", "trustrl/projected_share", "trustrl/divergence_mean", "trustrl/entropy", "reward")


def train(region: str, seed: int, setting: str) -> dict:
    """Trains once. Returns held-out accuracy before and after, and a few metrics of each step."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import GRPOConfig

    import trustrl
    from trustrl.engines.trl import TrustRegionGRPOTrainer
    from trustrl.world import models, tasks
    from trustrl.world.models.pretrain import sampled_accuracy

    torch.set_num_threads(1)
    folder = models.path("tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    task = tasks.load("arithmetic")
    before = sampled_accuracy(model, tokenizer, task, count=1000, seed=seed)
    updates = SETTINGS[setting]
    with tempfile.TemporaryDirectory() as output:
        trainer = TrustRegionGRPOTrainer(
            model=model,
            reward_funcs=task.reward,
            args=GRPOConfig(
                output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], seed=seed,
                per_device_train_batch_size=128, num_generations=8, num_iterations=updates, max_completion_length=4,
                learning_rate=3e-4, lr_scheduler_type="constant", max_steps=100,
                logging_steps=1, save_strategy="no", disable_tqdm=True,
            ),
            train_dataset=task.dataset("train", count=2000, seed=seed),
            processing_class=tokenizer,
            region=trustrl.preset(region),
            behavior="trainer",
            metrics="all",
        )  # fmt: skip
        start, cpu = time.perf_counter(), time.process_time()
        trainer.train()
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    steps = [{k: log.get(k) for k in KEPT} for log in trainer.state.log_history if "trustrl/tokens" in log]
    for before_it, at in pairwise(steps):
        at["reward"] = before_it["reward"] if at["reward"] is None else at["reward"]  # logged once per rollout
    after = sampled_accuracy(trainer.model, tokenizer, task, count=1000, seed=seed)
    return {
        "region": region, "seed": seed, "setting": setting, "before": before, "after": after, "seconds": seconds,
        "cpu_seconds": cpu, "steps": {k: [s[k] for s in steps] for k in KEPT},
    }  # fmt: skip


def run_all(workers: int) -> None:
    """Runs each missing training in a separate process, `workers` at a time. Writes the file after every run."""
    done = json.loads(DATA.read_text()) if DATA.exists() else []
    known = {(r["region"], r["seed"], r["setting"]) for r in done}
    todo = [(r, s, t) for t in SETTINGS for s in SEEDS for r in REGIONS if (r, s, t) not in known]
    running: list = []
    while todo or running:
        while todo and len(running) < workers:
            region, seed, setting = todo.pop(0)
            command = [sys.executable, __file__, "one", region, str(seed), setting]
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment))
        process = running.pop(0)
        text = process.communicate()[0]
        if process.returncode:
            raise SystemExit(f"{process.args} failed with exit code {process.returncode}.")
        found = json.loads(text.splitlines()[-1])
        done.append(found)
        DATA.write_text("[\n" + ",\n".join(json.dumps(r) for r in done) + "\n]\n")
        print(
            f"{found['setting']:20} {found['region']:16} seed {found['seed']}  {found['before']:.3f} → "
            f"{found['after']:.3f}  {found['seconds']:.0f} s ({found['cpu_seconds']:.0f} CPU)",
            file=sys.stderr,
        )


def table(done: list[dict]) -> str:
    """Returns a Markdown table with mean and range over seeds."""
    rows = ["| setting | region | before | after, mean (range) | masked or projected share, mean | CPU seconds |"]
    rows.append("|---|---|---|---|---|---|")
    for setting in SETTINGS:
        for region in REGIONS:
            runs = [r for r in done if (r["region"], r["setting"]) == (region, setting)]
            if not runs:
                continue
            after = [r["after"] for r in runs]
            shares = [x for r in runs for x in _share(r)]
            rows.append(
                f"| {setting} | `{region}` | {sum(r['before'] for r in runs) / len(runs):.3f} | "
                f"{sum(after) / len(after):.3f} ({min(after):.3f}–{max(after):.3f}) | "
                f"{sum(shares) / max(len(shares), 1):.2%} | {sum(r['cpu_seconds'] for r in runs) / len(runs):.0f} |"
            )
    return "\n".join(rows)


def _share(run: dict) -> list[float]:
    name = "trustrl/projected_share" if run["region"] == "troll" else "trustrl/masked_share"
    return [x or 0.0 for x in run["steps"][name]]


def draw() -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    done = json.loads(DATA.read_text())
    styles = {
        "ppo": ("#555555", ":"), "dppo-binary-tv": ("#0072b2", "-"), "dppo-topk-tv": ("#009e73", "--"),
        "troll": ("#d55e00", "-."),
    }  # fmt: skip
    figure, axes = plt.subplots(2, 2, figsize=(10, 6), sharex=True, sharey="row")
    for column, setting in enumerate(SETTINGS):
        for region in REGIONS:
            runs = [r for r in done if (r["region"], r["setting"]) == (region, setting)]
            colour, line = styles[region]
            for row, series in enumerate(([r["steps"]["reward"] for r in runs], [_share(r) for r in runs])):
                by_rollout = row == 0 and SETTINGS[setting] > 1  # all updates of a rollout repeat its reward
                every = SETTINGS[setting] if by_rollout else 1
                smooth = [values[::every] if by_rollout else _smooth(values) for values in series]
                middle = [sum(v) / len(v) for v in zip(*smooth, strict=True)]
                at = [1 + every * i for i in range(len(middle))]
                marks = {"marker": "o", "markersize": 4, "linewidth": 0.9} if by_rollout else {"linewidth": 1.8}
                axes[row][column].plot(at, middle, line, color=colour, label=region, **marks)
                low, high = zip(*((min(v), max(v)) for v in zip(*smooth, strict=True)), strict=True)
                axes[row][column].fill_between(at, low, high, color=colour, alpha=0.12, linewidth=0)
        axes[0][column].set_title(setting)
        axes[1][column].set_xlabel("optimiser step")
    axes[0][0].set_ylabel("mean reward of a rollout\n(line without markers: of 5)")
    axes[1][0].set_ylabel("stopped or projected\nshare of tokens")
    axes[0][0].legend(frameon=False, loc="lower right")
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle("Two-digit addition, tiny Qwen3, TRL on one CPU core: mean and range of three seeds", fontsize=11)
    figure.tight_layout()
    figure.savefig(FIGURE, dpi=130)
    print(table(done))


def _smooth(values: list[float], width: int = 5) -> list[float]:
    return [sum(values[max(0, i - width + 1) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "one", "draw"])
    parser.add_argument("rest", nargs="*")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    if options.what == "one":
        region, seed, setting = options.rest
        print(json.dumps(train(region, int(seed), setting)))
    elif options.what == "run":
        run_all(options.workers)
    else:
        draw()


if __name__ == "__main__":
    main()
