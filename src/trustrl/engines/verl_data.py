"""A task of ours as the files verl trains on, and its scoring as the reward function verl calls.

python -m trustrl.engines.verl_data arithmetic train.parquet --split train --count 2000
"""

import argparse
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from trustrl.errors import MissingDataError
from trustrl.packages import need
from trustrl.tasks import SPLITS, Task, load

REWARD = {"path": __file__, "name": "reward"}
"""verl's `reward.custom_reward_function`."""

PLAIN_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""A chat template that adds nothing: verl knows chats only, and a small model may know texts only."""


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
    """Writes problems of one split as a Parquet file.

    Args:
        path: The file; folders are made.
        task: A name that `trustrl.tasks.load` knows.
        split: "train" or "held_out".
        count: How many problems; all of them unless told.
        seed: Decides their order.
        chat: True for prompts worded for a chat model. Otherwise a prompt is one message with the problem's text, for
            `actor_rollout_ref.model.custom_chat_template` = `PLAIN_CHAT`.
        settings: Of the task.

    Raises:
        ConfigError: as `trustrl.tasks.load` and `Task.rows` do.
    """
    rows = load(task, **settings).rows(split, count, seed, chat)
    table = [verl_row(row, index, task, split, settings) for index, row in enumerate(rows)]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    arrow = need("pyarrow", extra="verl")
    need("pyarrow.parquet", extra="verl").write_table(arrow.Table.from_pylist(table), path)
    return path


def verl_row(row: Mapping[str, Any], index: int, task: str, split: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """One problem in verl's columns; everything scoring needs travels in `extra_info`."""
    prompt = row["prompt"]
    return {
        "data_source": f"trustrl/{task}",
        "prompt": [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt,
        "ability": task.partition(":")[0],
        "reward_model": {"style": "rule", "ground_truth": row["answer"]},
        # One string: Parquet would give every row the same keys, and a list for each tuple.
        "extra_info": {
            "index": index,
            "split": split,
            "trustrl": json.dumps({"task": task, "settings": dict(settings), "row": dict(row)}),
        },
    }


def reward(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None, **_: Any
) -> float:
    """The task's own score of one response, called as verl calls a custom reward function.

    Raises:
        MissingDataError: the row was not written by `write_parquet`.
    """
    written = (extra_info or {}).get("trustrl")
    if not written:
        raise MissingDataError(
            f"extra_info must have the key 'trustrl', got {', '.join(extra_info or {}) or 'nothing'} in a row of "
            f"{data_source}. Write the data with trustrl.engines.verl_data.write_parquet."
        )
    found = json.loads(written)
    return _task(found["task"], json.dumps(found["settings"])).score(solution_str, found["row"])


@lru_cache
def _task(name: str, settings: str) -> Task:
    return load(name, **json.loads(settings))


def main(arguments: list[str] | None = None) -> None:
    """The command line; prints the file's name."""
    parser = argparse.ArgumentParser(prog="python -m trustrl.engines.verl_data", description="A task as Parquet.")
    parser.add_argument("task", help="such as arithmetic, or reasoning-gym:chain_sum")
    parser.add_argument("path", type=Path)
    parser.add_argument("--split", choices=SPLITS, default="train")
    parser.add_argument("--count", type=int, help="how many problems (all of them)")
    parser.add_argument("--seed", type=int, default=0, help="of their order (0)")
    parser.add_argument("--chat", action="store_true", help="prompts worded for a chat model")
    given = parser.parse_args(arguments)
    print(write_parquet(given.path, given.task, given.split, count=given.count, seed=given.seed, chat=given.chat))


if __name__ == "__main__":
    main()
