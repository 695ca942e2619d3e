"""Runs in tests/runs/data, unpacked: files that real packages wrote."""

import gzip
import shutil
import tarfile
from pathlib import Path

DATA = Path(__file__).parents[1] / "runs/data"


def unpacked(name, to):
    """Copies a folder of the data to `to`, without the compression; returns `to`."""
    for file in sorted((DATA / name).rglob("*")):
        target = to / file.relative_to(DATA / name)
        if file.name.endswith(".tar.gz"):
            with tarfile.open(file) as archive:
                archive.extractall(target.parent, filter="data")
        elif file.suffix == ".gz":
            target.parent.mkdir(parents=True, exist_ok=True)
            target.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
        elif file.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)
    return to
