"""Undamaged inputs of the fuzz harness: one folder for each kind, and the commands that read it.

`{here}` in a command is the folder of the case. The figures and the pages of a command go there too.
"""

import csv
import json
import shutil
import struct
from pathlib import Path
from typing import NamedTuple

from support import recording_batches as batches
from support.recipes import SHIPPED, small
from support.run_files import unpacked
from support.run_folders import run_folder
from trustrl.files import write_json
from trustrl.recording import QuantileAbove, Recorder, Recording
from trustrl.regions.presets import preset
from trustrl.runner.comparison import table
from trustrl.runner.grid import prepare


class Kind(NamedTuple):
    """One kind of input: its folder, the files to damage by format, and the commands."""

    name: str
    formats: dict[str, tuple[str, ...]]
    """Patterns of files by format."""

    commands: tuple[str, ...]
    has_checksums: bool = False
    """True if every damaged bit must be refused, or leave the answer as it was."""


READ = (
    "report {here}/run --json",
    "report {here}/run --out {here}/page.html",
    "explain {here}/run --json",
    "watch {here}/run --every 1",
)
RECORDS = (
    "audit {here}/run --json --regions ppo,dppo-topk-tv", "calibrate {here}/run --json", "bound {here}/run --json",
    "records check {here}/run --json",
    *READ,
)  # fmt: skip
COMPARE = "compare {here}/run/small.toml --regions ppo,troll --seeds 1 --out {here}/run/grid"

KINDS = (
    Kind("records", {"parquet": ("records/**/*.parquet",), "json": ("records/**/*.json",)}, RECORDS, has_checksums=True),
    Kind("run", {"jsonl": ("*.jsonl",), "toml": ("recipe.toml",), "json": ("*.json",)}, READ),
    Kind(
        "trl", {"json": ("trainer_state.json",), "parquet": ("completions/*.parquet",), "events": ("runs/*/events*",)},
        READ,
    ),
    Kind(
        "verl", {"jsonl": ("*.jsonl", "*/*.jsonl"), "text": ("console.log",), "yaml": ("hydra/.hydra/*.yaml",)}, READ
    ),
    Kind("wandb", {"wandb": ("*/run-*.wandb",)}, READ),
    Kind("trackio", {"sqlite": ("*.db",)}, READ),
    Kind("mlflow", {"sqlite": ("mlflow.db",)}, READ),
    Kind("mlruns", {"text": ("*/*/metrics/*", "*/*/params/*")}, READ),
    Kind("export", {"csv": ("*.csv",)}, READ),
    Kind("prime-rl", {"jsonl": ("*.jsonl", "rollouts/*/*/*/*.jsonl")}, READ),
    Kind(
        "recipe", {"toml": ("*.toml",), "json": ("model/config.json",), "safetensors": ("model/*.safetensors",)},
        (
            "plan {here}/run/recipe.toml --json", "plan {here}/run/recipe.toml model.name={here}/run/model",
            "audit {here}/run/records --json --arms {here}/run/arms.toml", "plan {here}/run/recipe.toml",
        ),
    ),
    Kind(
        "comparison",
        {"json": ("table.json", "grid/*/*/*.json"), "toml": ("grid/*/*.toml",), "jsonl": ("grid/*/*/*.jsonl",)},
        (COMPARE, "compare --draw {here}/run"),
    ),
    Kind("prompts", {"text": ("prompts.txt",)}, ("prompts {here}/run/prompts.txt",)),
)  # fmt: skip


def build(name: str, folder: Path) -> None:
    """Writes the undamaged input of a kind."""
    if name in DATA:
        unpacked(DATA[name], folder)
    else:
        WRITERS[name](folder)


DATA = {"trl": "trl-1.16.0", "verl": "verl-0.9.1", "wandb": "wandb-0.31.0", "trackio": "trackio-0.43.0"}


