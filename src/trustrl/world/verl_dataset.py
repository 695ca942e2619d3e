"""Parquet files that verl trains on, written from a trustrl task, and the reward function that verl calls.

python -m trustrl.world.verl_dataset arithmetic train.parquet --split train --count 2000
"""

import argparse
import json
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from trustrl.errors import MissingDataError
from trustrl.optional_imports import need
from trustrl.world.tasks import SPLITS, Task, load

REWARD = {"path": __file__, "name": "reward"}
"""Value of verl's `reward.custom_reward_function`. verl loads this file by its path."""

SOURCE = "trustrl/"
"""Beginning of the name of a set of problems in verl."""

SAMPLING = "sampling"
"""Key of `extra_info` with a benchmark's temperature and top-p."""

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Chat template that adds nothing. verl supports only chats, and a small model may support only plain text."""


def write_parquet(
    path: str | Path,
    task: str,
    split: str,
    *,
    count: int | None = None,
    seed: int = 0,
    chat: bool = False,
    **settings: Any,
) -> Path:
    """Writes problems of one split to a Parquet file and returns its path.

    Args:
        path: The file. Missing directories are created.
        task: A name that `trustrl.world.tasks.load` knows.
        split: "train" or "held_out".
        count: The number of problems. Defaults to all of them.
        seed: The seed of their order.
        chat: True for prompts that address a chat model. Otherwise a prompt is one message with the problem's text, to
            be used with `actor_rollout_ref.model.custom_chat_template` = `PLAIN_CHAT`.
        settings: The task's own settings.

    Raises:
        ConfigError: If `trustrl.world.tasks.load` or `Task.rows` raises it.
    """
    rows = load(task, **settings).rows(split, count, seed, chat)
    return write_rows(path, [verl_row(row, index, task, split, settings) for index, row in enumerate(rows)])


def write_rows(path: str | Path, table: list[dict[str, Any]]) -> Path:
    """Writes rows in verl's columns to a Parquet file, atomically, and returns its path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrow = need("pyarrow", extra="verl")
    # A run that is resumed takes the file that is there, so a killed process or a full disk must not leave half of one.
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        need("pyarrow.parquet", extra="verl").write_table(arrow.Table.from_pylist(table), scratch)
        os.replace(scratch, path)
    finally:
        scratch.unlink(missing_ok=True)
    return path


def verl_row(row: Mapping[str, Any], index: int, task: str, split: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns one problem in verl's columns. `extra_info` contains everything that scoring needs."""
    prompt = row["prompt"]
    return {
        "data_source": f"{SOURCE}{row.get('data_set', task)}",  # verl evaluates each source by itself
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": task.partition(":")[0],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        # One string, because Parquet would give every row the same keys and turn tuples into lists.
        "extra_info": {
            "index": index,
            "split": split,
            "trustrl": json.dumps({"task": task, "settings": dict(settings), "row": dict(row)}),
        },
    }


def benchmark_row(row: dict[str, Any], answers: int, temperature: float, top_p: float) -> dict[str, Any]:
    """Returns a row of `verl_row` with its own sampling settings, which the recording agent loops apply."""
    extra = {**row["extra_info"], SAMPLING: {"temperature": temperature, "top_p": top_p}}
    return {**row, "extra_info": extra, "__rollout_n__": answers}  # verl reads the number of answers there


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> float | dict[str, Any]:
    """Returns the task's score of one response. Has the signature of verl's custom reward functions.

    For a benchmark, returns the problem too, which verl writes next to the answer.

    Raises:
        MissingDataError: If `write_parquet` did not write the row.
    """
    written = (extra_info or {}).get("trustrl")
    if not written:
        raise MissingDataError(
            f"extra_info must have the key 'trustrl', got {', '.join(extra_info or {}) or 'nothing'} in a row of "
            f"{data_source}. Write the data with trustrl.world.verl_dataset.write_parquet."
        )
    problem = json.loads(written)
    score = _task(problem["task"], json.dumps(problem["settings"])).score(solution_str, problem["row"])
    if not (extra_info or {}).get(SAMPLING):
        return score
    name = data_source.removeprefix(SOURCE)
    return {"score": score, "acc": score, "problem": f"{name}#{(extra_info or {}).get('index')}"}


@lru_cache
def _task(name: str, settings: str) -> Task:
    return load(name, **json.loads(settings))


def main(arguments: list[str] | None = None) -> None:
    """Runs the command line and prints the file's path."""
    parser = argparse.ArgumentParser(
        prog="python -m trustrl.world.verl_dataset", description="Write a task as Parquet."
    )
    parser.add_argument("task", help="Task, such as arithmetic or reasoning-gym:chain_sum")
    parser.add_argument("path", type=Path, help="File to write")
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--count", type=int, help="Number of problems (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="Seed of their order (default: 0)")
    parser.add_argument("--chat", action="store_true", help="Write prompts as chat messages")
    args = parser.parse_args(arguments)
    print(write_parquet(args.path, args.task, args.split, count=args.count, seed=args.seed, chat=args.chat))


if __name__ == "__main__":
    main()
