"""Audits for the terminal: tables up to 100 characters wide, with model text escaped."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from trustrl.tools.audit.record_anchor import anchor_note

WIDTH = 100
NAME = 18
"""Maximum length of a region's name in tables."""

COLUMNS_AT_ONCE = 8
BIN_COLUMNS = 6


def printable(text: str, longest: int = 16) -> str:
    r"""Escapes the control characters in text from a tokenizer or model, so that it is safe to print.

    Example:
        >>> printable("a\x1b[1m\n")
        'a\\x1b[1m\\n'
    """
    safe = "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
    return safe if len(safe) <= longest else safe[: longest - 1] + "…"


def percent(share: float | None) -> str:
    """Formats a share as a percentage, with enough digits to show a small one; "–" for None."""
    if share is None:
        return "–"
    value = 100 * share
    return f"{value:.2f}%" if value == 0 or value >= 0.01 else f"{value:.0e}%"


def table(rows: Sequence[Sequence[str]], *, left: int = 1) -> list[str]:
    """Formats rows as aligned columns. The first row is the header, and the first `left` columns align left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip()[:WIDTH])
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def text(report: Mapping[str, Any]) -> str:
    """Formats an audit for the terminal."""
    lines = [
        *wrapped(
            f"{report['rows']:,} tokens × updates in {report['files']:,} files, {report['sequences']:,} sequences × "
            f"updates; {report['signed']:,} tokens with A ≠ 0"
        ),
        *wrapped(anchor_note(report["anchor"])),
        *_reproduced(report),
        *_masked(report),
        *_agreement(report),
        *_bins(report),
        *_tokens(report),
    ]
    return "\n".join(lines)


def _name(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def _reproduced(report: Mapping[str, Any]) -> list[str]:
    again = report["reproduced"]
    kinds = ", ".join(str(region.get("kind")) for region in report["recorded"])
    if not kinds:
        return ["recorded without a region", ""]
    line = f"recorded with {printable(kinds, 60)}"
    if not again["rows"]:
        return [*wrapped(f"{line}, which cannot be replayed"), ""]
    line += f"; its replay differs at {again['kept_differs']:,} of {again['rows']:,} verdicts"
    if again["weight_rows"]:
        line += f" and {again['weight_differs']:,} weights"
    return [*wrapped(line), ""]


def _masked(report: Mapping[str, Any]) -> list[str]:
    rows = [["region", "how", "masked", "share", "at most", "TV or KL outside", "inside", "undecided"]]
    notes = []
    for name, region in report["regions"].items():
        if region["reason"]:
            notes += wrapped(f"{_name(name)}: {region['reason']}.")
        if region["how"] == "left out":
            continue
        bounded = region["how"] == "bounded"
        certificate = region["certificate"] or {}
        rows.append(
            [
                _name(name), region["how"], f"{region['stopped']:,}", percent(region["stopped_share"]),
                percent(region["stopped_share_at_most"]) if bounded else "",
                *(percent(certificate.get(key)) for key in ("outside", "inside", "undecided")),
            ]
        )  # fmt: skip
    return ["Tokens masked by each region", *table(rows, left=2), *notes, ""]


def wrapped(text: str) -> list[str]:
    """Wraps text to the width of the tables."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _agreement(report: Mapping[str, Any]) -> list[str]:
    names = list(report["agreement"])
    if len(names) < 2:
        return []
    lines = ["Agreement: share with the same verdict (above the diagonal), masked by both / by either (below)"]
    for start in range(0, len(names), COLUMNS_AT_ONCE):
        part = names[start : start + COLUMNS_AT_ONCE]
        rows = [["", *(f"{names.index(name) + 1}" for name in part)]]
        for i, a in enumerate(names):
            cells = [
                "" if a == b else percent(report["agreement"][a][b]["same" if i < names.index(b) else "overlap"])
                for b in part
            ]
            rows.append([f"{i + 1:>2} {_name(a)}", *cells])
        lines += [*table(rows), ""]
    return lines


def _bins(report: Mapping[str, Any]) -> list[str]:
    titles = {
        "probability": "probability", "position": "position", "age": "updates since sampled", "advantage": "advantage",
    }  # fmt: skip
    names = [n for n, region in report["regions"].items() if region["how"] in ("recorded", "replayed", "bounded")]
    has_bounded = any(region["how"] == "bounded" for region in report["regions"].values())
    lines = ["Masked share by bin" + (" (bounded regions: at least)" if has_bounded else "")]
    for start in range(0, len(names), BIN_COLUMNS):
        part = names[start : start + BIN_COLUMNS]
        rows = [["", "", *map(_short, part)]]
        for kind, title in titles.items():
            for index, row in enumerate(report["by"].get(kind, {"bins": []})["bins"]):
                cells = [percent(row["regions"].get(name, {"share": None})["share"]) for name in part]
                rows.append([title if index == 0 else "", row["bin"], *cells])
        lines += [*table(rows, left=2), ""]
    return lines


def _short(name: str, longest: int = 8) -> str:
    """Shortens a region's name for a column header."""
    parts = name if len(name) <= longest else name.replace("dppo-", "").replace("binary", "bin")
    return parts if len(parts) <= longest else parts[: longest - 1] + "…"


def _tokens(report: Mapping[str, Any]) -> list[str]:
    rows = [["region", "most masked token ids: times masked (share of their tokens)"]]
    for name, ids in report["tokens"].items():
        line = ""
        for token in ids:
            shown = f"'{token['text']}' " if "text" in token else ""
            cell = f"{token['id']} {shown}{token['stopped']} ({percent(token['share'])})"
            if line and len(line) + len(cell) + 2 > WIDTH - NAME - 4:
                break
            line += f"{', ' * bool(line)}{cell}"
        rows.append([_name(name), line])
    return table(rows, left=2) if len(rows) > 1 else []
