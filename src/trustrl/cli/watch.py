"""`trustrl watch RUN...`: follows runs in the terminal and, with --out, on a page that reloads itself."""

import argparse
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from datetime import datetime
from functools import partial
from pathlib import Path

from trustrl.cli.shared_options import prepare_file, written
from trustrl.errors import ConfigError, MissingPackageError
from trustrl.terminal import complain, escaped, say

Show = Callable[[str], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `trustrl watch`."""
    parser.add_argument("runs", metavar="RUN", nargs="+", help="Run of any trainer, as for `trustrl report`")
    parser.add_argument("--out", type=Path, metavar="FILE.html", help="Keep writing an HTML page that reloads itself")
    parser.add_argument(
        "--prometheus",
        type=Path,
        metavar="FILE.prom",
        help="Keep writing a text file for node exporter",
    )
    parser.add_argument(
        "--otlp",
        metavar="URL",
        help="Keep sending the same values to an OpenTelemetry collector, such as http://localhost:4318/v1/metrics",
    )
    parser.add_argument(
        "--every", type=float, default=10.0, metavar="SECONDS",
        help="Look for new data at this interval (default: 10). Long runs are read less often",
    )  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Shows the runs until they end or Ctrl-C is pressed. Returns 1 if a run failed or cannot be read."""
    from trustrl.files import write_whole
    from trustrl.tools.report.html_page import page
    from trustrl.tools.report.live_view import live_reports, stamp
    from trustrl.tools.report.otel_export import otlp_gauges
    from trustrl.tools.report.prometheus_text import prometheus_text
    from trustrl.tools.report.report_contents import text

    if not 0 < options.every < float("inf"):
        raise ConfigError(f"--every must be a positive number of seconds, got {options.every:g}.")
    if options.prometheus is not None and options.prometheus.suffix != ".prom":
        raise ConfigError(f"--prometheus must end with .prom, got {options.prometheus}. The collector reads no others.")
    for option, file in (("--out", options.out), ("--prometheus", options.prometheus)):
        if file is not None:
            prepare_file(option, file)
    unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    report, before = None, ""
    sender = nullcontext() if options.otlp is None else otlp_gauges(options.otlp)
    with suppress(KeyboardInterrupt), sender as gauges, _display() as show:
        for report in live_reports(options.runs, every=options.every, with_page=options.out is not None):
            now = text(report, unicode=unicode)
            if now != before:
                show(now)
                before = now
            if options.out is not None:
                with written("--out", options.out):
                    write_whole(options.out, page(report, reload_seconds=options.every))
            changed = max((time for _, time in stamp(options.runs).values()), default=0) / 1e9
            if options.prometheus is not None:
                with written("--prometheus", options.prometheus):
                    write_whole(options.prometheus, prometheus_text(report, changed))
            if gauges is not None:
                gauges.set(report, changed)
    if report is None:
        return 1
    if options.out is not None:
        with written("--out", options.out):
            write_whole(options.out, page(report))  # the last page stops reloading
    failed = any(entry.run.status == "failed" for entry in report.runs)
    return 1 if failed or any(report.notes) else 0


@contextmanager
def _display() -> Iterator[Show]:
    """Context manager that yields a function to show a text: in place on a terminal, one after the other elsewhere."""
    from trustrl.optional_imports import need

    try:
        live, console, rich_text = (need(f"rich.{name}", extra="run") for name in ("live", "console", "text"))
        screen = console.Console(file=sys.stdout)
        in_place = screen.is_terminal and not screen.is_dumb_terminal
    except MissingPackageError:
        live = rich_text = screen = None
        in_place = False
    if live is None or rich_text is None or not in_place:
        complain("Press Ctrl-C to end.")
        yield partial(say, end="\n\n")
        return
    last = ""

    def shown(text: str) -> None:
        nonlocal last
        last = text
        now = f"{escaped(text)}\n\n{datetime.now():%H:%M:%S}, Ctrl-C ends"
        view.update(rich_text.Text(now, no_wrap=True, overflow="ellipsis"), refresh=True)

    try:
        with live.Live(console=screen, screen=True, auto_refresh=False) as view:
            yield shown
    finally:
        if last:
            say(last)  # stays in the terminal after the full-screen view
