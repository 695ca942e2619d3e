"""The object behind `trustrl audit --json`: counts as named numbers. See docs/guides/audit.md."""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trustrl.config.statistics import Anchor
from trustrl.errors import ConfigError, RecordError
from trustrl.recording import storage
from trustrl.recording.record_files import RECORDS, opened, part_files
from trustrl.recording.storage import Place
from trustrl.regions.loading import config_to_dict
from trustrl.tools.audit.region_replay import Arm
from trustrl.tools.audit.token_counts import BINS, PER_ARM, REPRODUCED, TokenCounts

VERSION = 1
"""Format version of the object."""

RECORDED = "recorded"
"""Name under which the recorded decisions are listed."""

DEFAULT_REGIONS = ("ppo", "gspo", "dppo-binary-tv", "dppo-binary-kl", "dppo-topk-tv")


def record_files(paths: Sequence[str | Path]) -> list[Place]:
    """Returns the part files of record folders, run directories with `records/`, and files, without duplicates.

    Args:
        paths: Local paths, or addresses such as `s3://bucket/run`.

    Raises:
        ConfigError: If a path does not exist, or an address has an unknown scheme.
        RecordError: If a path has no records, or a store cannot be read.
    """
    places: dict[Place, None] = {}
    for path in map(storage.place, paths):
        try:
            if not (storage.is_folder(path) or storage.is_file(path)):
                raise ConfigError(f"RECORDS must be existing folders or files, got `{path}`.")
            inside = storage.inside(path, RECORDS)
            files = part_files(inside if storage.is_folder(inside) else path)
        except OSError as error:
            raise RecordError(f"Cannot read `{path}`: {str(error).rstrip('.')}.") from error
        except RecordError:
            if storage.is_file(path / "recipe.toml"):
                raise RecordError(f"`{path}`: this run has no records. Run it with records.sample=0.1.") from None
            raise
        for file in files:
            places[Path(os.path.realpath(file)) if isinstance(file, Path) else file] = None  # resolve() refuses loops
    return list(places)


def recorded_regions(files: Sequence[Place]) -> list[dict[str, Any]]:
    """Returns the regions the files were recorded with, without duplicates. Reads only the file footers."""
    regions: list[dict[str, Any]] = []
    for file in files:
        with opened(file) as (_, region):
            if region is not None and region not in regions:
                regions.append(region)
    return regions


def check_names(arms: Sequence[Arm]) -> None:
    """Checks that no region uses the name reserved for the records."""
    if any(arm.name == RECORDED for arm in arms):
        raise ConfigError(
            f"A region's name must not be {RECORDED!r}, which is reserved for the records. Choose another name."
        )


def audit_report(
    counted: TokenCounts,
    arms: Sequence[Arm],
    files: Sequence[Place],
    *,
    top: int = 10,
    text_of: Callable[[int], str] | None = None,
    anchor: Anchor = "behavior",
) -> dict[str, Any]:
    """Returns the audit: shares, agreement, bins, and most masked token ids."""
    names = [RECORDED, *(arm.name for arm in arms)]
    arm_counts = counted.counts["arms"].tolist()
    rows = {name: dict(zip(PER_ARM, row, strict=True)) for name, row in zip(names, arm_counts, strict=True)}
    total = int(counted.counts["rows"])
    replayed = {RECORDED, *(arm.name for arm in arms if arm.how == "replayed")}
    reproduced = dict(zip(REPRODUCED, counted.counts["reproduced"].tolist(), strict=True))
    return {
        "version": VERSION,
        "files": len(files),
        "rows": total,
        "sequences": int(counted.counts["sequences"]),
        "signed": int(counted.counts["signed"]),
        "anchor": anchor,
        "recorded": recorded_regions(files),
        "reproduced": reproduced,
        "regions": {
            RECORDED: _region(rows[RECORDED], "recorded", "", None, total),
            **{arm.name: _region(rows[arm.name], arm.how, arm.reason, arm, total) for arm in arms},
        },
        "agreement": _agreement(counted, names, [name for name in names if name in replayed and rows[name]["rows"]]),
        "by": {name: _bins(counted, name, names) for name in BINS if f"by/{name}" in counted.counts},
        "tokens": _top(counted, names, top, text_of),
    }


