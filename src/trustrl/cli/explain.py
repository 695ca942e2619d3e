"""`trustrl explain RUN`: why a run went wrong, from its folder alone."""

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a folder that `trustrl run` made")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of text")


def run(options: argparse.Namespace) -> int:
    """Prints ranked causes; 1 where there is one."""
    from trustrl.explain.explanation import explain
    from trustrl.explain.text import text

    findings = explain(options.run)
    if options.json:
        print(json.dumps({"run": str(options.run), "findings": [one.to_dict() for one in findings]}, indent=1))
    else:
        print(text(findings))
    return 1 if findings else 0
