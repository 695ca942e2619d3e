"""slime's rollout dumps: `torch.save` files of --save-debug-rollout-data, one for each rollout.

Written from the sources of slime (624b824) of August 2026; not tested on a real run. The
fork miles is untested. The files are loaded with weights_only=True, so a dump with objects other than tensors and plain
values is refused.
"""

import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import TrustRLWarning
from trustrl.files import DEEPEST, LARGEST, MOST_DIGITS, open_regular
from trustrl.limits import Meter
from trustrl.optional_imports import need
from trustrl.runs.part import Part, counted
from trustrl.runs.points import number
from trustrl.runs.readers.files import Files, first_line, stamped
from trustrl.runs.run import Completion

NAME = "slime rollout dumps"
LOOKS_FOR = "rollout_data/<id>.pt, or rollout_<id>.pt of --save-debug-rollout-data"

_ALLOCATES = re.compile(rb"c(builtins|__builtin__)\nbytearray\n")
"""Pickle opcode for the only function that torch calls on loading, and that reserves memory by a number."""

_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error"}


def read(files: Files) -> list[Part]:
    """Returns the completions of a slime run. Loads a file only when its completions are asked for."""
    paths = files.matching("rollout_data/*.pt", "*/rollout_data/*.pt", "rollout_*.pt", "*/rollout_*.pt")
    if not paths and (len(files.names) == 1 or files.root.name == "rollout_data"):
        paths = files.matching("*.pt")
    paths = sorted((path for path in paths if "eval_" not in path.stem), key=lambda file: stamped(file.stem))
    part = Part(source=NAME, engine="slime", row_is="batch")
    whole = [file for file in paths if zipfile.is_zipfile(file)]
    part.faults = [f"{files.short(file)}: not a complete torch file; left out" for file in paths if file not in whole]
    if whole:
        part.completions = lambda: _completions(whole)
        part.found.append(f"rollouts in {counted(len(whole), 'file')} of {files.short(whole[0].parent)}")
    return [part] if paths else []


def _completions(paths: Sequence[Path]) -> Iterator[Completion]:
    torch = need("torch", extra="models")
    for file in paths:
        try:
            _check_stored(file)
            dump = torch.load(file, map_location="cpu", weights_only=True)
            _check_decoded(dump, torch.Tensor, sum(entry.file_size for entry in _entries(file)))
            samples = dump["samples"]
            rollout = int(dump["rollout_id"])
            made = [_completion(sample, rollout) for sample in samples if isinstance(sample, Mapping)]
        except Exception as error:  # torch raises errors of many types for a damaged file
            warnings.warn(f"{file.name}: {first_line(error)}; left out", TrustRLWarning, stacklevel=2)
            continue
        yield from made


def _entries(file: Path) -> list[zipfile.ZipInfo]:
    with zipfile.ZipFile(file) as archive:
        return archive.infolist()


def _check_stored(file: Path) -> None:
    """Checks that a file contains its bytes as they are, as torch writes them, and creates none while it is loaded.

    Raises:
        OSError: If it is not a regular file, or too large.
        ValueError: If an entry is compressed, entries share bytes, or the file asks for memory.
    """
    with open_regular(file, LARGEST) as opened, zipfile.ZipFile(opened) as archive:
        size = opened.seek(0, 2)
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("an entry is compressed, and torch.save compresses none")
        if sum(entry.file_size for entry in entries) > size:
            raise ValueError("its entries have more bytes than the file")
        for entry in entries:
            if entry.filename.endswith("data.pkl") and _ALLOCATES.search(archive.read(entry)):
                raise ValueError("it asks for memory of any size (bytearray)")


def _check_decoded(dump: Any, tensor: type, stored: int) -> None:
    """Checks the size of a dump's values. One that occurs in several places counts in each of them.

    Raises:
        OverLimit: If they take more memory than allowed.
        ValueError: If a tensor has more values than bytes, or they are nested too deeply.
    """
    meter, level, storages = Meter("its values"), [dump], dict[int, int]()
    for _ in range(DEEPEST + 1):
        inner: list[Any] = []
        for value in level:
            if isinstance(value, tensor):
                meter.add(_cost_of(value, storages))
            elif isinstance(value, (str, bytes)):
                meter.add(60 + len(value))
            elif isinstance(value, Mapping):
                meter.add(200 + 100 * len(value))
                inner += [*value, *value.values()]
            elif isinstance(value, (list, tuple, set)):
                meter.add(100 + 40 * len(value))
                inner += value
            elif isinstance(value, int) and abs(value) >= 10**MOST_DIGITS:
                raise ValueError(f"an integer has more than {MOST_DIGITS} digits")
        level = inner
    if level:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if sum(storages.values()) > stored:
        raise ValueError("its tensors have more bytes than the file")


def _cost_of(x: Any, storages: dict[int, int]) -> int:
    """Returns the bytes of a tensor as a list, and adds its storage to those of the file."""
    if str(x.layout) != "torch.strided" or x.device.type != "cpu":
        raise ValueError(f"a tensor is {x.layout} on {x.device.type}, and must be torch.strided on the CPU")
    storage = x.untyped_storage()
    if x.numel() * x.element_size() > storage.nbytes():
        raise ValueError(f"a tensor of {x.numel():,} values is stored in {storage.nbytes():,} bytes")
    storages[storage.data_ptr()] = storage.nbytes()
    return 100 + 80 * x.numel()  # as a list and as a tuple


def _completion(sample: Mapping[str, Any], rollout: int) -> Completion:
    length = sample.get("response_length")
    tokens, logps = (_list(sample.get(name)) for name in ("tokens", "rollout_log_probs"))
    ids = tokens[-length:] if tokens and isinstance(length, int) and 0 < length <= len(tokens) else None
    reward, group = sample.get("reward"), sample.get("group_index")
    rewards = {str(name): number(value) for name, value in reward.items()} if isinstance(reward, Mapping) else {}
    prompt = sample.get("prompt")
    return Completion(
        step=rollout, prompt=prompt if isinstance(prompt, str) else str(prompt), text=sample.get("response"),
        group=None if group is None else f"{rollout}/{group}", reward=number(reward), rewards=rewards,
        stop_reason=_REASONS.get(str(sample.get("status")), sample.get("status")),
        num_tokens=length if isinstance(length, int) else None, token_ids=tuple(map(int, ids)) if ids else None,
        behavior_logp=tuple(map(float, logps)) if logps and ids and len(logps) == len(ids) else None,
    )  # fmt: skip


def _list(values: Any) -> list[Any]:
    items = values.tolist() if hasattr(values, "tolist") else values
    return list(items) if isinstance(items, (list, tuple)) else []
