"""Runs as plain data with one seeded symptom each, for the rules of `trustrl explain`."""

from trustrl.runs.run import Run, RunSettings
from trustrl.tools.explain.explanation import explain

MISMATCH = "trustrl/mismatch_abs_mean"
RATIO = "trustrl/mismatch_ratio_mean"
BATCHES = 10


def healthy(step, updates, steps):
    """A step of a run that learns: entropy falls a little, the policy moves a little within a batch."""
    update = (step - 1) % updates
    return {
        "step": step, "loss": -0.1, "grad_norm": 0.3, "reward": 0.3 + 0.5 * step / steps, "frac_reward_zero_std": 0.1,
        "frac_reward_nan": 0.0, "completions/clipped_ratio": 0.0,
        "trustrl/entropy": 0.5 - 0.2 * step / steps, "trustrl/kl_k3": 0.001 * update, "trustrl/masked_share": 0.002 * update,
        MISMATCH: 1e-5, RATIO: 1.0, "trustrl/dropped_share": 0.0, "trustrl/fault_advantage": 0.0,
        "trustrl/fault_policy": 0.0,
    }  # fmt: skip


def run_of(change=lambda row: {}, *, updates=4, batches=BATCHES, dtype="float32", evaluations=(), **more):
    """A run whose rows are the healthy ones with `change(row)` laid over. `None` takes a metric away."""
    steps = batches * updates
    rows = [healthy(step, updates, steps) for step in range(1, steps + 1)]
    rows = [{name: value for name, value in (row | change(row)).items() if value != "gone"} for row in rows]
    settings = {"updates_per_batch": updates, "trainer_dtype": "float32", "sampler_dtype": dtype, "learning_rate": 1e-4}
    settings |= more.pop("settings", {})
    found = [{"step": step, "accuracy": share, "count": count} for step, share, count in evaluations]
    return Run(
        path="run", name="run", source="hand", rows=rows, evaluations=found, settings=RunSettings(**settings), **more
    )


def verl_run(change=lambda row: {}, *, updates=4, batches=BATCHES, **settings):
    """A run with one row for each batch and the metrics of stock verl, under the names that the reader gives them."""
    rows = []
    for step in range(1, batches + 1):
        row = {
            "step": step, "loss": -0.1, "grad_norm": 0.5, "reward": 0.3 + 0.04 * step, "entropy": 1.0 - 0.03 * step,
            "trustrl/kl_k1": 0.002, "clip_share": 0.01, "rollout_corr/kl": 1e-7, "rollout_corr/k3_kl": 1e-9,
            "critic/advantages/max": 2.4, "critic/advantages/min": -2.4, "response_length/max": 4.0,
            "response_length/clip_ratio": 1.0,
        }  # fmt: skip
        rows.append({name: value for name, value in (row | change(row)).items() if value != "gone"})
    settings = {
        "engine": "verl",
        "updates_per_batch": updates,
        "trainer_dtype": "float32",
        "sampler_dtype": "float32",
    } | settings
    return Run(path="run", name="run", source="verl", rows=rows, row_is="batch", settings=RunSettings(**settings))


def names(run):
    return [found.name for found in explain(run).causes]


def batch(row, updates=4):
    return (row["step"] - 1) // updates


def falling(row, steps=40):
    """A reward that rose and is gone by the end."""
    return {"reward": 0.6 if row["step"] < steps / 2 else 0.05}
