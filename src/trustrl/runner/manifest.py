"""Manifest of a checkpoint: a list of its files with sizes and SHA-256, written last and verified before a resume."""

import hashlib
import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

MANIFEST = "trustrl_complete"
"""File in a checkpoint's directory. It is written once the checkpoint is complete: a kill may come during a save."""

VERSION = 1
PICKLES = (".pt", ".pth")


def write_manifest(checkpoint: Path) -> None:
    """Lists the files of a complete checkpoint, after all of them have reached the disk."""
    files = {}
    for name, path in sorted(_files(checkpoint)):
        _sync(path)
        files[name] = _sized_and_hashed(path)
    scratch = checkpoint / f".{MANIFEST}.{os.getpid()}"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump({"version": VERSION, "name": checkpoint.name, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, checkpoint / MANIFEST)
    for folder in (checkpoint, checkpoint.parent):
        _sync(folder)


def fault_of(checkpoint: Path) -> str | None:
    """Returns what is wrong with a checkpoint, or None if it is whole.

    With a manifest, every listed file must have its size and its SHA-256. Without one (trustrl 0.1.0 wrote none), only
    the formats are checked: a file that was cut off is found, a changed one is not.
    """
    found = dict(_files(checkpoint))
    if not found:
        return "it holds no files"
    try:
        written = (checkpoint / MANIFEST).read_bytes() if (checkpoint / MANIFEST).is_file() else b""
        if not written:
            return next((wrong for name, path in sorted(found.items()) if (wrong := _format_fault(name, path))), None)
        return _difference(checkpoint.name, _listed(written), found)
    except OSError as error:
        return f"{Path(error.filename or checkpoint).name} cannot be read: {error.strerror}"


def _listed(written: bytes) -> Mapping[str, Any] | None:
    """Returns the manifest, or None if it is damaged."""
    try:
        manifest = json.loads(written.decode())
        sound = isinstance(manifest["files"], dict) and all(isinstance(x, dict) for x in manifest["files"].values())
    except (ValueError, RecursionError, TypeError, KeyError):
        return None
    return manifest if sound and manifest.get("version") == VERSION else None


def _difference(name: str, manifest: Mapping[str, Any] | None, found: Mapping[str, Path]) -> str | None:
    if manifest is None:
        return f"its manifest, {MANIFEST}, is damaged"
    if manifest.get("name") != name:
        return f"its manifest belongs to {manifest.get('name')!r:.60}"
    files = manifest["files"]
    for one, listed in files.items():  # sizes first: they cost nothing
        if one not in found:
            return f"{one} is missing"
        if found[one].stat().st_size != listed.get("bytes"):
            return f"{one} has {found[one].stat().st_size:,} bytes, and its manifest says {listed.get('bytes')!r:.30}"
    changed = next((one for one in files if _sized_and_hashed(found[one]) != files[one]), None)
    return None if changed is None else f"{changed} has changed since it was written"


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields every regular file below a checkpoint's directory but the manifest, with its relative path."""
    for at, _, names in os.walk(folder):
        for name in names:
            path = Path(at, name)
            if path.is_file() and not path.name.startswith((MANIFEST, f".{MANIFEST}")):
                yield path.relative_to(folder).as_posix(), path


def _sized_and_hashed(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(path: Path) -> None:
    """Waits until a file or a directory has reached the disk."""
    if os.name != "posix":
        return  # elsewhere only a file that is open for writing can be
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _format_fault(name: str, path: Path) -> str | None:
    if path.suffix in PICKLES and not zipfile.is_zipfile(path):
        return f"{name} is cut off"
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes().decode())
        except (ValueError, RecursionError):
            return f"{name} is not JSON"
    if path.suffix == ".safetensors" and path.stat().st_size != _safetensors_size(path):
        return f"{name} is cut off"
    return None


def _safetensors_size(path: Path) -> int | None:
    """Returns the size that a safetensors file's header says it has; None if the header cannot be read."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(length).decode()) if length < path.stat().st_size else {}
            ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
            return 8 + length + max(ends)
        except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError):
            return None
