"""prime-rl's output folder: metrics.jsonl, and episodes in rollouts/step_<n>/train/effective/traces.jsonl.

Written from the sources of prime-rl (559b447) and verifiers (a60a606) of August 2026; not tested on a real run. Not
read: rank_*.bin, the packed micro-batches between orchestrator and trainer.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.errors import TrustRLWarning
from trustrl.runs.part import Part, counted
from trustrl.runs.points import number
from trustrl.runs.readers import exports
from trustrl.runs.readers.files import Fault, Files, json_lines, opening, stamped
from trustrl.runs.run import Completion

NAME = "prime-rl output"
LOOKS_FOR = "rollouts/step_*/train/effective/traces.jsonl"


def read(files: Files) -> list[Part]:
    """Returns metrics and completions of a prime-rl run."""
    root = "rollouts/step_*/train"
    effective, every = (files.matching(f"{root}/{name}/traces.jsonl") for name in ("effective", "all"))
    traces = sorted(effective or every, key=lambda file: stamped(file.parents[2].name))
    logs = [file for file in files.matching("metrics.jsonl") if opening(file, 64).startswith(b'{"step": ')]
    if not traces and not (logs and b'"time": ' in opening(logs[0], 64)):
        return []
    parts: list[Part] = []
    for file in logs:
        if (part := exports.history(files, file, Part(source=NAME, engine="prime-rl"))) is not None:
            parts.append(part)
    if traces:
        part = Part(source=NAME, engine="prime-rl", completions=lambda: _completions(traces))
        kind = "trained" if effective else "all"
        part.found.append(f"episodes ({kind}) of {counted(len(traces), 'step')} in rollouts")
        parts.append(part)
    for part in parts:
        part.row_is = "batch"
    return parts


def _completions(traces: Sequence[Path]) -> Iterator[Completion]:
    for file in traces:
        step = max(stamped(file.parents[2].name), 0)
        for line in json_lines(file, f"{file.parents[2].name}/{file.name}"):
            episode = None if isinstance(line, Fault) else line[1]
            if not isinstance(episode, Mapping):
                said = line.text if isinstance(line, Fault) else f"{file}, line {line[0]}: not an episode"
                warnings.warn(said, TrustRLWarning, stacklevel=2)
                continue
            group, task = (episode.get(name) for name in ("group", "task"))
            about = {
                "group": group.get("id") if isinstance(group, Mapping) else None,
                "task_id": task.get("key") if isinstance(task, Mapping) else None,
            }
            for trace in episode.get("traces") or ():
                if isinstance(trace, Mapping):
                    yield from _branches(trace, step, about)


def _branches(trace: Mapping[str, Any], step: int, about: Mapping[str, Any]) -> Iterator[Completion]:
    """Yields a completion for each leaf of the graph of messages."""
    nodes = [node if isinstance(node, Mapping) else {} for node in trace.get("nodes") or ()]
    inner = {node.get("parent") for node in nodes}
    rewards = {str(name): _reward(entry) for name, entry in (trace.get("rewards") or {}).items()}
    known = [reward for reward in rewards.values() if reward is not None]
    for leaf in range(len(nodes)):
        if leaf in inner:
            continue
        path = _path(nodes, leaf)
        ids = [token for node in path for token in _sampled(node)]
        logps = [logp for node in path for logp in node.get("logprobs") or ()]
        credits = [credit for node in path for credit in node.get("advantages") or ()]
        whole = bool(ids) and len(ids) == len(logps)
        yield Completion(
            step=step, prompt=_text(path, sampled=False), text=_text(path, sampled=True), rewards=rewards,
            reward=sum(known) if known else None, stop_reason=trace.get("stop_condition"),
            advantage=number(credits[0]) if len(set(credits)) == 1 else None, num_tokens=len(ids) or None,
            token_ids=tuple(ids) if ids else None, behavior_logp=tuple(map(float, logps)) if whole else None,
            group=about["group"], task_id=about["task_id"],
        )  # fmt: skip


def _reward(entry: Any) -> float | None:
    if not isinstance(entry, Mapping):
        return number(entry)
    score, weight = number(entry.get("score")), number(entry.get("weight", 1.0))
    return None if score is None or weight is None else score * weight


def _path(nodes: Sequence[Mapping[str, Any]], leaf: int) -> list[Mapping[str, Any]]:
    path: list[Mapping[str, Any]] = []
    index: Any = leaf
    while isinstance(index, int) and 0 <= index < len(nodes) and len(path) <= len(nodes):
        path.append(nodes[index])
        index = nodes[index].get("parent")
    return path[::-1]


def _sampled(node: Mapping[str, Any]) -> list[int]:
    ids, mask = node.get("token_ids") or (), node.get("mask") or ()
    return [token for token, kept in zip(ids, mask, strict=False) if kept]


def _text(path: Sequence[Mapping[str, Any]], *, sampled: bool) -> str | None:
    """Returns the messages that the model sampled, or those before its first."""
    chosen: list[str] = []
    for node in path:
        if bool(node.get("sampled")) != sampled:
            if not sampled:
                break
            continue
        message = node.get("message")
        content = message.get("content") if isinstance(message, Mapping) else None
        if content is not None:
            chosen.append(content if isinstance(content, str) else str(content))
    return "\n".join(chosen) if chosen else None
