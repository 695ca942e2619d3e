"""Failure test of verl runs: kills the sampler or a trainer rank during a run, then resumes the run.

    python studies/10-runs-survive/verl_failures.py            # writes docs/data/verl-failures.json

Each run is `main_ppo` on Ray with a checkpoint every two steps. After the fourth step, the script kills the process of
the sampler or of a trainer rank with SIGKILL. It records how the run ended, after how long and with which messages. It
then resumes from the same folder and records the first step, whether the ratios are 1 (they must be, with one update
per step), and the messages if the region has changed.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DATA = Path(__file__).parents[2] / "docs/data/verl-failures.json"
KILLED_AFTER, PATIENCE = 4, 150.0
VICTIMS = {"sampler": r"ray::TransformersServer", "trainer rank": r"ray::\S*WorkerDict|ray::\S*actor_rollout"}


def command(out: Path, *more: str) -> list[str]:
    from trustrl.world import models
    from trustrl.world.verl_dataset import write_parquet

    files = [write_parquet(out / f"{split}.parquet", "arithmetic", split, count=400) for split in ("train", "held_out")]
    return [
        sys.executable, "-W", "ignore", "-m", "trustrl_verl_cpu", "--plain-prompts",
        f"data.train_files={files[0]}", f"data.val_files={files[1]}", "data.train_batch_size=8",
        "data.max_prompt_length=16", "data.max_response_length=8", "actor_rollout_ref.rollout.n=8",
        f"actor_rollout_ref.model.path={models.path('tiny')}", "actor_rollout_ref.rollout.name=transformers_cpu",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.actor.optim.lr=3e-4",
        "actor_rollout_ref.actor.policy_loss._target_=trustrl.engines.verl.RegionLossConfig",
        "+actor_rollout_ref.actor.policy_loss.metrics=all",
        "trainer.logger=[file]", "trainer.save_freq=2", "trainer.resume_mode=auto",
        f"trainer.default_local_dir={out / 'checkpoints'}", f"hydra.run.dir={out / 'hydra'}", *more,
    ]  # fmt: skip


def steps_in(file: Path) -> list[dict]:
    if not file.exists():
        return []
    logs = []
    for line in file.read_text().splitlines():
        with contextlib.suppress(json.JSONDecodeError):  # the last line may be incomplete
            logs.append(json.loads(line))
    return [log for log in logs if "actor/grad_norm" in log["data"]]


def processes_below(root: int, pattern: str) -> list[int]:
    """Returns the processes of this run's session whose title matches."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            session = int((folder / "stat").read_text().rpartition(")")[2].split()[3])
            if session == root and re.search(pattern, title):
                found.append(int(folder.name))
    return found


def run(out: Path, name: str, *more: str, victim: str | None = None) -> dict:
    """Runs once and returns how the run ended."""
    log, metrics = out / f"{name}.log", out / f"{name}.jsonl"
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics), "HF_HUB_OFFLINE": "1"}
    with log.open("w") as output:
        process = subprocess.Popen(
            command(out, *more),
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            cwd=out,
        )
    killed = ended_after = None
    try:
        deadline = time.monotonic() + 600
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)
            if victim and killed is None and len(steps_in(metrics)) >= KILLED_AFTER:
                for pid in processes_below(process.pid, VICTIMS[victim])[:1]:
                    os.kill(pid, signal.SIGKILL)
                    killed, deadline = time.monotonic(), time.monotonic() + PATIENCE
        if killed is not None and process.poll() is not None:
            ended_after = time.monotonic() - killed
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    said = log.read_text(errors="replace")
    errors = re.findall(r"(?:ActorDiedError|RayTaskError\(\w+\)|TrustRLWarning): [^({\n]*", said)
    found = steps_in(metrics)
    return {
        "run": name, "killed": victim, "was_killed": killed is not None, "exit_code": process.poll(),
        "seconds_from_kill_to_end": ended_after, "steps": [log["step"] for log in found],
        "largest_ratio": [log["data"]["actor/trustrl/ratio_max"] for log in found],
        "reward": [log["data"]["critic/score/mean"] for log in found],
        "said": [words.strip() for words in dict.fromkeys(errors)][:4],
    }  # fmt: skip


def main() -> None:
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    done = []
    for victim in VICTIMS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder)
            region = f"{loss}=trustrl-dppo-topk-tv"
            runs = [run(out, f"{victim} killed", region, "trainer.total_training_steps=20", victim=victim)]
            written = sorted(str(p.relative_to(out)) for p in out.rglob("trustrl_region.json"))
            runs.append(run(out, "resumed", region, "trainer.total_training_steps=6"))
            if victim == "sampler":
                other = f"{loss}=trustrl-dppo-binary-tv"
                runs.append(run(out, "resumed with another region", other, "trainer.total_training_steps=8"))
            done.append({"victim": victim, "regions_written": written, "runs": runs})
            DATA.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n")
            print(json.dumps(done[-1], indent=1, ensure_ascii=False), file=sys.stderr)


if __name__ == "__main__":
    main()
