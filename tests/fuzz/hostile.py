"""Measures what small files with huge contents cost a command: peak memory, seconds, and the sentence about them.

python -m fuzz.hostile --out docs/data/hostile.json
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.hostile_files import FILES

SECONDS, MEMORY = 60, 2_000_000_000
WRITE = "import sys; from pathlib import Path; from support.hostile_files import FILES; FILES[sys.argv[1]][0](Path(sys.argv[2]))"


def measured(name: str, folder: Path) -> dict[str, float | int | str]:
    """Returns the size of a run on disk, and what `trustrl report` needs for it and says about it."""
    _, words = FILES[name]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    # In another process: the peak of a process counts from that of the one that starts it.
    subprocess.run([sys.executable, "-c", WRITE, name, str(folder)], check=True, env=environment)
    size = sum(file.stat().st_blocks * 512 for file in folder.rglob("*") if file.is_file())
    start = time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "-m", "trustrl.cli", "report", str(folder), "--json"],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.monotonic() - start
    match = re.search(rf"[^\n]*({words})[^\n]*", said) if words else None
    sentence = match[0].replace(str(folder), "RUN").strip(' ",') if match else "" if words else "read"
    return {
        "name": name, "bytes": size, "exit": process.returncode, "peak": used.ru_maxrss * 1024,
        "cpu": round(used.ru_utime + used.ru_stime, 1), "seconds": round(seconds, 1), "sentence": sentence,
        "traceback": "Traceback" in said,
    }  # fmt: skip


def table(rows: list[dict]) -> str:
    """Returns the measurements as a table in Markdown."""
    lines = ["| input | on disk, kB | peak, MB | CPU, s | what is said |", "|---|---:|---:|---:|---|"]
    for row in rows:
        words = re.search(FILES[row["name"]][1], row["sentence"])
        said = row["sentence"][words.start() :] if words else row["sentence"]
        said = said if len(said) <= 120 else f"{said[:120]}…"
        cells = (f"{row['bytes'] / 1000:,.0f}", f"{row['peak'] / 1e6:,.0f}", f"{row['cpu']:.1f}")
        lines.append(f"| {row['name']} | {' | '.join(cells)} | {said.replace('|', ' ').replace('<', '&lt;')} |")
    return "\n".join(lines)


def main() -> int:
    """Measures every input, prints the table, and writes the figures."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = []
    for name in FILES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measured(name, Path(folder) / "run"))
        print(rows[-1], file=sys.stderr, flush=True)
    print(table(rows))
    if options.out:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")
    return int(
        any(row["traceback"] or not row["sentence"] or row["peak"] > MEMORY or row["cpu"] > SECONDS for row in rows)
    )


if __name__ == "__main__":
    sys.exit(main())
