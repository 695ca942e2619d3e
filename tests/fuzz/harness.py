"""Fuzz harness: damages files, runs every command that reads them, and counts what comes of it.

    python -m fuzz.harness --cases 2000 --seed 1 --out figures.json

A command must answer, or refuse in a sentence with an exit code that is not 0. Counted as faults: a traceback, a hang, a
dead process, a control character on the terminal, JSON that is not JSON, a refusal without a sentence, and another
answer where bits of a file with checksums have changed.
"""

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import random
import shutil
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from fuzz.corpus import KINDS, Kind, build
from fuzz.damage import HOSTILE, Damage, damaged

SECONDS = 60.0
"""Time after which a command counts as hanging. The slowest takes half a second on a free core."""

PATIENCE = 600.0
"""Time for what loads modules: the start of a process, and the commands on undamaged inputs."""

MEMORY = 16 * 2**30
"""Address space of the process that runs the commands."""

FAULTS = ("traceback", "hang", "died", "unescaped", "not JSON", "no sentence", "difference", "script in page")
OUTCOMES = ("answer", "same answer", "said", "refused", *FAULTS)


class Outcome(NamedTuple):
    """What a command did."""

    code: int
    out: str
    err: str
    trace: str = ""
    page: str = ""


class Case(NamedTuple):
    """One damaged input and the outcomes of its commands."""

    number: int
    kind: str
    form: str
    file: str
    damage: Damage
    outcomes: dict[str, tuple[str, str]]
    """Outcome, and what to look at, by command."""


def ran(command: str, here: str) -> Outcome:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    arguments = [part.format(here=here) for part in command.split()]
    page = Path(here, "page.html")
    page.unlink(missing_ok=True)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _surroundings():
            code = _main(arguments)
    except BaseException:
        return Outcome(-1, out.getvalue(), err.getvalue(), traceback.format_exc())
    shown = page.read_text() if "--out" in command and page.exists() else ""
    return Outcome(code, out.getvalue(), err.getvalue(), page=shown)


def _main(arguments: Sequence[str]) -> int:
    from trustrl.cli import complain, main
    from trustrl.errors import TrustRLError

    if arguments[0] != "prompts":  # `probe` would train a model before it reads them
        return main(arguments)
    from trustrl.cli.probe import _prompts

    try:
        print(json.dumps(_prompts(Path(arguments[1]))))
    except TrustRLError as error:
        complain(f"error: {error}")
        return 2
    return 0


@contextlib.contextmanager
def _surroundings() -> Iterator[None]:
    """Warnings as messages, `watch` with one look, and `compare` without training."""
    import warnings

    from trustrl.terminal import escape_warnings
    from trustrl.tools.report import live_view

    def ended(_: float) -> None:
        raise KeyboardInterrupt

    fails = [sys.executable, "-c", "import sys; sys.exit(3)", "--"]
    idle = mock.patch("trustrl.runner.grid.command_of", return_value=fails)
    defaults = mock.patch.dict(live_view.live_reports.__kwdefaults__, sleep=ended)
    with warnings.catch_warnings(), idle, defaults:
        warnings.simplefilter("default")
        escape_warnings()
        yield


def _serve(pipe: Any) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    sys.stdin = open(os.devnull)  # noqa: SIM115
    import matplotlib.pyplot  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import torch

    torch.set_num_threads(1)
    pipe.send("ready")
    while True:
        commands, here = pipe.recv()
        for command in commands:
            pipe.send(ran(command, here))