def share(part: float, whole: float) -> float | None:
    """Returns part / whole, or None if `whole` is 0."""
    return part / whole if whole else None


def _region(count: Mapping[str, int], how: str, reason: str, arm: Arm | None, total: int) -> dict[str, Any]:
    if arm is None and not count["rows"]:
        how, reason = "left out", "no region decided when these records were written"
    elif arm is not None and how != "left out" and not count["rows"]:
        wanted = " and ".join(f"{anchor}_logp" for anchor in sorted(arm.region.needs().anchors))
        how, reason = "left out", f"needs {wanted}, which these records do not have"
    elif how != "left out" and count["rows"] < total:
        reason = f"{reason}; " * bool(reason) + f"only {count['rows']} of {total} rows have the columns it reads"
    certifiable = count["certifiable"]
    certificate = {name: share(count[name], certifiable) for name in ("outside", "inside")} if certifiable else None
    if certificate is not None:
        certificate["undecided"] = (certifiable - count["outside"] - count["inside"]) / certifiable
    return {
        "how": how,
        "reason": reason,
        "settings": None if arm is None else config_to_dict(arm.region),
        **{name: count[name] for name in ("rows", "measured", "signed", "stopped", "stopped_at_most")},
        "stopped_share": share(count["stopped"], count["signed"]),
        "stopped_share_at_most": share(count["stopped_at_most"], count["signed"]),
        "certificate": certificate,
    }


def _agreement(counted: TokenCounts, names: list[str], shown: list[str]) -> dict[str, dict[str, Any]]:
    tokens, first, both = counted.counts["pairs"].tolist()
    indices = {name: names.index(name) for name in shown}
    agreement: dict[str, dict[str, Any]] = {}
    for a, i in indices.items():
        agreement[a] = {}
        for b, j in indices.items():
            either = first[i][j] + first[j][i] - both[i][j]
            agreement[a][b] = {
                "tokens": tokens[i][j],
                "same": share(tokens[i][j] - either + both[i][j], tokens[i][j]),
                "stopped_by_both": both[i][j],
                "stopped_by_either": either,
                "overlap": share(both[i][j], either),
            }
    return agreement


def _bins(counted: TokenCounts, name: str, names: Sequence[str]) -> dict[str, Any]:
    tokens, stopped = counted.counts[f"by/{name}"].tolist()
    shown = [index for index in range(len(BINS[name]) + 1) if any(row[index] for row in tokens)]
    return {
        "edges": list(BINS[name]),
        "bins": [
            {
                "bin": label(name, index),
                "at": index,
                "regions": {
                    region: {"tokens": t[index], "stopped": s[index], "share": share(s[index], t[index])}
                    for region, t, s in zip(names, tokens, stopped, strict=True)
                    if any(t)
                },
            }
            for index in shown
        ],
    }


def label(name: str, index: int) -> str:
    """Returns the label of a bin."""
    edges = BINS[name]
    if name == "advantage":
        return ("A < 0", "A > 0")[index]
    if name == "probability":
        if index == 0:
            return f"below {edges[0]:g}"
        return f"from {edges[index - 1]:g}" if index == len(edges) else f"{edges[index - 1]:g} to {edges[index]:g}"
    first = 0 if index == 0 else int(edges[index - 1])
    if index == len(edges):
        return f"from {first}"
    last = int(edges[index]) - 1
    return f"{first}" if first == last else f"{first}-{last}"


def _top(
    counted: TokenCounts, names: Sequence[str], top: int, text_of: Callable[[int], str] | None
) -> dict[str, list[dict[str, Any]]]:
    if "ids" not in counted.counts:
        return {}
    seen, *stopped = counted.counts["ids"]
    tokens = {}
    for name, counts in zip(names, stopped, strict=True):
        most, ids = counts.sort(descending=True, stable=True)
        tokens[name] = [
            {"id": token_id, "stopped": count, "signed": int(seen[token_id]), "share": count / int(seen[token_id])}
            | ({} if text_of is None else {"text": text_of(token_id)})
            for token_id, count in zip(ids[:top].tolist(), most[:top].tolist(), strict=True)
            if count
        ]
    return {name: rows for name, rows in tokens.items() if rows}
