"""Reports on runs that are still training: a new one whenever files of the runs have changed."""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from trustrl.errors import ConfigError, TrustRLError
from trustrl.runs.open_run import open_runs
from trustrl.terminal import complain
from trustrl.tools.report.report_contents import Report, gather

LARGEST_SHARE = 0.1
"""Largest share of one core that reading takes. Long runs are therefore read less often.

CPU time decides, because a machine that is busy with training stretches the clock.
"""

Stamp = dict[str, tuple[int, int]]


def live_reports(
    paths: Sequence[str], *, every: float, with_page: bool, sleep: Callable[[float], None] = time.sleep
) -> Iterator[Report]:
    """Yields a report on the runs, and another one each time their files have changed.

    Ends when all runs have finished or failed. Files that cannot be read while a trainer writes them are read again.

    Args:
        paths: The runs. Each must exist, but may still be empty.
        every: Seconds between two checks of the files.
        with_page: Read the tokens and completions that a page shows.
        sleep: Function that waits.

    Raises:
        ConfigError: If a path does not exist.
    """
    for path in paths:
        if not _folder(path).exists():
            raise ConfigError(f"RUN must be a folder or file that exists, got {path}.")
    bounds = {} if with_page else {"max_points": 0, "max_shown": 0}
    before: Stamp | None = None
    said = ""
    while True:
        began = time.process_time()
        now = stamp(paths)
        if now != before:
            before = now
            try:
                report = gather(open_runs(paths), **bounds)
            except (TrustRLError, OSError) as error:
                if str(error) != said:
                    complain(f"waiting: {error}")
                said = str(error)
            else:
                yield report
                if all(run.run.status in ("finished", "failed") for run in report.runs):
                    return
        took = time.process_time() - began
        sleep(max(every, took * (1 / LARGEST_SHARE - 1)))


def stamp(paths: Sequence[str]) -> Stamp:
    """Returns size and time of change of every file of the runs. Logs next to a run directory belong to it."""
    entries: Stamp = {}
    for path in map(_folder, paths):
        files = (
            [Path(folder, name) for folder, _, names in os.walk(path) for name in names] if path.is_dir() else [path]
        )
        for file in (*files, Path(os.path.realpath(path)).with_suffix(".log")):
            try:
                about = file.stat()
            except OSError:  # removed since, such as a temporary file
                continue
            entries[str(file)] = (about.st_size, about.st_mtime_ns)
    return entries


def _folder(path: str) -> Path:
    """Returns the path without the name of a run inside a database."""
    return Path(path.partition("::")[0])
