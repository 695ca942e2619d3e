"""Audits for the terminal: tables up to 100 characters wide, with model text escaped."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

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
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if at < left else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip()[:WIDTH])
    return [lines[0], "-" * len(lines[0]), *lines[1:]]


def text(found: Mapping[str, Any]) -> str:
    """Formats an audit for the terminal."""
    lines = [
        *wrapped(
            f"{found['rows']:,} tokens × updates in {found['files']:,} files, {found['sequences']:,} sequences × "
            f"updates; {found['signed']:,} tokens with A ≠ 0"
        ),
        *_reproduced(found),
        *_masked(found),
        *_agreement(found),
        *_bins(found),
        *_tokens(found),
    ]
    return "\n".join(lines)


def _name(name: str) -> str:
    return name if len(name) <= NAME else name[: NAME - 1] + "…"


def _reproduced(found: Mapping[str, Any]) -> list[str]:
    again = found["reproduced"]
    kinds = ", ".join(str(region.get("kind")) for region in found["recorded"])
    line = f"recorded with {printable(kinds, 60)}"
    if not again["rows"]:
        return [*wrapped(f"{line}, which cannot be replayed"), ""]
    line += f"; its replay differs at {again['kept_differs']:,} of {again['rows']:,} verdicts"
    if again["weight_rows"]:
        line += f" and {again['weight_differs']:,} weights"
    return [*wrapped(line), ""]


def _masked(found: Mapping[str, Any]) -> list[str]:
    rows = [["region", "how", "masked", "share", "at most", "TV or KL outside", "inside", "undecided"]]
    notes = []
    for name, one in found["regions"].items():
        if one["reason"]:
            notes += wrapped(f"{_name(name)}: {one['reason']}.")
        if one["how"] == "left out":
            continue
        bounded = one["how"] == "bounded"
        certificate = one["certificate"] or {}
        rows.append(
            [
                _name(name), one["how"], f"{one['stopped']:,}", percent(one["stopped_share"]),
                percent(one["stopped_share_at_most"]) if bounded else "",
                *(percent(certificate.get(key)) for key in ("outside", "inside", "undecided")),
            ]
        )  # fmt: skip
    return ["Tokens masked by each region", *table(rows, left=2), *notes, ""]


def wrapped(text: str) -> list[str]:
    """Wraps text to the width of the tables."""
    return textwrap.wrap(text, WIDTH, subsequent_indent="  ")


def _agreement(found: Mapping[str, Any]) -> list[str]:
    names = list(found["agreement"])
    if len(names) < 2:
        return []
    lines = ["Agreement: share with the same verdict (above the diagonal), masked by both / by either (below)"]
    for start in range(0, len(names), COLUMNS_AT_ONCE):
        part = names[start : start + COLUMNS_AT_ONCE]
        rows = [["", *(f"{names.index(name) + 1}" for name in part)]]
        for i, a in enumerate(names):
            cells = [
                "" if a == b else percent(found["agreement"][a][b]["same" if i < names.index(b) else "overlap"])
                for b in part
            ]
            rows.append([f"{i + 1:>2} {_name(a)}", *cells])
        lines += [*table(rows), ""]
    return lines


def _bins(found: Mapping[str, Any]) -> list[str]:
    titles = {
        "probability": "probability", "position": "position", "age": "updates since sampled", "advantage": "advantage",
    }  # fmt: skip
    names = [n for n, one in found["regions"].items() if one["how"] in ("recorded", "replayed", "bounded")]
    lines = ["Masked share by bin" + (" (bounded regions: at least)" if _has_bounded(found) else "")]
    for start in range(0, len(names), BIN_COLUMNS):
        part = names[start : start + BIN_COLUMNS]
        rows = [["", "", *map(_short, part)]]
        for kind, title in titles.items():
            for at, one in enumerate(found["by"].get(kind, {"bins": []})["bins"]):
                cells = [percent(one["regions"].get(name, {"share": None})["share"]) for name in part]
                rows.append([title if at == 0 else "", one["bin"], *cells])
        lines += [*table(rows, left=2), ""]
    return lines


def _has_bounded(found: Mapping[str, Any]) -> bool:
    return any(one["how"] == "bounded" for one in found["regions"].values())


def _short(name: str, longest: int = 8) -> str:
    """Shortens a region's name for a column header."""
    parts = name if len(name) <= longest else name.replace("dppo-", "").replace("binary", "bin")
    return parts if len(parts) <= longest else parts[: longest - 1] + "…"


def _tokens(found: Mapping[str, Any]) -> list[str]:
    rows = [["region", "most masked token ids: times masked (share of their tokens)"]]
    for name, ids in found["tokens"].items():
        line = ""
        for one in ids:
            shown = f"'{one['text']}' " if "text" in one else ""
            cell = f"{one['id']} {shown}{one['stopped']} ({percent(one['share'])})"
            if line and len(line) + len(cell) + 2 > WIDTH - NAME - 4:
                break
            line += f"{', ' * bool(line)}{cell}"
        rows.append([_name(name), line])
    return table(rows, left=2) if len(rows) > 1 else []
