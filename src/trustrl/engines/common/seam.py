"""Checks on the versions and signatures of another library's code, made before the first step."""

import inspect
import itertools
from importlib import metadata
from typing import Any

from trustrl.errors import EngineError


def version_of(package: str) -> tuple[int, ...]:
    """Returns the leading numbers of the installed version.

    Raises:
        EngineError: If the package is not installed.
    """
    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise EngineError(f"{package} is not installed. Run `pip install {package}`.") from None
    return leading_numbers(text)


def leading_numbers(version: str) -> tuple[int, ...]:
    """Returns the numbers that a version begins with. Comparisons use nothing else.

    Example:
        >>> leading_numbers("2.13.0+cpu")
        (2, 13, 0)
    """
    numbers = []
    for part in version.split("."):
        digits = "".join(itertools.takewhile(str.isdigit, part))
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def require_version(package: str, oldest: tuple[int, ...], reason: str) -> None:
    """Raises if the installed version is older than the adapter supports.

    Args:
        package: The package's name.
        oldest: The oldest supported version.
        reason: Why older versions do not work, as a clause that follows a colon.
    """
    if version_of(package) < oldest:
        wanted = ".".join(map(str, oldest))
        raise EngineError(
            f"{package} must be at least {wanted}, got {metadata.version(package)}: {reason}. "
            f'Run `pip install "{package}>={wanted}"`.'
        )


def require_parameters(
    owner: Any, name: str, expected: tuple[str, ...], *, more: bool = False, package: str | None = None
) -> None:
    """Raises if a function's parameters differ from those that the adapter was written for.

    Args:
        owner: The class or module that holds the function.
        name: The function's name.
        expected: The expected parameters.
        more: Whether further parameters may follow them.
        package: The distribution's name, if it differs from the name of the imported package.
    """
    installed = package or getattr(owner, "__module__", owner.__name__).split(".")[0]
    where = f"{owner.__name__}.{name}"
    method = getattr(owner, name, None)
    advice = (
        f"This adapter was written for a different version of {installed} than {_found_version(installed)}. "
        "Install a version listed in trustrl's documentation, or call `trustrl.policy_loss` from your own trainer."
    )
    if method is None:
        raise EngineError(f"{where} does not exist. {advice}")
    parameters = tuple(inspect.signature(method).parameters)
    if (parameters[: len(expected)] if more else parameters) != expected:
        raise EngineError(f"{where} must take {expected}, got {parameters}. {advice}")


def _found_version(package: str) -> str:
    """Returns the installed version in words; a checkout on the path has none."""
    try:
        return f"the installed {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return "the one on the path"
