"""Manifest of a checkpoint: its files with sizes and SHA-256, signed with the key of this installation.

The manifest is written last, after the files have reached the disk. Before a resume it answers two questions: did this
installation write the checkpoint for this run, and is every file unchanged since? It is also the commit point of the
run: it lists how much of the run's own files belongs to the checkpoint (`commit_points`).
"""

import json
import os
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trustrl.errors import ConfigError
from trustrl.files import hashed, regular_alone, safetensors_header, sync
from trustrl.runner.signing import VARIABLE, Key, key_file

MANIFEST = "trustrl_complete"
"""Name of the manifest in a checkpoint. It is written last, because a kill may come during a save."""

VERSION = 2
"""Version that lists the run's files too. Version 1 lists the checkpoint alone."""

MAX_BYTES = 1 << 28
"""Size limit of a manifest, for about a million files."""

FIELDS = {
    "version": int, "name": str, "run": (str, type(None)), "key": str, "files": dict, "run_files": dict, "hmac": str,
}  # fmt: skip
PICKLES = (".pt", ".pth")
THREADS = min(16, os.cpu_count() or 1)
"""Files that are hashed at once."""


@dataclass(frozen=True, slots=True)
class Seal:
    """Author of a manifest: this installation's key, and the run that the checkpoint belongs to."""

    key: Key
    run: str | None
    """Random name of the run, or None for a run that trustrl 0.1.0 began."""


def is_marked(checkpoint: Path) -> bool:
    """Returns True if the checkpoint has a manifest, or the empty file that trustrl 0.1.0 left in its place."""
    return (checkpoint / MANIFEST).is_file()


