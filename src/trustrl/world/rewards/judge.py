"""Process that scores completions with one function. `Judges` starts it: python -m trustrl.world.rewards.judge TABLE.

Reads one JSON object of arguments a line and answers each with one line: {"score": 1.0}, {"error": "..."} if the
function raised, or {"refused": "..."} if its result is not a number. The first line tells whether the function could be
loaded. Whatever the function prints goes to stderr.
"""

import importlib
import importlib.util
import json
import math
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

from trustrl.world.rewards.functions import FUNCTIONS
from trustrl.world.rewards.reward_function import RewardFunction

SPARE_SECONDS = 5


def loaded(table: RewardFunction) -> Callable[..., Any]:
    """Returns the function that the table names.

    Raises:
        FileNotFoundError: If its file does not exist.
        ImportError: If its module does not exist.
        AttributeError: If the module has no such function.
    """
    if table.function in FUNCTIONS:
        FUNCTIONS[table.function]("1", "1")  # imports what it needs, before the time of a completion is taken
        return FUNCTIONS[table.function]
    place, name = table.parts()
    if not place.endswith(".py"):
        return getattr(importlib.import_module(place), name)
    file = Path(place)
    if not file.is_file():
        raise FileNotFoundError(f"{file} does not exist")
    sys.path.insert(0, str(file.parent))  # the file may import its neighbors, as a script may
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, name)


def _accepted(function: Callable[..., Any]) -> set[str] | None:
    """Returns the keywords that the function names, or None if it accepts all."""
    parameters = signature(function).parameters.values()
    if any(parameter.kind is Parameter.VAR_KEYWORD for parameter in parameters):
        return None
    return {parameter.name for parameter in parameters}


def _answer(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        score = function(**arguments)
    except MemoryError:
        return {"error": "it needed more memory than reward.memory_gb allows"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error!s:.300}"}
    try:
        number = float(score)
    except (TypeError, ValueError):
        number = math.nan
    return {"score": number} if math.isfinite(number) else {"refused": f"{score!r:.200}"}


def _end_with_the_parent() -> None:
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)


def main() -> None:
    """Loads the function and answers until stdin is closed."""
    table = RewardFunction(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
    os.dup2(2, 1)
    threading.Thread(target=_end_with_the_parent, daemon=True).start()
    if sys.platform == "linux":  # macOS refuses the limit
        memory = int(table.memory_gb * 2**30)
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    try:
        function = loaded(table)
    except Exception as error:
        answers.write(json.dumps({"error": f"{type(error).__name__}: {error!s:.500}"}) + "\n")
        return
    accepted = _accepted(function)
    answers.write(json.dumps({"accepted": None if accepted is None else sorted(accepted)}) + "\n")
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    most = sys.maxsize if hard == resource.RLIM_INFINITY else hard  # a cluster may have set one
    processors = os.cpu_count() or 1  # the CPU time of a function's threads adds up
    for line in sys.stdin:
        # Should the parent be killed, this ends even a computation that never lets another thread run.
        limit = int(time.process_time() + table.seconds * processors + SPARE_SECONDS)
        resource.setrlimit(resource.RLIMIT_CPU, (min(limit, most), hard))
        row = json.loads(line)
        arguments = row if accepted is None else {name: value for name, value in row.items() if name in accepted}
        answers.write(json.dumps(_answer(function, {**arguments, **table.settings})) + "\n")


if __name__ == "__main__":
    main()
