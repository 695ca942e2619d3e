"""Optional dependencies, imported on first use, and data directories that ship with trustrl."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trustrl.errors import MissingPackageError


def need(module: str, *, extra: str = "", advice: str = "") -> Any:
    """Imports and returns `module`.

    Args:
        module: The module to import.
        extra: The extra of trustrl that installs it.
        advice: Tells how to install it, if no extra does.

    Raises:
        MissingPackageError: If the module is not installed.
    """
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.split(".")[0] != module.split(".")[0]:
            raise  # the module is installed, but one of its dependencies is not
        raise _missing(error.name, advice or f'Run `pip install "trustrl[{extra}]"`.') from None


def require(module: str, *, advice: str) -> None:
    """Raises if a module is not installed. Does not import it.

    Raises:
        MissingPackageError: If the module is not installed. The message contains `advice`.
    """
    if find_spec(module) is None:
        raise _missing(module, advice)


def shipped_folder(name: str) -> Path:
    """Returns a directory that ships with trustrl: inside the package in a wheel, at the root of a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parents[1] / name


def _missing(name: str, advice: str) -> MissingPackageError:
    return MissingPackageError(f"{name} is not installed. {advice}", name=name)
