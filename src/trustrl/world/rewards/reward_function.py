"""Table [reward] of a recipe: one reward function, its weight and its limits."""

import ast
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.config import validators
from trustrl.errors import ConfigError
from trustrl.world.rewards.functions import FUNCTIONS


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """[reward]: a function that scores completions. Several of them, `[[reward]]`, add up."""

    function: str
    """"exact", "math-verify", or a function of your own as "file.py:name" or "package.module:name". Its
    parameters choose what it receives: `completion`, `answer`, `prompt`, and columns of the data."""

    weight: float = 1.0
    """Factor of its score in the reward."""

    seconds: float = 10.0
    """Time limit for one completion. The function's process is killed after it, and the score is 0."""

    memory_gb: float = 4.0
    """Limit on the address space of the function's process, on Linux. The score is 0 if it is exceeded."""

    processes: int = 1
    """Number of processes that score completions side by side, in each process of the trainer that computes rewards."""

    settings: dict[str, Any] = field(default_factory=dict)
    """More keyword arguments of the function."""

    def __post_init__(self) -> None:
        if not isinstance(self.function, str) or (self.function not in FUNCTIONS and not all(self.parts())):
            raise ConfigError(
                f"reward.function must be {', '.join(map(repr, FUNCTIONS))}, or 'file.py:name' or "
                f"'package.module:name' for your own, got {self.function!r}."
            )
        place, name = self.parts()
        if place.endswith(".py"):  # engines start their processes in other directories
            object.__setattr__(self, "function", f"{Path(place).absolute()}:{name}")
        validators.real("reward.weight", self.weight, rule="a finite number", low=-1e9, high=1e9)
        validators.real("reward.seconds", self.seconds, rule="a number of seconds > 0", low=0.0)
        validators.real("reward.memory_gb", self.memory_gb, rule="a number of GB > 0", low=0.0)
        validators.whole("reward.processes", self.processes, low=1)
        if not isinstance(self.settings, dict):
            raise ConfigError(f"reward.settings must be a table, got {self.settings!r}.")

    def check(self) -> None:
        """Raises if the function's file or package does not exist, or the file does not name it. Runs no code of it."""
        place, name = self.parts()
        if self.function in FUNCTIONS:
            return
        if not place.endswith(".py"):
            package = place.partition(".")[0]
            if not package or find_spec(package) is None:  # a name such as ".mine" has no package
                raise ConfigError(f"reward.function must be importable, got {self.function!r}: no module {place!r}.")
            return
        try:
            source = ast.parse(Path(place).read_bytes())
        except (OSError, SyntaxError, ValueError) as error:
            raise ConfigError(f"reward.function must be loadable, got {self.function!r}: {error}.") from None
        named = {getattr(node, "name", "") for node in ast.walk(source)}
        named |= {node.id for node in ast.walk(source) if isinstance(node, ast.Name)}
        named |= {node.asname for node in ast.walk(source) if isinstance(node, ast.alias) and node.asname}
        if not named & {name, "*"}:
            raise ConfigError(f"reward.function must be in its file, got {self.function!r}: it does not name {name!r}.")

    def parts(self) -> tuple[str, str]:
        """Returns the file or module, and the name of the function in it."""
        place, _, name = self.function.rpartition(":")
        return place, name
