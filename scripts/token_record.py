"""Specification of the token record, written from src/trustrl/recording.

python scripts/token_record.py    writes docs/specification/token-record.json, and the tables of token-record.md
"""

import json
from pathlib import Path

from trustrl.recording.run_file import RUN_SCHEMA
from trustrl.recording.schema import (
    PARTS_KEY,
    REGION_KEY,
    STEP_KEY,
    TABLE_KEY,
    TABLES,
    VERSION,
    VERSION_KEY,
    WRITER_KEY,
)  # fmt: skip

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/specification/token-record.md"
FILES = {"tokens": "{file}", "sequences": "sequences/{file}", "texts": "texts/{file}"}


def schema_file() -> str:
    """Returns the text of token-record.json."""
    tables = {
        name: {
            "files": FILES[name].format(file="step-XXXXXXXX.rank-XXXX.parquet"),
            "columns": [
                {"name": c.name, "type": c.kind, "nullable": c.nullable, "since": c.since, "meaning": c.meaning}
                for c in columns
            ],
        }
        for name, columns in TABLES.items()
    }
    keys = {
        "version": VERSION_KEY, "table": TABLE_KEY, "region": REGION_KEY, "step": STEP_KEY, "writer": WRITER_KEY,
        "parts": PARTS_KEY,
    }  # fmt: skip
    found = {
        "version": VERSION, "metadata_keys": {name: key.decode() for name, key in keys.items()}, "tables": tables,
        "run.json": RUN_SCHEMA,
    }  # fmt: skip
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def table(name: str) -> str:
    """Returns the columns of one table in Markdown."""
    lines = ["| column | type | may be null | since | meaning |", "|---|---|---|---|---|"]
    for c in TABLES[name]:
        lines.append(f"| `{c.name}` | {c.kind} | {'yes' if c.nullable else 'no'} | {c.since} | {c.meaning} |")
    return "\n".join(lines)


def run_table() -> str:
    """Returns the keys of run.json in Markdown."""
    lines = ["| key | type | meaning |", "|---|---|---|"]
    for name, rule in RUN_SCHEMA["properties"].items():
        kinds = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        inner = ", ".join(f"`{key}`" for key in rule.get("properties", {}))
        lines.append(f"| `{name}` | {' or '.join(kinds)} | {rule['description']}{': ' * bool(inner)}{inner} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Returns the text of token-record.md with its tables written again.

    Raises:
        SystemExit: a marker is missing.
    """
    for name, made in [*((name, table(name)) for name in TABLES), ("run", run_table())]:
        begin, end = f"<!-- {name}: begin (python scripts/token_record.py) -->", f"<!-- {name}: end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"{PAGE} must contain {begin!r} and {end!r}, where the table goes.")
        text = f"{before}{begin}\n\n{made}\n\n{end}{after}"
    return text


def main() -> None:
    """Writes both files."""
    PAGE.with_suffix(".json").write_text(schema_file())
    PAGE.write_text(page(PAGE.read_text()))


if __name__ == "__main__":
    main()
