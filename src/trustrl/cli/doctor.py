"""`trustrl doctor`: checks package versions, open ports, insecure settings, threads, and disk."""

import argparse

from trustrl.terminal import say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl doctor`."""
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints the findings. Returns 1 if one of them is an error."""
    from trustrl.tools.doctor.examination import examine, text

    made = examine()
    say_json(made) if options.json else say(text(made))
    return 1 if any(finding["level"] == "error" for finding in made["findings"]) else 0
