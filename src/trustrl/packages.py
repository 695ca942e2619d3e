"""What is beside the code: packages the core does without, imported when first used, and folders that come with it."""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
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


def shipped_folder(name: str) -> Path:
    """A folder that comes with trustrl: inside the package in a wheel, at the top of a checkout."""
    package = Path(__file__).parent
    inside = package / name
    return inside if inside.is_dir() else package.parents[1] / name


def _missing(name: str, advice: str) -> MissingPackageError:
    return MissingPackageError(f"{name} must be installed, and it is not. {advice}", name=name)
