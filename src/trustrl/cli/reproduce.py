"""`trustrl reproduce RUN... --figure NAME --out FILE`: draws a paper's figure from runs and judges its claim."""

import argparse
from pathlib import Path

from trustrl.cli.shared_options import check_picture, prepare_file, written
from trustrl.errors import ConfigError
from trustrl.terminal import complain, say, say_json


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl reproduce`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="Run of any trainer, as for `trustrl report`")
    parser.add_argument("--figure", required=True, metavar="NAME", help="A name such as dppo-3")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="Picture: a .png, .svg, or .pdf")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Draws the figure, and prints the verdict with its evidence. Returns 1 if the runs contradict the claim."""
    from trustrl.runs.open_run import open_runs
    from trustrl.tools.reproduce import FIGURES, reproduce

    if options.figure not in FIGURES:
        raise ConfigError(f"--figure must be one of {', '.join(FIGURES)}, got {options.figure!r}.")
    check_picture("--out", options.out)
    runs = open_runs(options.runs)
    prepare_file("--out", options.out)
    with written("--out", options.out):
        reproduction = reproduce(options.figure, runs, options.out)
    claim = FIGURES[options.figure].claim
    if options.json:
        say_json({"figure": options.figure, "claim": claim, **reproduction.__dict__})
    else:
        say(f"{options.figure}: {claim or 'no claim was found as text'}\nverdict: {reproduction.verdict}")
        for sentence in reproduction.evidence:
            say(f"  {sentence}")
    complain(options.out)
    return 1 if reproduction.verdict == "not reproduced" else 0
