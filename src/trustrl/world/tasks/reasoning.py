"""Tasks of reasoning-gym, each with its own verifier: https://github.com/open-thought/reasoning-gym."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, ClassVar

from trustrl.errors import ConfigError, UnknownNameError
from trustrl.optional_imports import need
from trustrl.registry import nearest
from trustrl.world.tasks.task import Row, Task, check_split, refuse_unknown

CHUNK = 500  # problems per reasoning-gym dataset; some datasets build all their problems at once


class ReasoningGym(Task):
    """One of reasoning-gym's datasets, scored by its own verifier.

    The answer is the text between the last `<answer>` and `</answer>`, or the whole completion without these tags. Chat
    prompts begin with reasoning-gym's own instruction to use them. Some verifiers give partial rewards. A few datasets
    (codeio, list_functions) are not reproducible for a given seed.

    Args:
        name: The name of the dataset, such as "chain_sum".
        held_out: The share of problems held out from training.
        seed: The seed of the split.
        config: Settings of the reasoning-gym dataset, such as `min_terms=2`.

    Raises:
        MissingPackageError: If reasoning-gym is not installed.
        UnknownNameError: If it has no such dataset.
        ConfigError: If the dataset has no such setting, or refuses its value.
    """

    columns: ClassVar[tuple[str, ...]] = ("entry",)
    endless: ClassVar[bool] = True

    def __init__(self, name: str = "", held_out: float = 0.1, seed: int = 0, **config: Any) -> None:
        check_split(held_out, seed)
        self.name, self.held_out, self.seed, self.config = name, held_out, seed, config
        known = need("reasoning_gym.factory", extra="tasks").DATASETS
        if name not in known:
            raise UnknownNameError(
                f"Unknown reasoning-gym dataset {name!r}.{nearest(name, known)} "
                f"Write for example 'reasoning-gym:chain_sum'. Known: {', '.join(sorted(known))}."
            )
        ours = {"seed", "size"}
        its = [field.name for field in fields(known[name][1]) if field.name not in ours]
        refuse_unknown(f"reasoning-gym:{name}", config, ["held_out", "seed", *its])
        # Scoring needs no problems, only the verifier with the same settings.
        self._verifier = self._made(size=1, seed=0)

    def _made(self, size: int, seed: int) -> Any:
        create = need("reasoning_gym", extra="tasks").create_dataset
        try:
            return create(self.name, size=size, seed=seed, **self.config)
        except (AssertionError, TypeError, ValueError) as error:
            raise ConfigError(
                f"The settings of reasoning-gym:{self.name} must be valid, got {self.config}. It reports: {error}"
            ) from error

    def problems(self, seed: int) -> Iterator[dict[str, Any]]:
        """Yields entries of reasoning-gym indefinitely."""
        # Entry i of a dataset depends on seed + i, so adjacent seeds share all problems but one.
        seeds = random.Random(seed)
        while True:
            made = self._made(size=CHUNK, seed=seeds.randrange(2**31))
            yield from (made[i] for i in range(CHUNK))

    def text(self, problem: dict[str, Any]) -> str:
        """Returns the question."""
        return problem["question"]

    def row(self, problem: dict[str, Any], chat: bool) -> Row:
        """Returns the question, its answer (empty if only the verifier knows it) and the whole entry as JSON."""
        prompt: Any = problem["question"]
        if chat:
            system = need("reasoning_gym.utils", extra="tasks").SYSTEM_PROMPTS["default"]
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        return {"prompt": prompt, "answer": problem["answer"] or "", "entry": encoded(problem)}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """Returns the score of reasoning-gym's verifier, or 0 if the verifier raises."""
        answer = need("reasoning_gym.utils", extra="tasks").extract_answer(completion)
        entry = decoded(row["entry"])
        try:
            return float(self._verifier.score_answer(completion.strip() if answer is None else answer, entry))
        except Exception:  # some verifiers raise on text they cannot parse, which must not abort a training run
            return 0.0


def encoded(value: Any) -> str:
    """Returns JSON that preserves tuples, fractions and non-string keys, which matter to verifiers.

    Example:
        >>> decoded(encoded({"board": ((1, 2), (3, 4)), "size": {2: "two"}}))
        {'board': ((1, 2), (3, 4)), 'size': {2: 'two'}}
    """
    return json.dumps(_plain(value))


def decoded(text: str) -> Any:
    """Returns the value that `encoded` wrote."""
    return json.loads(text, object_hook=_exact)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return {"__tuple__": [_plain(v) for v in value]}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(v) for key, v in value.items()}
    if isinstance(value, dict):
        return {"__pairs__": [[_plain(key), _plain(v)] for key, v in value.items()]}
    if isinstance(value, Fraction):
        return {"__fraction__": str(value)}
    return value


def _exact(node: dict[str, Any]) -> Any:
    if node.keys() == {"__tuple__"}:
        return tuple(node["__tuple__"])
    if node.keys() == {"__pairs__"}:
        return dict(node["__pairs__"])
    if node.keys() == {"__fraction__"}:
        return Fraction(node["__fraction__"])
    return node