def write_manifest(checkpoint: Path, seal: Seal, run_files: Mapping[str, Any] | None = None) -> None:
    """Lists and signs the files of a complete checkpoint, after all of them have reached the disk.

    Args:
        checkpoint: The checkpoint.
        seal: The author.
        run_files: Bytes and SHA-256 of the run's own files up to this checkpoint, which have reached the disk.
    """
    paths = dict(sorted(_files(checkpoint)))
    with ThreadPoolExecutor(THREADS) as pool:
        files = dict(zip(paths, pool.map(synced_and_hashed, paths.values()), strict=True))
    for folder, _, _ in os.walk(checkpoint):
        sync(Path(folder))
    content = {"version": VERSION, "name": checkpoint.name, "run": seal.run, "key": seal.key.name, "files": files}
    content["run_files"] = dict(run_files or {})
    scratch = checkpoint / f".{MANIFEST}.{os.getpid()}"
    with scratch.open("w", encoding="utf-8") as file:
        json.dump({**content, "hmac": seal.key.signature(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, checkpoint / MANIFEST)
    for folder in (checkpoint, checkpoint.parent):
        sync(folder)


def run_files_of(checkpoint: Path) -> dict[str, dict[str, Any]]:
    """Returns the entries of the run's own files in an intact manifest. Empty before version 2."""
    manifest = _parsed(_read_manifest(checkpoint / MANIFEST))
    return {} if manifest is None else manifest.get("run_files", {})


def fault_of(checkpoint: Path, seal: Seal | None) -> str | None:
    """Returns the fault of a checkpoint, or None if it is intact.

    With a manifest, every listed file must have its size and its SHA-256. Without one (trustrl 0.1.0 wrote none), this
    checks only the file formats, which finds a truncated file but not a changed one.

    Args:
        checkpoint: The checkpoint.
        seal: The author that the checkpoint must have, or None to accept every author.

    Raises:
        ConfigError: If the checkpoint is not by this author, or has files that its manifest does not list.
    """
    try:
        paths = dict(_files(checkpoint))
        if not paths:
            return "it contains no files"
        written = _read_manifest(checkpoint / MANIFEST)
        if not written:
            if seal is not None:
                raise _refusal(checkpoint, "no manifest, as trustrl 0.1.0 left it")
            return next((wrong for name, path in sorted(paths.items()) if (wrong := _format_fault(name, path))), None)
        manifest = _parsed(written)
        if manifest is None:
            return f"its manifest, {MANIFEST}, is damaged"
        wrong = None if seal is None else _author_fault(checkpoint, manifest, seal)
        if wrong is None and seal is not None:
            unlisted = next((name for name in sorted(_entries(checkpoint)) if name not in manifest["files"]), None)
            if unlisted is not None:
                got = f"{shown(unlisted)}, which its manifest does not list"
                raise _refusal(checkpoint, got, "Move that file away, or add")
        return wrong or _difference(checkpoint.name, manifest, paths)
    except OSError as error:
        return f"{shown(Path(error.filename or checkpoint).name)} cannot be read: {error.strerror}"


def _author_fault(checkpoint: Path, manifest: dict[str, Any], seal: Seal) -> str | None:
    """Raises if another installation or another run wrote the manifest. Returns the fault if ours has changed."""
    content = {name: value for name, value in manifest.items() if name != "hmac"}
    key = manifest.get("key", "")
    if "hmac" not in manifest:
        raise _refusal(checkpoint, "an unsigned manifest")
    if key != seal.key.name:
        raise _refusal(
            checkpoint,
            f"a manifest that the key {shown(key[:40])} signed, where yours is {seal.key.name}",
            f"If you wrote it on another machine, set {VARIABLE} to a copy of that machine's key (yours is "
            f"{key_file()}). If that key is lost, or you trust its owner, add",
        )
    if not seal.key.signed(content, manifest["hmac"]):
        return f"its manifest, {MANIFEST}, has changed since it was signed"
    if manifest.get("run") != seal.run:
        got, advice = "a checkpoint that you wrote in another run", "Move it back. To continue this run from it, add"
        raise _refusal(checkpoint, got, advice)
    return None


def _refusal(checkpoint: Path, got: str, advice: str = "If you trust its author, add") -> ConfigError:
    return ConfigError(
        f"A checkpoint must be as this installation of trustrl wrote it in this run, got {got}: {checkpoint}. Loading "
        "a checkpoint can execute code that somebody put into it: verl and DeepSpeed unpickle it. "
        f"{advice} --trust-checkpoint."
    )


def _read_manifest(file: Path) -> bytes:
    """Returns the manifest's content. Empty if there is none, or if trustrl 0.1.0 left its empty mark."""
    try:
        with open(file, "rb", opener=regular_alone) as opened:
            return opened.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return b""


def _parsed(written: bytes) -> dict[str, Any] | None:
    """Returns the manifest, or None if it is damaged. Fields that it does not know are damage too."""
    try:
        manifest = json.loads(written.decode()) if len(written) <= MAX_BYTES else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(manifest, dict) or not FIELDS.keys() >= manifest.keys() >= {"version", "name", "files"}:
        return None
    sound = all(isinstance(value, FIELDS[name]) for name, value in manifest.items())
    if not sound or not 1 <= manifest["version"] <= VERSION or ("run_files" in manifest) != (manifest["version"] > 1):
        return None
    entries = (*manifest["files"].values(), *manifest.get("run_files", {}).values())
    return manifest if all(is_entry(entry) for entry in entries) else None


def is_entry(entry: Any) -> bool:
    """Returns True if this is the bytes and the SHA-256 of a file."""
    return (
        isinstance(entry, dict)
        and entry.keys() == {"bytes", "sha256"}
        and type(entry["bytes"]) is int
        and isinstance(entry["sha256"], str)
    )


def _difference(name: str, manifest: Mapping[str, Any], paths: Mapping[str, Path]) -> str | None:
    if manifest["name"] != name:
        return f"its manifest belongs to {ascii(manifest['name'])[:60]}"
    files = manifest["files"]
    for file, listed in files.items():  # sizes first: they need no reading
        if file not in paths:
            return f"{shown(file)} is missing"
        size = paths[file].stat().st_size
        if size != listed["bytes"]:
            return f"{shown(file)} has {size:,} bytes, but its manifest lists {listed['bytes']:,}"
    with ThreadPoolExecutor(THREADS) as pool:
        current = zip(files, pool.map(hashed, (paths[file] for file in files)), strict=True)
        changed = next((file for file, now in current if now != files[file]), None)
    return None if changed is None else f"{shown(changed)} has changed since it was written"


def _entries(folder: Path) -> Iterator[str]:
    """Yields the relative path of everything in a checkpoint except directories, the manifest and its scratch files."""
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        for name in (*names, *links):
            path = Path(parent, name).relative_to(folder).as_posix()
            if path != MANIFEST and not path.startswith(f".{MANIFEST}."):
                yield path


def _files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields every regular file of a checkpoint with its relative path."""
    return ((name, folder / name) for name in _entries(folder) if (folder / name).is_file())


def synced_and_hashed(path: Path) -> dict[str, Any]:
    """Returns the bytes and the SHA-256 of a file after it has reached the disk."""
    sync(path)
    return hashed(path)


def _format_fault(name: str, path: Path) -> str | None:
    if path.suffix in PICKLES and not zipfile.is_zipfile(path):
        return f"{shown(name)} is truncated"
    if path.suffix == ".json":
        try:
            json.loads(path.read_bytes().decode())
        except (ValueError, RecursionError):
            return f"{shown(name)} is not JSON"
    if path.suffix == ".safetensors" and path.stat().st_size != _safetensors_size(path):
        return f"{shown(name)} is truncated"
    return None


def _safetensors_size(path: Path) -> int | None:
    """Returns the file size according to a safetensors header, or None if the header is unreadable."""
    try:
        start, tensors = safetensors_header(path)
        return start + max(tensor["data_offsets"][1] for tensor in tensors.values())
    except (ValueError, TypeError, KeyError, IndexError):
        return None


def shown(name: str) -> str:
    """Returns a file's name for an error message, escaped if it could change the terminal."""
    return name if name.isprintable() else ascii(name)
