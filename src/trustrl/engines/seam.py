"""What an adapter relies on in somebody else's code, checked before the first step instead of found out after it."""

import inspect
import itertools
from importlib import metadata
from typing import Any

from trustrl.errors import EngineError


def version_of(package: str) -> tuple[int, ...]:
    """The installed version's leading numbers.

    Raises:
        EngineError: the package is not installed.
    """
    try:
        text = metadata.version(package)
    except metadata.PackageNotFoundError:
        raise EngineError(f"{package} must be installed, and it is not. Run `pip install {package}`.") from None
    return leading_numbers(text)


def leading_numbers(version: str) -> tuple[int, ...]:
    """The numbers a version begins with, which is all that is compared.

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
    """Refuses a version in which what we rely on does not exist yet.

    Raises:
        EngineError: it is older.
    """
    if version_of(package) < oldest:
        wanted = ".".join(map(str, oldest))
        raise EngineError(
            f"{package} must be at least {wanted}, got {metadata.version(package)}: {reason}. "
            f'Run `pip install "{package}>={wanted}"`.'
        )


def require_parameters(owner: Any, name: str, expected: tuple[str, ...], *, more: bool = False) -> None:
    """Refuses a function, of a class or a module, whose parameters are not those our code was written for.

    Args:
        owner: The class or module.
        name: Of the function.
        expected: Its parameters.
        more: Whether others may follow them.

    Raises:
        EngineError: it is missing, or it takes something else.
    """
    package = getattr(owner, "__module__", owner.__name__).split(".")[0]
    where = f"{owner.__name__}.{name}"
    method = getattr(owner, name, None)
    advice = (
        f"This adapter was written against another {package} than the installed {metadata.version(package)}: install a "
        "version listed in trustrl's documentation, or call `trustrl.policy_loss` from your own trainer."
    )
    if method is None:
        raise EngineError(f"{where} must exist, and it does not. {advice}")
    found = tuple(inspect.signature(method).parameters)
    if (found[: len(expected)] if more else found) != expected:
        raise EngineError(f"{where} must take {expected}, got {found}. {advice}")
