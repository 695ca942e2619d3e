"""All doctor checks, with the result as data and as text."""

from dataclasses import asdict, dataclass
from typing import Any

from trustrl.tools.doctor import environment, package_versions, ports, storage
from trustrl.tools.doctor.findings import LEVELS, Finding


@dataclass(frozen=True, slots=True)
class Examination:
    """Package versions, cores, model cache, and findings of one machine."""

    versions: list[dict[str, str | None]]
    cpus: int
    cache: dict[str, Any]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        """True if any finding is an error."""
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """Returns the object that `trustrl doctor --json` prints."""
        return asdict(self)


def examine() -> Examination:
    """Runs every check and sorts the findings by severity."""
    findings = [*package_versions.check(), *ports.check(), *environment.check(), *storage.check()]
    findings.sort(key=lambda finding: LEVELS.index(finding.level))
    return Examination(package_versions.table(), environment.usable_cpus(), storage.state(), findings)


def text(made: Examination) -> str:
    """Formats an examination for the terminal."""
    rows = [("package", "installed", "declared", "tested with")]
    rows += [tuple(row[key] or "-" for key in ("package", "installed", "declared", "tested")) for row in made.versions]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = "" if made.cache["counted_whole"] else " and more"
    size, free = (made.cache[key] / 2**30 for key in ("bytes", "free_bytes"))
    lines += ["", f"{made.cpus} cores; models in {made.cache['folder']}: {size:.2f} GB{more}, {free:.0f} GB free", ""]
    for finding in made.findings:
        lines += [f"{finding.level}: {finding.what}", f"  {finding.why}", f"  → {finding.do}"]
    counted = {level: sum(finding.level == level for finding in made.findings) for level in LEVELS}
    lines.append(", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counted.items()))
    return "\n".join(lines)
