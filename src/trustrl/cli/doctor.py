"""`trustrl doctor`: versions, open ports, insecure settings, threads and disk, before a run finds out."""

import argparse
import json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("--json", action="store_true", help="one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints what was found; 1 where something is an error."""
    from trustrl.doctor.examination import examine, text

    made = examine()
    print(json.dumps(made.to_dict(), indent=1, ensure_ascii=False) if options.json else text(made))
    return 1 if made.has_errors else 0