class Worker:
    """Process that runs commands, and that another one replaces if it hangs or dies."""

    def __init__(self) -> None:
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        if not self._pipe.poll(PATIENCE) or self._pipe.recv() != "ready":
            raise RuntimeError("the process that runs the commands did not start")

    def run(self, commands: Sequence[str], here: Path, seconds: float = SECONDS) -> Iterator[Outcome | str]:
        """Yields the outcome of each command, or "hang" or "died"."""
        self._pipe.send((commands, str(here)))
        for at in range(len(commands)):
            try:
                if self._pipe.poll(seconds):
                    yield self._pipe.recv()
                    continue
                found = "hang"
            except (EOFError, OSError):
                found = "died"
            self.close()
            self._start()
            self._pipe.send((commands[at + 1 :], str(here)))
            yield found

    def close(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.join()


def judged(outcome: Outcome | str, before: Outcome, case: tuple[Kind, Damage, str]) -> tuple[str, str]:
    """Returns the name of an outcome, and the text to look at if it is a fault."""
    kind, damage, file = case
    if isinstance(outcome, str):
        return outcome, ""
    if outcome.trace or "Traceback (most recent call last)" in outcome.err:
        return "traceback", outcome.trace or outcome.err
    for text in (outcome.out, outcome.err):
        hidden = [one for one in text if not (one in "\n\t" or one.isprintable())]
        if hidden or "\nerror: forged" in text:
            return "unescaped", repr(text[:2000])
    if any(one in outcome.page for one in HOSTILE[6:8]):
        return "script in page", ""
    try:
        answer = _plain(outcome.out)
    except ValueError as error:
        return "not JSON", f"{error}: {outcome.out[:500]}"
    if outcome.code and not outcome.err.strip() and not outcome.out.strip():
        return "no sentence", ""
    if outcome.err.startswith(("error: ", "Press Ctrl-C to end.\nwaiting: ")) and outcome.code:
        return ("refused", "") if len(outcome.err) < 3000 else ("no sentence", outcome.err[:3000])
    if answer == _plain(before.out) and outcome.code == before.code:
        return "same answer", ""
    name = Path(file).name
    if (outcome.err + outcome.out).count(name) > (before.err + before.out).count(name):
        return "said", ""
    if kind.has_checksums and damage.is_flip:
        return "difference", f"{outcome.code} {outcome.err}\n{outcome.out[:3000]}"
    return "answer", ""


def _plain(text: str) -> Any:
    """Returns the answer: the JSON objects, or the lines."""

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is not JSON")

    if text.lstrip().startswith(("{", "[")):
        return json.loads(text, parse_constant=refuse)
    return text


def cases(numbers: Iterable[int], seed: int, folder: Path) -> Iterator[Case]:
    """Yields damaged inputs and their outcomes. `folder` is empty, and outside of all inputs."""
    worker = Worker()
    outside = folder / "outside.json"
    outside.write_text('{"secret": "' + "s3cret" * 4 + '"}')
    whole, before = folder / "whole", dict[str, dict[str, Outcome]]()
    for kind in KINDS:
        build(kind.name, whole / kind.name / "run")
    try:
        for number in numbers:
            # Half of all cases damage records: they carry the promise that no answer changes in silence.
            kind = KINDS[0] if number % 2 else KINDS[1 + number // 2 % (len(KINDS) - 1)]
            here = folder / "case"
            if kind.name not in before:
                _copied(whole / kind.name, here)
                before[kind.name] = dict(zip(kind.commands, _undamaged(worker, kind, here), strict=True))
            draw = random.Random(f"{seed} {number}")
            _copied(whole / kind.name, here)
            form = draw.choice(list(kind.formats))
            files = sorted(
                one for pattern in kind.formats[form] for one in (here / "run").glob(pattern) if one.is_file()
            )
            file = draw.choice(files)
            damage = damaged(file, form, draw, outside)
            short = str(file.relative_to(here))
            outcomes = {
                command: judged(outcome, before[kind.name][command], (kind, damage, short))
                for command, outcome in zip(kind.commands, worker.run(kind.commands, here), strict=True)
            }
            yield Case(number, kind.name, form, short, damage, outcomes)
    finally:
        worker.close()


def _undamaged(worker: Worker, kind: Kind, here: Path) -> Iterator[Outcome]:
    for command, found in zip(kind.commands, worker.run(kind.commands, here, PATIENCE), strict=True):
        if isinstance(found, str) or found.trace or found.err.startswith("error: "):
            raise AssertionError(f"{command} must read the undamaged input, got {found}")
        yield found


def _copied(source: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(source, to, symlinks=True)


def counted(found: Sequence[Case]) -> dict[str, dict[str, Counter[str]]]:
    """Returns the outcomes by input and format, and by command. `inputs` counts the damaged inputs."""
    by_format: dict[str, Counter[str]] = {}
    by_command: dict[str, Counter[str]] = {}
    for case in found:
        row = by_format.setdefault(f"{case.kind}: {case.form}", Counter())
        row["inputs"] += 1
        for command, (outcome, _) in case.outcomes.items():
            row[outcome] += 1
            by_command.setdefault(command.split()[0], Counter())[outcome] += 1
        for verb in {command.split()[0] for command in case.outcomes}:
            by_command[verb]["inputs"] += 1
    return {"input": dict(sorted(by_format.items())), "command": dict(sorted(by_command.items()))}


COLUMNS = {
    "inputs": ("inputs",), "same answer": ("same answer",), "answer that names the damage": ("said",),
    "other answer": ("answer",), "refused": ("refused",), "tracebacks": ("traceback", "died"), "hangs": ("hang",),
    "silent differences": ("difference",), "other faults": ("unescaped", "not JSON", "no sentence", "script in page"),
}  # fmt: skip


def table(counts: Mapping[str, Mapping[str, Mapping[str, int]]]) -> str:
    """Returns the counts as tables in Markdown."""
    parts = []
    for title, rows in counts.items():
        total = {name: sum(row.get(name, 0) for row in rows.values()) for row in rows.values() for name in row}
        shown = {f"`{name}`": row for name, row in rows.items()} | ({"all": total} if title == "input" else {})
        lines = [f"| {title} | {' | '.join(COLUMNS)} |", f"|---|{'---:|' * len(COLUMNS)}"]
        for name, row in shown.items():
            cells = (f"{sum(row.get(one, 0) for one in names):,}" for names in COLUMNS.values())
            lines.append(f"| {name} | {' | '.join(cells)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _write(file: Path, seed: int, found: Sequence[Case]) -> None:
    file.write_text(json.dumps({"inputs": len(found), "seed": seed, "counts": counted(found)}, indent=1) + "\n")


def _show(case: Case, num: int) -> None:
    for command, (outcome, look) in case.outcomes.items():
        if outcome in FAULTS:
            print(f"{case.number} {outcome}: {command}: {case.damage.what} in {case.file}\n{look}", flush=True)
    if num % 100 == 0:
        print(f"{num} inputs", file=sys.stderr, flush=True)


def main() -> int:
    """Runs the harness, prints each fault, and writes the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    options = parser.parse_args()
    found: list[Case] = []

    def work(at: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            for case in cases(range(at, options.cases, options.jobs), options.seed, Path(folder)):
                found.append(case)
                _show(case, len(found))
                if options.out and len(found) % 100 == 0:
                    _write(options.out, options.seed, found)

    with ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    counts = counted(found)
    total = sum(counts["input"].values(), Counter[str]())
    print(table(counts))
    print(json.dumps({"seed": options.seed, **total}))
    if options.out:
        _write(options.out, options.seed, found)
    return int(any(total[fault] for fault in FAULTS))


if __name__ == "__main__":
    sys.exit(main())
