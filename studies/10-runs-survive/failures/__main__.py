"""Failure matrix: makes every failure, resumes, compares, and writes docs/data/failures.json and its page.

    PYTHONPATH=studies/10-runs-survive python -m failures run [--only ROW ...] [--again]    # in the environment of TRL
    PYTHONPATH=studies/10-runs-survive python -m failures page

A row that is in the data already is skipped without `--again`, so an interrupted command continues. Progress is on
stderr.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from failures import faults, matrix, page

ROOT = Path(__file__).parents[3]


def main() -> None:
    parser = argparse.ArgumentParser(prog="failures", description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("run", "page", "list"))
    parser.add_argument("--only", nargs="*", default=[], help="Names of rows")
    parser.add_argument("--again", action="store_true", help="Make rows that are in the data again")
    parser.add_argument("--scratch", type=Path, help="Folder for the runs (default: a temporary one)")
    options = parser.parse_args()
    if options.what == "page":
        page.write()
    elif options.what == "list":
        print("\n".join(dict(matrix.rows(Path()))))
    elif options.scratch is not None:
        options.scratch.mkdir(parents=True, exist_ok=True)
        run(options.scratch.resolve(), options)
    else:
        with tempfile.TemporaryDirectory() as folder:
            run(Path(folder), options)


def run(scratch: Path, options: argparse.Namespace) -> None:
    """Makes the chosen rows. Starts this program again with the shim if it was started without."""
    if "LD_PRELOAD" not in os.environ:
        library = faults.compiled(scratch)
        key = scratch / "key"  # not the user's
        more = {"LD_PRELOAD": str(library), "TRUSTRL_KEY_FILE": str(key)}
        command = [sys.executable, "-m", "failures", *sys.argv[1:], "--scratch", str(scratch)]
        sys.exit(subprocess.run(command, env={**os.environ, **more}, check=False).returncode)
    matrix.make(scratch, options.only, again=options.again)


if __name__ == "__main__":
    main()
