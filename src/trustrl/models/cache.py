"""Where downloaded and trained models are kept, and how they get there: whole or not at all."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory

from trustrl.errors import MissingDataError

_ONLY_KEPT: ContextVar[bool] = ContextVar("only_kept", default=False)


def root() -> Path:
    """The folder `TRUSTRL_CACHE` names, or `~/.cache/trustrl`."""
    return Path(os.environ.get("TRUSTRL_CACHE") or Path.home() / ".cache" / "trustrl")


@contextmanager
def only_kept() -> Iterator[None]:
    """While active, `folder` makes nothing: a missing one is a MissingDataError."""
    before = _ONLY_KEPT.set(True)
    try:
        yield
    finally:
        _ONLY_KEPT.reset(before)


def folder(name: str, make: Callable[[Path], object]) -> Path:
    """The cached folder `name`; where it is missing, `make` fills an empty folder that then takes this name.

    A run that is interrupted leaves nothing under the name. Of two runs that make it at once, the first to finish
    wins and both use its folder.
    """
    target = root() / name
    if target.is_dir():
        return target
    if _ONLY_KEPT.get():
        raise MissingDataError(f"{target} must be there already, and it is not.")
    root().mkdir(parents=True, exist_ok=True)
    # Beside the target, since a rename is atomic only within one file system.
    with TemporaryDirectory(prefix=f".{name}-", dir=root()) as scratch:
        made = Path(scratch, name)
        made.mkdir()
        make(made)
        try:
            os.replace(made, target)
        except OSError:
            if not target.is_dir():  # if it is there, another run was faster
                raise
    return target
