"""`trustrl conformance pkg.module:function`: tests a policy loss on small batches with known answers."""

import argparse
import sys
from pathlib import Path

from trustrl.terminal import complain, say, say_json

KINDS = ("any", "ppo", "dppo", "pg")
ADAPTERS = ("plain", "verl", "skyrl", "trustrl", "trl", "openrlhf", "logprobs", "torchtune")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl conformance`."""
    parser.add_argument("loss", metavar="package.module:function", help="Policy loss to import and call")
    parser.add_argument(
        "settings",
        metavar="key=value",
        nargs="*",
        default=[],
        help="Settings of the loss, such as clip_ratio_high=0.05",
    )
    parser.add_argument(
        "--adapter", choices=ADAPTERS, help="Calling convention of the loss (default: detected from its parameters)"
    )
    parser.add_argument(
        "--kind", choices=KINDS, default="any", help="Algorithm whose truth table the loss must follow (default: any)"
    )
    parser.add_argument("--all", action="store_true", help="Also list the cases that pass")
    parser.add_argument("--json", action="store_true", help="Print one JSON object with every case")


def run(options: argparse.Namespace) -> int:
    """Prints the result of every case. Returns 1 if a case fails."""
    from trustrl.runner.recipe_files import override
    from trustrl.tools.conformance import corpus
    from trustrl.tools.conformance.adapters import adapted, detected, find

    sys.path.insert(0, str(Path.cwd()))  # so that modules in the working directory are found, as with `python -m`
    loss = find(options.loss)
    name = options.adapter or detected(loss)
    settings = override({}, options.settings)
    complain(f"{options.loss}: adapter {name}, kind {options.kind}")
    results = corpus.run(adapted(loss, name, settings), options.kind)
    counts = corpus.counts(results)
    if options.json:
        head = {"loss": options.loss, "adapter": name, "kind": options.kind, "settings": settings, "counts": counts}
        say_json(head | {"results": corpus.to_dict(results)})
    else:
        say(corpus.text(results, everything=options.all))
    return 1 if counts.get("fails") else 0