def _records(folder: Path) -> None:
    run_folder(folder, region="dppo-topk-tv")
    region = preset("dppo-topk-tv")
    trigger = QuantileAbove(of="log_ratio", level=0.0)
    made = Recorder(
        Recording(folder=folder / "records", sample=1.0, topk=True, ring_steps=1, triggers=(trigger,)), region, rank=0
    )
    for step in (0, 1):
        made.add_sequences(batches.sequence_rows(range(8 * step, 8 * step + 8)), step=step)
        b = batches.batch(seed=step, first=8 * step, region=region, k=20, proximal=True)
        made.add(b.out, b.policy, b.rollout, sequences=b.sequences, step=step)
        made.end_step(step, b.out.sums)


def _run(folder: Path) -> None:
    run_folder(folder)
    write_json(folder / "environment.json", {"packages": {"trl": "1.16.0"}, "python": "3.11"})


def _mlflow(folder: Path) -> None:
    unpacked("mlflow-3.17.2", folder / "all")
    (folder / "all" / "mlflow.db").rename(folder / "mlflow.db")
    shutil.rmtree(folder / "all")


def _mlruns(folder: Path) -> None:
    unpacked("mlflow-3.17.2", folder.parent / "all")
    shutil.move(folder.parent / "all" / "mlruns", folder)
    shutil.rmtree(folder.parent / "all")


def _export(folder: Path) -> None:
    folder.mkdir(parents=True)
    with (folder / "history.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["_step", "train/reward", "train/loss", "train/grad_norm"])
        rows.writerows([step, step / 10, 1 / step, 2.0] for step in range(1, 9))


def _prime(folder: Path) -> None:
    traces = folder / "rollouts/step_1/train/effective"
    traces.mkdir(parents=True)
    lines = [{"step": step, "time": 1.0, "loss/mean": 0.5, "entropy/all/mean": 1.0} for step in range(1, 6)]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    node = {"parent": None, "sampled": False, "message": {"content": "2+2"}}
    leaf = {
        "parent": 0, "sampled": True, "message": {"content": "4"}, "token_ids": [1, 2], "mask": [1, 1],
        "logprobs": [-0.5, -0.25], "advantages": [1.0, 1.0],
    }  # fmt: skip
    trace = {"nodes": [node, leaf], "rewards": {"correct": {"score": 1.0, "weight": 0.5}}, "stop_condition": "stop"}
    episode = {"group": {"id": "g"}, "task": {"key": "sums"}, "traces": [trace]}
    (traces / "traces.jsonl").write_text((json.dumps(episode) + "\n") * 4)


def _recipe(folder: Path) -> None:
    _records(folder)
    (folder / "recipe.toml").write_text(small().to_toml())
    (folder / "shipped.toml").write_text(SHIPPED[0].read_text())
    (folder / "arms.toml").write_text('[a]\npreset = "ppo"\n[b]\nkind = "dppo"\n')
    (folder / "model").mkdir()
    write_json(folder / "model/config.json", {"hidden_size": 64, "vocab_size": 512})
    header = json.dumps({"w": {"dtype": "F32", "shape": [8, 4], "data_offsets": [0, 128]}}).encode()
    (folder / "model/m.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 128)


def _comparison(folder: Path) -> None:
    recipe = small()
    folder.mkdir(parents=True)
    (folder / "small.toml").write_text(recipe.to_toml())
    cells = prepare(recipe, {"ppo": preset("ppo"), "troll": preset("troll")}, 1, folder / "grid")
    for cell in cells:
        run_folder(cell.folder)
        (cell.folder / "recipe.toml").write_text(cell.recipe.to_toml())
    write_json(folder / "table.json", table(cells, [], 0.5))


def _prompts(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "prompts.txt").write_text("One.\nTwo.\n\nThree.\n")


WRITERS = {
    "records": _records, "run": _run, "mlflow": _mlflow, "mlruns": _mlruns, "export": _export, "prime-rl": _prime,
    "recipe": _recipe, "comparison": _comparison, "prompts": _prompts,
}  # fmt: skip
