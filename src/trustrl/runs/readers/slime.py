"""slime's rollout dumps: `torch.save` files of --save-debug-rollout-data, one for each rollout.

Written from the sources of slime (624b824) of August 2026; not tested on a real run. The
fork miles is untested. The files are loaded with weights_only=True, so a dump with objects other than tensors and plain
values is refused.
"""

import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import TrustRLWarning
from trustrl.optional_imports import need
from trustrl.runs.part import Part, counted
from trustrl.runs.points import number
from trustrl.runs.readers.files import Files, first_line, stamped
from trustrl.runs.run import Completion

NAME = "slime rollout dumps"
LOOKS_FOR = "rollout_data/<id>.pt, or rollout_<id>.pt of --save-debug-rollout-data"

_REASONS = {"completed": "stop", "truncated": "length", "aborted": "abort", "failed": "error"}


def read(files: Files) -> list[Part]:
    """Returns the completions of a slime run. Loads a file only when its completions are asked for."""
    paths = files.matching("rollout_data/*.pt", "*/rollout_data/*.pt", "rollout_*.pt", "*/rollout_*.pt")
    if len(files.names) == 1:
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
            dump = torch.load(file, map_location="cpu", weights_only=True)
            samples = dump["samples"]
            rollout = int(dump["rollout_id"])
        except Exception as error:  # torch raises errors of many types for a damaged file
            warnings.warn(f"{file.name}: {first_line(error)}; left out", TrustRLWarning, stacklevel=2)
            continue
        for sample in samples:
            if isinstance(sample, Mapping):
                yield _completion(sample, rollout)


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
