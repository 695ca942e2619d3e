"""Checks of the model cache: write access, size, and free space."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trustrl.tools.doctor import Finding
from trustrl.world import cache

LITTLE = 5 * 2**30
MANY = 20_000
"""Number of files after which counting stops. A model cache has a few hundred."""


def state(folder: Path | None = None) -> dict[str, Any]:
    """Returns the folder of the cache, its size, and the free space on its disk, in bytes."""
    root = folder or cache.root()
    size, whole = _size(root)
    return {
        "folder": str(root),
        "bytes": size,
        "counted_whole": whole,
        "free_bytes": shutil.disk_usage(_nearest(root)).free,
    }


def check(folder: Path | None = None) -> Iterator[Finding]:
    """Yields an error if the cache is not writable, and a warning if the disk is nearly full."""
    nearest = _nearest(folder or cache.root())
    if not os.access(nearest, os.W_OK | os.X_OK) or not nearest.is_dir():
        yield Finding(
            "error",
            f"{nearest} is not writable",
            "trustrl stores models in TRUSTRL_CACHE, or in ~/.cache/trustrl by default.",
            "Set TRUSTRL_CACHE to a folder that you can write to.",
        )
    free = shutil.disk_usage(nearest).free
    if free < LITTLE:
        yield Finding(
            "warning",
            f"only {free / 2**30:.1f} GB free at {nearest}",
            "Checkpoints and models take gigabytes, and a run fails when it cannot write.",
            "Free some space, or set TRUSTRL_CACHE and --out to another disk.",
        )


def _nearest(folder: Path) -> Path:
    """Returns the folder, or its nearest parent that exists."""
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
                continue  # deleted in the meantime
    return total, True
