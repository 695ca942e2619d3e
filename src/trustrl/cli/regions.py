"""`trustrl regions [NAME]`: lists the presets, or explains one."""

import argparse
import inspect
from typing import Any

from trustrl.terminal import say, say_json

READS = {"sampled": "sampled token", "topk": "top K", "projection": "top K", "exact": "vocabulary"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl regions`."""
    parser.add_argument("name", metavar="NAME", nargs="?", help="Explain this preset (default: list all)")
    parser.add_argument("--json", action="store_true", help="Print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Prints one line per preset, or the equation, the settings and the engines of one."""
    from trustrl.regions.presets import presets

    if options.name is not None:
        facts = _facts(options.name)
        say_json(facts) if options.json else say(_explained(options.name, facts))
        return 0
    listed = {name: _facts(name) for name in sorted(presets())}
    if options.json:
        say_json(listed)
        return 0
    width = max(map(len, listed))
    for name, facts in listed.items():
        say(f"{name:<{width}}  {facts['reads']:<13}  {len(facts['engines']):>2} engines  {facts['effect']}")
    return 0


def _facts(name: str) -> dict[str, Any]:
    from trustrl.engines.catalogue import ENGINES, kind_of, supports
    from trustrl.regions.loading import config_to_dict
    from trustrl.regions.presets import preset

    region = preset(name)
    return {
        "reads": READS[kind_of(region)],
        "anchors": sorted(region.needs().anchors),
        "engines": [engine.name for engine in ENGINES if supports(engine, region)],
        "effect": region.words(),
        "settings": config_to_dict(region),
        "documentation": _documentation(name, region),
    }


def _documentation(name: str, region: object) -> str:
    """Returns the docstring of the file that defines the preset."""
    from trustrl.regions import catalogue, installed, presets_of

    modules = (*catalogue(), *installed())
    module = next((module for module in modules if name in presets_of(module)), inspect.getmodule(type(region)))
    return inspect.getdoc(module) or ""


def _explained(name: str, facts: dict[str, Any]) -> str:
    return "\n".join(
        [
            facts["documentation"],
            "",
            f"{name}: {facts['effect']}",
            f"reads: log-probs of the {facts['reads']}, anchored on {' and '.join(facts['anchors'])}",
            f"engines: {', '.join(facts['engines'])}",
            f"in Python: trustrl.preset({name!r})",
        ]
    )
