"""The folder where models are kept: can it be written, what does it hold, is there room."""

import os
import shutil
from pathlib import Path
from typing import Any

from trustrl.doctor.findings import Finding
from trustrl.models import cache

LITTLE = 5 * 2**30
MANY = 20_000
"""Files after which counting stops: a cache of models has a few hundred."""


def state(folder: Path | None = None) -> dict[str, Any]:
    """Where it is, its size and what is free beside it, in bytes."""
    root = folder or cache.root()
    size, whole = _size(root)
    return {
        "folder": str(root),
        "bytes": size,
        "counted_whole": whole,
        "free_bytes": shutil.disk_usage(_nearest(root)).free,
    }


def check(folder: Path | None = None) -> list[Finding]:
    """Not writable is an error; a full disk will be one."""
    root = folder or cache.root()
    nearest = _nearest(root)
    found = []
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        found.append(
            Finding(
                "error",
                f"{nearest} cannot be written",
                "Models are made and downloaded into TRUSTRL_CACHE, or ~/.cache/trustrl.",
                "Set TRUSTRL_CACHE to a folder of yours.",
            )
        )
    free = shutil.disk_usage(nearest).free
    if free < LITTLE:
        found.append(
            Finding(
                "warning",
                f"{free / 2**30:.1f} GB are free at {nearest}",
                "Checkpoints and models take gigabytes; a run that cannot write ends there.",
                "Free some, or set TRUSTRL_CACHE and --out to another disk.",
            )
        )
    return found


def _nearest(folder: Path) -> Path:
    """The folder itself, or what exists of the way to it."""
    return next(place for place in (folder, *folder.parents) if place.exists())


def _size(root: Path) -> tuple[int, bool]:
    total, seen = 0, 0
    for where, _, files in os.walk(root):
        for name in files:
            seen += 1
            if seen > MANY:
                return total, False
            try:
                total += os.lstat(os.path.join(where, name)).st_size
            except OSError:
                continue  # gone since
    return total, True
