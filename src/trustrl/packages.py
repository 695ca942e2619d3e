"""Packages the core does without, imported when first used; a missing one is named with the extra that brings it."""

from importlib import import_module
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
        raise MissingPackageError(
            f'{error.name} must be installed, and it is not. Run `pip install "trustrl[{extra}]"`.', name=error.name
        ) from None
