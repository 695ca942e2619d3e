"""Training run of SmolLM2-135M on arithmetic in TRL on a CPU: vLLM samples in bf16, TRL trains in fp32.

    export VLLM_ENABLE_V1_MULTIPROCESSING=0 TORCHDYNAMO_DISABLE=1 OMP_NUM_THREADS=2
    python studies/09-engines-learn/trl_smollm2.py run
    python studies/09-engines-learn/trl_smollm2.py draw

`run` writes docs/data/trl-smollm2.json: metrics of every step, and for some tokens the log-probs of sampler and trainer
at the same weights (the mismatch). `draw` writes docs/figures/trl-smollm2.png and trl-mismatch.png.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
DATA = DOCS / "data/trl-smollm2.json"
KEPT = (
    "reward", "entropy", "trustrl/masked_share", "trustrl/divergence_mean", "trustrl/ratio_mean", "trustrl/ratio_max",
    "trustrl/mismatch_abs_mean", "trustrl/mismatch_max", "trustrl/mismatch_min", "trustrl/gap_abs_mean",
    "trustrl/loss_weight", "completions/mean_length", "grad_norm",
)  # fmt: skip


def run(region: str, dtype: str, minutes: float, model_name: str, updates: int, rows: int, lr: float) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import TrainerCallback

    import trustrl
    from trustrl.engines.trl import TrustRegionGRPOTrainer
    from trustrl.world import models, tasks

    tokens: list[dict] = []

    class MismatchTrainer(TrustRegionGRPOTrainer):
        """Trainer that keeps both sides' log-probs of each token of a rollout, before any update."""

        def _generate_and_score_completions(self, inputs):
            out = super()._generate_and_score_completions(inputs)
            on = out["completion_mask"].bool()
            tokens.append(
                {
                    "step": self.state.global_step,
                    "sampler": out["trustrl_behavior_logp"][on].tolist(),
                    "trainer": out["trustrl_proximal_logp"][on].tolist(),
                }
            )
            return out

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.end = time.monotonic() + 60 * minutes

        def on_step_end(self, args, state, control, **kwargs):
            control.should_training_stop = time.monotonic() > self.end
            if state.global_step % 5 == 0:
                save(trainer, "so far")

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "trustrl/tokens" in logs:
                shown = {k: round(float(logs[k]), 5) for k in KEPT if logs.get(k) is not None}
                print(state.global_step, shown, flush=True)

    def save(made, note: str) -> None:
        steps = [log for log in made.state.log_history if "trustrl/tokens" in log]
        few = [{**t, **{k: t[k][:1500] for k in ("sampler", "trainer")}} for t in (*tokens[:2], *tokens[-1:])]
        DATA.write_text(
            json.dumps(
                {
                    "model": model_name, "region": region, "sampler_dtype": dtype, "updates": updates, "rows": rows,
                    "lr": lr, "note": note, "minutes": (time.monotonic() - start) / 60,
                    "mismatch": [gaps(t) for t in tokens],
                    "steps": {k: [s.get(k) for s in steps] for k in KEPT}, "tokens": few,
                }
            )
        )  # fmt: skip

    start = time.monotonic()
    task = tasks.load("arithmetic", digits=1)
    with tempfile.TemporaryDirectory() as output:
        trainer = MismatchTrainer(
            model=models.path(model_name),
            reward_funcs=task.reward,
            args=trainer_settings(output, rows, updates, lr),
            train_dataset=task.dataset("train", chat=True),
            region=trustrl.preset(region),
            metrics="all",
            measure_mismatch=True,
            vllm_options={"dtype": dtype},
        )
        trainer.add_callback(Clock())
        trainer.train()
        save(trainer, "whole run")


def trainer_settings(output: str, rows: int, updates: int, lr: float):
    """Returns TRL's settings for the run."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=output, use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], seed=0,
        model_init_kwargs={"dtype": "float32"}, per_device_train_batch_size=rows, num_generations=8,
        num_iterations=updates, max_completion_length=16, learning_rate=lr, lr_scheduler_type="constant",
        max_steps=10_000, logging_steps=1, save_strategy="no", disable_tqdm=True, use_vllm=True,
        vllm_mode="colocate", vllm_importance_sampling_correction=False, vllm_max_model_length=256,
    )  # fmt: skip


def gaps(rollout: dict) -> dict:
    gap = [abs(a - b) for a, b in zip(rollout["sampler"], rollout["trainer"], strict=True)]
    return {"step": rollout["step"], "tokens": len(gap), "mean": sum(gap) / len(gap), "max": max(gap)}


def draw() -> None:
    """Draws both figures and prints the mismatch over all rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    found = json.loads(DATA.read_text())
    draw_mismatch(found)
    draw_steps(found)
    late = found["mismatch"]
    mean, largest = sum(m["mean"] for m in late) / len(late), max(m["max"] for m in late)
    print(f"{len(late)} rollouts; mean |Δ log p| {mean:.4f}, max {largest:.3f}")


