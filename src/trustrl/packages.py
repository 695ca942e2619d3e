"""Packages the core does without, imported when first used; a missing one is named with the extra that brings it."""

from importlib import import_module
from importlib.util import find_spec
from typing import Any

from trustrl.errors import MissingPackageError


def need(module: str, *, extra: str) -> Any:
    """The imported `module`, which `pip install "trustrl[<extra>]"` brings.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # it is there, and something it needs itself is not: its own message says more
        raise _missing(error.name, f'Run `pip install "trustrl[{extra}]"`.') from None


def require(module: str, *, advice: str) -> None:
    """Looks whether a module is installed, without importing it.

    Raises:
        MissingPackageError: it is not; says what to do.
    """
    if find_spec(module) is None:
        raise _missing(module, advice)


def _missing(name: str, advice: str) -> MissingPackageError:
    return MissingPackageError(f"{name} must be installed, and it is not. {advice}", name=name)
