"""reasoning-gym's procedural tasks, each with its own verifier: https://github.com/open-thought/reasoning-gym."""

import json
import random
from collections.abc import Iterator, Mapping
from dataclasses import fields
from fractions import Fraction
from typing import Any, ClassVar

from trustrl.errors import ConfigError, UnknownNameError
from trustrl.packages import need
from trustrl.registry import nearest
from trustrl.tasks.task import Row, Task, check_split, refuse_unknown

CHUNK = 500  # problems per reasoning-gym dataset; some of them build all their problems at once


class ReasoningGym(Task):
    """One of reasoning-gym's datasets, scored by its own verifier.

    A completion's answer is what stands between the last `<answer>` and `</answer>`, or all of it without these tags;
    chat prompts begin with reasoning-gym's own instruction to use them. Some verifiers give part of the reward, and
    a few datasets (codeio, list_functions) do not repeat themselves for the same seed.

    Args:
        name: Which dataset, such as "chain_sum".
        held_out: The share of problems kept from training.
        seed: Which share it is.
        config: Settings of reasoning-gym's own, such as `min_terms=2`.

    Raises:
        MissingPackageError: reasoning-gym is not installed.
        UnknownNameError: it has no such dataset.
        ConfigError: it has no such setting, or refuses its value.
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
                f"The settings of reasoning-gym:{self.name} must be ones it takes, got {self.config}. It says: {error}"
            ) from error

    def problems(self, seed: int) -> Iterator[dict[str, Any]]:
        """reasoning-gym's entries, without end."""
        # Entry i of its dataset follows from seed + i, so neighbouring seeds share all but one of their problems.
        seeds = random.Random(seed)
        while True:
            made = self._made(size=CHUNK, seed=seeds.randrange(2**31))
            yield from (made[i] for i in range(CHUNK))

    def text(self, problem: dict[str, Any]) -> str:
        """The question."""
        return problem["question"]

    def row(self, problem: dict[str, Any], chat: bool) -> Row:
        """The question, its answer (empty where only the verifier knows one) and the whole entry as JSON."""
        prompt: Any = problem["question"]
        if chat:
            system = need("reasoning_gym.utils", extra="tasks").SYSTEM_PROMPTS["default"]
            prompt = [{"role": "system", "content": system}, {"role": "user", "content": prompt}]
        return {"prompt": prompt, "answer": problem["answer"] or "", "entry": encoded(problem)}

    def score(self, completion: str, row: Mapping[str, Any]) -> float:
        """What reasoning-gym's verifier gives the answer, and 0 for one that the verifier fails to read."""
        answer = need("reasoning_gym.utils", extra="tasks").extract_answer(completion)
        entry = decoded(row["entry"])
        try:
            return float(self._verifier.score_answer(completion.strip() if answer is None else answer, entry))
        except Exception:  # some verifiers raise on text they cannot parse, which must not end a training run
            return 0.0


def encoded(value: Any) -> str:
    """JSON that gives back tuples, fractions and keys that are not strings: verifiers tell them from lists and text.

    Example:
        >>> decoded(encoded({"board": ((1, 2), (3, 4)), "size": {2: "two"}}))
        {'board': ((1, 2), (3, 4)), 'size': {2: 'two'}}
    """
    return json.dumps(_plain(value))


def decoded(text: str) -> Any:
    """The value that `encoded` wrote."""
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


def _exact(found: dict[str, Any]) -> Any:
    if found.keys() == {"__tuple__"}:
        return tuple(found["__tuple__"])
    if found.keys() == {"__pairs__"}:
        return dict(found["__pairs__"])
    if found.keys() == {"__fraction__"}:
        return Fraction(found["__fraction__"])
    return found
