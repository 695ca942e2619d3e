"""Runs everything that needs a GPU, one part after another, and prints a table: pass, FAIL, or skipped with the reason.

    python tests/gpu/run.py                                # all parts whose packages this Python has
    python tests/gpu/run.py --part kernels --part sums
    python tests/gpu/run.py --python trl=/opt/trl/bin/python
    python tests/gpu/run.py --cpu                          # the same without a GPU: gloo, and Triton's interpreter

The parts are tests of this repository, with TRUSTRL_TEST_DEVICE=cuda. The exit status is 1 if a part failed, and 2 if
none ran. See README.md next to this file.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
ENGINES = "tests/engines"


FIND = """
import sys
from importlib.util import find_spec
for name in sys.argv[1:]:
    try:
        spec = find_spec(name)
    except ModuleNotFoundError:
        spec = None
    if spec is None:
        print(name)
"""


class Part(NamedTuple):
    """One line of the table."""

    packages: tuple[str, ...]
    """Modules that the part imports."""

    tests: tuple[str, ...]
    """Arguments of pytest."""

    on_cpu: dict[str, str] = {}
    """Further variables with `--cpu`."""


PARTS = {
    "kernels": Part(("triton", "jaxtyping"), ("tests/gpu/test_kernels.py",), {"TRITON_INTERPRET": "1"}),
    "sums": Part(("jaxtyping",), ("tests/kernels/test_vocab_parallel.py", "tests/gpu/test_sums.py")),
    "trl": Part(("trl",), (f"{ENGINES}/trl/test_ranks.py", f"{ENGINES}/trl/test_precision.py")),
    "verl": Part(
        ("verl",),
        (
            f"{ENGINES}/verl/test_regions.py::test_a_worker_trains_with_every_kind_of_region[two ranks]",
            f"{ENGINES}/verl/test_precision.py",
        ),
    ),
    "verl-megatron": Part(
        ("verl", "megatron.core"),
        (f"{ENGINES}/verl_megatron/test_regions.py", f"{ENGINES}/verl_megatron/test_precision.py"),
    ),
    "main_ppo": Part(("verl", "ray"), ("tests/gpu/test_main_ppo.py",)),
}


class Result(NamedTuple):
    """The outcome of one part."""

    state: str
    why: str = ""
    minutes: float = 0.0
    tests: dict[str, str] = {}
    """The outcome of each test."""


def environment(part: Part, cpu: bool) -> dict[str, str]:
    """Returns the variables of a part's process."""
    path = os.pathsep.join(filter(None, [str(ROOT / "tests"), os.environ.get("PYTHONPATH")]))
    given = os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if cpu:
        return given | {"OMP_NUM_THREADS": "1"} | part.on_cpu
    return given | {"TRUSTRL_TEST_DEVICE": "cuda"}


def missing(python: str, packages: tuple[str, ...]) -> str:
    """Returns the modules among `packages` that a Python does not find."""
    if not Path(python).exists():
        return f"itself: {python} does not exist"
    command = [python, "-c", FIND, "pytest", "trustrl", *packages]
    done = subprocess.run(command, env=os.environ, capture_output=True, text=True)
    return ", ".join(done.stdout.split()) if done.returncode == 0 else done.stderr[-200:]


def outcomes(report: Path) -> dict[str, str]:
    """Returns the outcome of each test in pytest's report."""
    found = {}
    for case in ElementTree.parse(report).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        found[name] = (
            f"{bad[0].tag}: {bad[0].get('message', '')}" if bad else f"passed in {float(case.get('time', 0)):.0f} s"
        )
    return found


def run(name: str, python: str, cpu: bool, timeout: int, long: bool) -> Result:
    """Runs one part."""
    part = PARTS[name]
    if lacking := missing(python, part.packages):
        return Result("skipped", f"{python} lacks {lacking}: name another with --python {name}=")
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        chosen = () if long else ("-m", "not long")
        command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", *chosen, *part.tests]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=environment(part, cpu), capture_output=True, text=True, timeout=timeout
            )
        except subprocess.TimeoutExpired:
            return Result("FAIL", f"no result after {timeout} s", timeout / 60)
        minutes = (time.monotonic() - begin) / 60
        if not report.exists():
            return Result("FAIL", (done.stdout + done.stderr)[-2000:], minutes)
        tests = outcomes(report)
    return judged(done.returncode, tests, minutes, done.stdout)


def judged(status: int, tests: dict[str, str], minutes: float, said: str) -> Result:
    """Returns the result of a part from pytest's exit status and outcomes."""
    counts = {kind: sum(one.startswith(kind) for one in tests.values()) for kind in ("passed", "skipped")}
    bad = [f"{name}: {one[:300]}" for name, one in tests.items() if not one.startswith(("passed", "skipped"))]
    summary = f"{counts['passed']} passed" + (f", {counts['skipped']} skipped" if counts["skipped"] else "")
    if status not in (0, 5) or bad:
        return Result("FAIL", f"{len(bad)} failed, {summary}; " + (bad[0] if bad else said[-500:]), minutes, tests)
    if not counts["passed"]:
        reasons = {one for one in tests.values() if one.startswith("skipped")}
        return Result("skipped", "; ".join(sorted(reasons)) or "no test was chosen", minutes, tests)
    return Result("pass", summary, minutes, tests)


def main() -> int:
    """Runs the parts and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", action="append", choices=PARTS, help="Run this part; may be repeated.")
    parser.add_argument("--python", action="append", default=[], metavar="PART=PYTHON", help="The Python of a part.")
    parser.add_argument("--cpu", action="store_true", help="Run without a GPU: gloo, and Triton's interpreter.")
    parser.add_argument("--long", action="store_true", help="Run the layouts that CI leaves out, too.")
    parser.add_argument("--json", type=Path, help="Also write the results to this file.")
    parser.add_argument("--timeout", type=int, default=3600, help="Seconds for each part (3600).")
    chosen = parser.parse_args()
    pythons = dict(one.partition("=")[::2] for one in chosen.python)
    if unknown := pythons.keys() - PARTS.keys():
        parser.error(f"--python must name parts among {', '.join(PARTS)}, got {', '.join(sorted(unknown))}.")
    results = {}
    for name in chosen.part or PARTS:
        print(f"running {name}", file=sys.stderr, flush=True)
        results[name] = run(name, pythons.get(name, sys.executable), chosen.cpu, chosen.timeout, chosen.long)
    print(f"{'part':14} {'result':8} {'minutes':>7}")
    for name, one in results.items():
        print(f"{name:14} {one.state:8} {one.minutes:7.1f}  {one.why}")
    if chosen.json:
        content = {name: one._asdict() for name, one in results.items()}
        chosen.json.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    states = {one.state for one in results.values()}
    return 1 if "FAIL" in states else 2 if "pass" not in states else 0


if __name__ == "__main__":
    sys.exit(main())