def draw_mismatch(found: dict) -> None:
    """Draws ratio and probability gap of sampler and trainer at equal weights."""
    import math

    import matplotlib.pyplot as plt

    sampler = [x for t in found["tokens"][:2] for x in t["sampler"]]
    trainer = [x for t in found["tokens"][:2] for x in t["trainer"]]
    mu = [math.exp(x) for x in sampler]
    figure, axes = plt.subplots(1, 2, figsize=(10, 4))
    axes[0].scatter(
        mu, [math.exp(b - a) for a, b in zip(sampler, trainer, strict=True)], s=5, alpha=0.4, color="#0072b2"
    )
    axes[0].axhspan(0.8, 1.28, color="#555555", alpha=0.1, linewidth=0)
    axes[0].text(
        0.98, 0.02, "shaded: inside PPO's clip (.8, 1.28)", transform=axes[0].transAxes, ha="right", fontsize=8
    )
    axes[0].set_ylabel("ratio π'/μ")
    gap = [abs(math.exp(b) - m) for m, b in zip(mu, trainer, strict=True)]
    axes[1].scatter(mu, gap, s=5, alpha=0.4, color="#d55e00")
    axes[1].axhline(0.15, color="#555555", linestyle="--", linewidth=1)
    across = axes[1].get_yaxis_transform()
    axes[1].text(0.98, 0.15, "DPPO's bound .15 ", transform=across, ha="right", va="bottom", fontsize=8)
    axes[1].set_ylim(0, 0.17)
    axes[1].set_ylabel("|π' − μ| of the sampled token")
    for axis in axes:
        axis.set_xlabel("μ: the sampler's probability of the token")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    figure.suptitle(
        f"{len(mu)} tokens of SmolLM2-135M at equal weights: vLLM in {found['sampler_dtype']} against fp32 training",
        fontsize=11,
    )
    figure.tight_layout()
    figure.savefig(DOCS / "figures/trl-mismatch.png", dpi=130)


def draw_steps(found: dict) -> None:
    """Draws reward, masked share, entropy and mismatch by optimizer step."""
    import matplotlib.pyplot as plt

    steps = found["steps"]
    shown = {
        "reward": "reward", "trustrl/masked_share": "masked share", "entropy": "entropy, nats",
        "trustrl/mismatch_abs_mean": "mean |log π' − log μ|, nats",
    }  # fmt: skip
    figure, axes = plt.subplots(1, 4, figsize=(14, 3.2))
    for axis, (key, label) in zip(axes, shown.items(), strict=True):
        # The reward is logged once per rollout, the masked share only if some advantage is not 0.
        at, values = zip(*((i + 1, v) for i, v in enumerate(steps[key]) if v is not None), strict=True)
        axis.plot(at, values, ".", color="#0072b2", alpha=0.5)
        smooth = [sum(values[max(0, i - 3) : i + 1]) / len(values[max(0, i - 3) : i + 1]) for i in range(len(values))]
        axis.plot(at, smooth, color="#0072b2", linewidth=2)
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("optimiser step")
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(alpha=0.25)
    axes[1].set_ylim(bottom=0)
    axes[3].set_ylim(bottom=0)
    figure.suptitle(
        f"SmolLM2-135M, one-digit addition, {found['region']}, {found['updates']} updates per batch of {found['rows']} "
        f"completions; line: mean of the last 4 points",
        fontsize=10,
    )
    figure.tight_layout()
    figure.savefig(DOCS / "figures/trl-smollm2.png", dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["run", "draw"])
    parser.add_argument("--region", default="dppo-binary-tv")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--lr", type=float, default=1e-5)
    options = parser.parse_args()
    if options.what == "draw":
        draw()
    else:
        run(options.region, options.dtype, options.minutes, options.model, options.updates, options.rows, options.lr)


if __name__ == "__main__":
    main()
