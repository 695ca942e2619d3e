"""`trustrl explain RUN`: diagnoses a run from its directory."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl explain`."""
    parser.add_argument("run", metavar="RUN", type=Path, help="Run directory that `trustrl run` created")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the likely causes, most likely first. Returns 1 if it finds any."""
    from trustrl.tools.explain.explanation import explain, text

    causes = explain(options.run)
    if options.json:
        print(json.dumps({"run": str(options.run), "findings": [one.to_dict() for one in causes]}, indent=1))
    else:
        print(text(causes))
    return 1 if causes else 0
