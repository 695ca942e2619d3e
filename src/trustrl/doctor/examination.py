"""Every check, as data and as text."""

from dataclasses import asdict, dataclass
from typing import Any

from trustrl.doctor import environment, packages, ports, storage
from trustrl.doctor.findings import LEVELS, Finding


@dataclass(frozen=True, slots=True)
class Examination:
    """What was found."""

    versions: list[dict[str, str | None]]
    cpus: int
    cache: dict[str, Any]
    findings: list[Finding]

    @property
    def has_errors(self) -> bool:
        """Whether something is an error."""
        return any(finding.level == "error" for finding in self.findings)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def examine() -> Examination:
    """Looks at everything; the worst comes first."""
    found = [*packages.check(), *ports.check(), *environment.check(), *storage.check()]
    found.sort(key=lambda finding: LEVELS.index(finding.level))
    return Examination(packages.table(), environment.usable_cpus(), storage.state(), found)


def text(made: Examination) -> str:
    """For people."""
    rows = [("package", "installed", "declared", "tested with")]
    rows += [tuple(row[key] or "-" for key in ("package", "installed", "declared", "tested")) for row in made.versions]
    widths = [max(len(row[at]) for row in rows) for at in range(4)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    more = "" if made.cache["counted_whole"] else " and more"
    size, free = (made.cache[key] / 2**30 for key in ("bytes", "free_bytes"))
    lines += ["", f"{made.cpus} cores; models in {made.cache['folder']}: {size:.2f} GB{more}, {free:.0f} GB free", ""]
    for finding in made.findings:
        lines += [f"{finding.level}: {finding.what}", f"  {finding.why}", f"  → {finding.do}"]
    counted = {level: sum(finding.level == level for finding in made.findings) for level in LEVELS}
    lines.append(", ".join(f"{count} {level}{'' if count == 1 else 's'}" for level, count in counted.items()))
    return "\n".join(lines)
