"""`trustrl metrics [NAME]`: explains a logged metric, its healthy range, and how to respond.

The metric dictionary loads without torch, so the verb is fast.
"""

import argparse
import sys
from typing import Any

from trustrl.core.metric_entries import Metric
from trustrl.core.metrics import CORE, METRICS
from trustrl.errors import ConfigError, UnknownNameError
from trustrl.registry import nearest
from trustrl.terminal import say, say_json

PREFIX = "trustrl/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl metrics`."""
    parser.add_argument(
        "name", metavar="NAME", nargs="?", help="Metric, with or without an engine's prefix (default: list all)"
    )
    parser.add_argument("--core", action="store_true", help="List only the metrics that engines log by default")
    parser.add_argument("--json", action="store_true", help="Print a JSON object, or a list for all metrics")
    parser.add_argument(
        "--dashboard",
        choices=("tensorboard", "wandb", "grafana", "prometheus", "alerts"),
        help="Print a dashboard of the core metrics: an event file, a Python script or a JSON file",
    )


def run(options: argparse.Namespace) -> int:
    """Prints one metric in full, one line per metric, or the file of a dashboard."""
    if options.dashboard is not None:
        _print_dashboard(options.dashboard)
    elif options.name is None:
        listed = [metric for metric in METRICS if not options.core or metric.name in CORE]
        width = max(len(metric.name) for metric in listed)
        lines = (f"{metric.name:<{width}}  {metric.formula} [{metric.unit}]" for metric in listed)
        say_json([_entry(metric) for metric in listed]) if options.json else say("\n".join(lines))
    else:
        metric = _named(options.name)
        say_json(_entry(metric)) if options.json else say(_text(metric))
    return 0


def _print_dashboard(kind: str) -> None:
    from trustrl.tools.dashboards import DASHBOARDS

    content = DASHBOARDS[kind]()
    if kind == "tensorboard" and sys.stdout.isatty():
        raise ConfigError(
            "The output must be a file, got a terminal. Add `> LOGDIR/events.out.tfevents.0.trustrl`: TensorBoard "
            "reads files with such names."
        )
    sys.stdout.buffer.write(content)
    sys.stdout.buffer.flush()


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


def _text(metric: Metric) -> str:
    lines = {name: getattr(metric, name) for name in ("formula", "unit", "direction", "healthy")}
    lines |= {"what to do": metric.action}
    lines |= {f"in {engine}": name for engine, name in metric.elsewhere.items()}
    return "\n".join([PREFIX + metric.name, *(f"  {label:<11} {text}" for label, text in lines.items())])
