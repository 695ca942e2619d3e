"""Cache of downloads and trained models. Entries are created atomically."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from tempfile import TemporaryDirectory

from trustrl.errors import MissingDataError

_ONLY_KEPT: ContextVar[bool] = ContextVar("only_kept", default=False)


def root() -> Path:
    """Returns the directory that `TRUSTRL_CACHE` names, or `trustrl` in `XDG_CACHE_HOME` or in `~/.cache`."""
    if named := os.environ.get("TRUSTRL_CACHE"):
        return Path(named)
    # The specification of XDG ignores paths that are not absolute.
    caches = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (caches if caches.is_absolute() else Path.home() / ".cache") / "trustrl"


@contextmanager
def only_kept() -> Iterator[None]:
    """Makes `folder` raise MissingDataError for a missing entry instead of creating it."""
    before = _ONLY_KEPT.set(True)
    try:
        yield
    finally:
        _ONLY_KEPT.reset(before)


def folder(name: str, make: Callable[[Path], object]) -> Path:
    """Returns the cached directory `name`. If it is missing, `make` fills an empty directory that is then renamed.

    An interrupted run leaves nothing under the name. If two runs create it at once, both use the directory of the first
    to finish.
    """
    target = root() / name
    if target.is_dir():
        return target
    if _ONLY_KEPT.get():
        raise MissingDataError(f"{target} must be cached already, but it does not exist.")
    root().mkdir(parents=True, exist_ok=True)
    # Next to the target, because a rename is atomic only within one file system.
    with TemporaryDirectory(prefix=f".{name}-", dir=root()) as scratch:
        made = Path(scratch, name)
        made.mkdir()
        make(made)
        try:
            os.replace(made, target)
        except OSError:
            if not target.is_dir():  # if it exists, another run finished first
                raise
    return target
