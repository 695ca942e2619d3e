"""`trustrl metrics [NAME]`: explains a logged metric, its healthy range, and how to respond.

The metric dictionary loads without torch, so the verb is fast.
"""

import argparse
import json
from typing import Any

from trustrl.core.metrics import METRICS, Metric
from trustrl.errors import UnknownNameError
from trustrl.registry import nearest

PREFIX = "trustrl/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl metrics`."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="Metric, with or without an engine's prefix (default: list all)"
    )
    parser.add_argument("--json", action="store_true", help="Print a JSON object, or a list for all metrics")


def run(options: argparse.Namespace) -> int:
    """Prints one metric in full, or one line per metric."""
    if options.name is None:
        print(_json([_entry(metric) for metric in METRICS]) if options.json else _list())
    else:
        metric = _named(options.name)
        print(_json(_entry(metric)) if options.json else _text(metric))
    return 0


def _named(name: str) -> Metric:
    known = {metric.name: metric for metric in METRICS}
    bare = name.rpartition(PREFIX)[2]  # engines add prefixes
    if bare not in known:
        raise UnknownNameError(
            f"Unknown metric {name!r}.{nearest(bare, known)} Run `trustrl metrics` for the full list."
        )
    return known[bare]


def _entry(metric: Metric) -> dict[str, Any]:
    fields = ("formula", "unit", "direction", "healthy", "action", "elsewhere")
    return {"name": PREFIX + metric.name} | {field: getattr(metric, field) for field in fields}


def _list() -> str:
    width = max(len(metric.name) for metric in METRICS)
    return "\n".join(f"{metric.name:<{width}}  {metric.formula} [{metric.unit}]" for metric in METRICS)


def _text(metric: Metric) -> str:
    lines = [
        ("formula", metric.formula),
        ("unit", metric.unit),
        ("direction", metric.direction),
        ("healthy", metric.healthy),
        ("what to do", metric.action),
    ]
    lines += [(f"in {engine}", name) for engine, name in metric.elsewhere.items()]
    return "\n".join([PREFIX + metric.name, *(f"  {label:<11} {text}" for label, text in lines)])


def _json(data: Any) -> str:
    return json.dumps(data, indent=1, ensure_ascii=False)
