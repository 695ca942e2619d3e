"""`trustrl conformance pkg.module:function`: what a policy loss does with small batches that have known answers."""

import argparse
import json
import sys
from pathlib import Path

KINDS = ("any", "ppo", "dppo", "pg")
ADAPTERS = ("plain", "verl", "skyrl", "trustrl")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The verb's own arguments."""
    parser.add_argument("loss", metavar="package.module:function", help="the policy loss; it is imported and called")
    parser.add_argument(
        "settings", metavar="key=value", nargs="*", default=[], help="settings of it, as in clip_ratio_high=0.05"
    )
    parser.add_argument("--adapter", choices=ADAPTERS, help="how it is called (by its parameters)")
    parser.add_argument("--kind", choices=KINDS, default="any", help="what it is meant to be: whose truth table holds")
    parser.add_argument("--all", action="store_true", help="also shows what passes")
    parser.add_argument("--json", action="store_true", help="one JSON object with every row")


def run(options: argparse.Namespace) -> int:
    """Prints the table; 1 where something fails."""
    from trustrl.conformance import running
    from trustrl.conformance.adapters import adapted, detected
    from trustrl.conformance.target import find
    from trustrl.runner.toml import override

    sys.path.insert(0, str(Path.cwd()))  # the caller's own module, as `python -m` would find it
    loss = find(options.loss)
    name = options.adapter or detected(loss)
    settings = override({}, options.settings)
    print(f"{options.loss}: called as {name}, judged as {options.kind}", file=sys.stderr)
    results = running.run(adapted(loss, name, settings), options.kind)
    counts = running.counts(results)
    if options.json:
        head = {"loss": options.loss, "adapter": name, "kind": options.kind, "settings": settings, "counts": counts}
        print(json.dumps(head | {"results": running.to_dict(results)}, indent=1, ensure_ascii=False))
    else:
        print(running.text(results, everything=options.all))
    return 1 if counts.get("fails") else 0
