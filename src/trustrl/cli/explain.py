"""`trustrl explain RUN ...`: diagnoses runs from their files."""

import argparse

from trustrl.terminal import complain, one_line, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl explain`."""
    parser.add_argument(
        "runs", metavar="RUN", nargs="+", help="Run directory of `trustrl run`, or the output of another trainer"
    )
    parser.add_argument("--json", action="store_true", help="Print one JSON object for each run, one per line")


def run(options: argparse.Namespace) -> int:
    """Prints the likely causes of each run, most likely first. Returns 1 if there are any, or unreadable files."""
    from trustrl.tools.explain import explain

    explanations = [explain(path) for path in options.runs]
    for place, explanation in enumerate(explanations):
        _ = explanation.gap  # a damaged token record is an error even if no cause needs it
        for fault in (*explanation.run.faults, *filter(None, [explanation.unread])):
            complain(f"{explanation.run.path}: {fault}")
        if options.json:
            say_json(explanation.to_dict(), indent=1 if len(explanations) == 1 else None)
        else:
            heading = f"{one_line(explanation.run.path)}\n\n" if len(explanations) > 1 else ""
            say("\n" * (place > 0) + heading + explanation.text())
    return 1 if any(explanation.causes or explanation.unread for explanation in explanations) else 0
