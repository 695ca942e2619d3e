"""A function by its name, `pkg.module:function`: imported, never evaluated."""

import importlib
import re
from collections.abc import Callable
from typing import Any

from trustrl.errors import ConfigError

NAME = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def find(name: str) -> Callable[..., Any]:
    """The function of this name.

    Raises:
        ConfigError: the name has another form, its module cannot be imported, or it names no function.

    Example:
        >>> find("math:sqrt")(4.0)
        2.0
    """
    if not NAME.fullmatch(name):
        raise ConfigError(f"The loss must be written package.module:function, got {name!r}.")
    module_name, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise ConfigError(
            f"{module_name} must be importable from here, got {type(error).__name__}: {error}. "
            "Install it, or put its folder on PYTHONPATH."
        ) from error
    for part in path.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{name} must exist, and {module_name} has no {path!r}.")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"{name} must be a function, got {type(found).__name__}.")
    return found
