"""Files that verbs write where they are told to: what the system refuses is wrong usage, and a sentence."""

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile

from trustrl.errors import ConfigError


@contextmanager
def written(option: str, file: Path) -> Iterator[None]:
    """Around what writes the file of an option.

    Raises:
        ConfigError: the system does not let it.
    """
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option} must be a file that can be written, got {str(file)!r}: {error.strerror}. Choose another place."
        ) from None


def check_writable(option: str, file: Path) -> None:
    """Refuses a file that cannot be written, before the work for it is done.

    Raises:
        ConfigError: it is a folder, or nothing can be written beside it.
    """
    with written(option, file):
        if file.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with TemporaryFile(dir=file.parent):
            pass
