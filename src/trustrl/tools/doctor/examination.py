"""All doctor checks, with the result as data and as text."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from trustrl.tools.doctor import LEVELS, environment, package_versions, ports, storage


def examine() -> dict[str, Any]:
    """Runs every check. Returns the object that `trustrl doctor --json` prints, with the worst findings first."""
    findings = [*package_versions.check(), *ports.check(), *environment.check(), *storage.check()]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return {
        "versions": package_versions.table(),
        "cpus": environment.usable_cpus(),
        "cache": storage.state(),
        "findings": [asdict(finding) for finding in findings],
    }


def text(made: Mapping[str, Any]) -> str:
    """Formats an examination for the terminal."""
    rows = [("package", "installed", "declared", "tested with")]
    rows += [
        tuple(row[key] or "-" for key in ("package", "installed", "declared", "tested")) for row in made["versions"]
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    cache, findings = made["cache"], made["findings"]
    more = "" if cache["counted_whole"] else " and more"
    size, free = (cache[key] / 2**30 for key in ("bytes", "free_bytes"))
    lines += ["", f"{made['cpus']} cores; models in {cache['folder']}: {size:.2f} GB{more}, {free:.0f} GB free", ""]
    for finding in findings:
        lines += [f"{finding['level']}: {finding['what']}", f"  {finding['why']}", f"  → {finding['do']}"]
    counted = {level: sum(finding["level"] == level for finding in findings) for level in LEVELS}
    lines.append(", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counted.items()))
    return "\n".join(lines)
