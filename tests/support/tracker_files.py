"""Runs of five steps written by real trackers: `python -m support.tracker_files wandb OUT`."""

import os
import sys
from pathlib import Path

CONFIG = {
    "learning_rate": 1e-6, "num_generations": 8, "num_iterations": 2, "steps_per_generation": 4,
    "gradient_accumulation_steps": 4, "temperature": 0.8, "output_dir": "out",
}  # fmt: skip
"""Some of TRL's arguments, as transformers passes them to a tracker."""

STEPS = 5


def row(step):
    """Metrics of a step as transformers passes them to a tracker: a NaN in step 4, an infinity in step 5."""
    return {
        "train/loss": float("nan") if step == 4 else 0.5 / step, "train/reward": step / 10,
        "train/grad_norm": float("inf") if step == 5 else 1.0 + step, "train/num_tokens": 100.0 * step,
        "train/completions/mean_length": 50.0 + step,
    }  # fmt: skip


def write_wandb(out):
    import wandb

    settings = wandb.Settings(
        console="off", x_disable_stats=True, x_disable_meta=True, x_save_requirements=False, disable_git=True,
        save_code=False, mode="offline", silent=True,
    )  # fmt: skip
    run = wandb.init(project="tiny-project", name="tiny", config=CONFIG, dir=out, settings=settings)
    for step in range(1, STEPS + 1):
        nested = {"nested": {"inner": {"deep": 2 * step}}, "text": "x", "counts": wandb.Histogram([1, 2, 3])}
        run.log({**row(step), "train/global_step": step, **nested})
        if step % 2 == 0:
            run.log({"eval/reward": step / 20, "train/global_step": step})
    run.finish()
    wandb.teardown()  # waits for the process that writes the file


def write_trackio(out):
    os.environ.setdefault("TRACKIO_DIR", str(Path(out).resolve()))
    import trackio

    trackio.init(project="tiny-project", name="tiny", config=CONFIG)
    for step in range(1, STEPS + 1):
        trackio.log(row(step) | ({"eval/reward": step / 20} if step % 2 == 0 else {}), step=step)
    trackio.finish()


def write_mlflow(out, *, database=True):
    os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    import mlflow

    where = Path(out).resolve()
    mlflow.set_tracking_uri(f"sqlite:///{where}/mlflow.db" if database else f"file:{where}/mlruns")
    mlflow.set_experiment("tiny-experiment")
    with mlflow.start_run(run_name="tiny"):
        mlflow.log_params(CONFIG)
        for step in range(1, STEPS + 1):
            evaluation = {"eval_reward": step / 20} if step % 2 == 0 else {}
            mlflow.log_metrics({k.removeprefix("train/"): v for k, v in row(step).items()} | evaluation, step=step)


def write_tensorboard(out):
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(out))
    for step in range(1, STEPS + 1):
        metrics = row(step) | ({"eval/reward": step / 20} if step % 2 == 0 else {})
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(step=step, wall_time=float(step), summary=Summary(value=values)))
    writer.close()


WRITERS = {
    "wandb": write_wandb, "trackio": write_trackio, "mlflow": write_mlflow, "tensorboard": write_tensorboard,
    "mlflow-files": lambda out: write_mlflow(out, database=False),
}  # fmt: skip

if __name__ == "__main__":
    WRITERS[sys.argv[1]](sys.argv[2])
