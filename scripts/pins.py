"""Resolution check: resolves trustrl with the pins of each engine's own environment.

    nox -s pins                 # resolve everything, fail if trustrl breaks an environment
    nox -s pins -- --write      # the same, and write the table into docs/reference/compatibility.md
    nox -s pins -- verl         # only the rows whose name contains "verl"

Each row is resolved without installing anything: with the built wheels and the extras of trustrl that its users need
and, if that fails, the engine alone and with the wheel. A row fails the check only if the engine resolves alone and
does not with trustrl. uv does the resolving because it reads the metadata of a wheel without downloading it: 8 s for
`verl[cpu]==0.9.1`, where `pip install --dry-run` takes 83 to 129 s on the same machine.
"""

import argparse
import re
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/reference/compatibility.md"
MARKERS = ("<!-- begin pins -->", "<!-- end pins -->")
UV_SETTINGS = ROOT / "scripts/pins-uv.toml"
TIMEOUT_S = 600
CONFLICT = "No solution found"
"""uv's word for a conflict. Any other failure may pass, such as an index that does not answer."""
TWO_AT_A_TIME = 2


@dataclass(frozen=True, slots=True)
class Row:
    """One environment that the docs name: an engine, one of its extras, and the trustrl extras that belong there."""

    engine: str
    """The engine and its release, as in "verl 0.9.1"."""

    extra: str
    """The engine's extra, or "" for none."""

    requirements: tuple[str, ...]
    """The requirements that make the environment without trustrl."""

    ours: tuple[str, ...]
    """trustrl's extras that this engine's users install."""

    tests: str
    """The nox session that runs tests with this engine, or "-"."""

    python: str = "3.11"


def _rows(engine: str, package: str, extras: Sequence[str], ours: tuple[str, ...], **more: str) -> list[Row]:
    """Builds one row for each extra of a release."""
    name, version = package.split("==")
    named = [(extra, f"{name}[{extra}]=={version}" if extra else package) for extra in extras]
    return [Row(engine, extra, (requirement,), ours, **more) for extra, requirement in named]


TOOLS = ("run", "models", "tasks", "records", "ray", "plots")
OPENRLHF_TOOLS = tuple(extra for extra in TOOLS if extra != "ray")  # it pins Ray 2.55, and our extra begins at 2.56
WITHOUT_MODELS = tuple(extra for extra in TOOLS if extra != "models")  # for engines below transformers 5.8
GPU = ["vllm", "sglang", "fsdp", "megatron"]

ENGINES = (
    *_rows("TRL 1.16.0", "trl==1.16.0", ["", "vllm"], ("trl", *TOOLS), tests="`trl`, `trl_vllm`"),
    *_rows("TRL 1.15.0", "trl==1.15.0", [""], ("trl", *TOOLS), tests="`trl`"),
    *_rows("TRL 1.9.0", "trl==1.9.0", [""], ("trl", *TOOLS), tests="`trl`"),
    *_rows("TRL 1.0.0", "trl==1.0.0", [""], ("trl", *TOOLS), tests="`trl`"),
    *_rows("verl 0.9.1", "verl==0.9.1", ["", "cpu"], ("verl", *TOOLS), tests="`verl`, `verl_pins`"),
    *_rows("verl 0.9.1", "verl==0.9.1", GPU, ("verl", *TOOLS), tests="-"),
    *_rows("verl 0.9.0", "verl==0.9.0", [""], ("verl", *TOOLS), tests="`verl`"),
    *_rows("verl 0.9.0", "verl==0.9.0", ["vllm", "sglang"], ("verl", *TOOLS), tests="-"),
    *_rows("SkyRL 0.3.0", "skyrl==0.3.0", ["", "ray"], TOOLS, tests="`skyrl`", python="3.12"),
    *_rows("SkyRL 0.3.0", "skyrl==0.3.0", ["skyrl-train", "fsdp", "megatron"], TOOLS, tests="-", python="3.12"),
    *_rows("ms-swift 4.6.0", "ms-swift==4.6.0", [""], TOOLS, tests="`swift`"),
    *_rows("axolotl 0.19.0", "axolotl==0.19.0", [""], TOOLS, tests="`axolotl`"),
    *_rows("OpenRLHF 0.11.2", "openrlhf==0.11.2", ["", "vllm"], OPENRLHF_TOOLS, tests="`openrlhf`"),
    *_rows("tinker 0.38.0", "tinker==0.38.0", [""], TOOLS, tests="`losses`"),
    *_rows("tinker 0.36.0", "tinker==0.36.0", [""], TOOLS, tests="`losses`"),
    *_rows("Trinity-RFT 0.6.0", "trinity-rft==0.6.0", [""], TOOLS, tests="`losses`"),
    *_rows("RLinf 0.3.0", "rlinf==0.3.0", [""], TOOLS, tests="`losses`"),
    *_rows("AReaL 1.0.4", "areal==1.0.4", [""], WITHOUT_MODELS, tests="`losses`"),
    *_rows("vLLM 0.32.0", "vllm==0.32.0", [""], TOOLS, tests="`trl_vllm` (CPU build)"),
    *_rows("SGLang 0.5.23", "sglang==0.5.23", [""], TOOLS, tests="`sglang` (without its kernels)"),
    *_rows("SGLang 0.5.12", "sglang==0.5.12", [""], WITHOUT_MODELS, tests="`sglang_oldest` (without its kernels)"),
    *_rows("Ray 2.60.0", "ray==2.60.0", ["data"], ("ray", "records"), tests="`verl`"),
    *_rows("Ray 2.56.0", "ray==2.56.0", ["data"], ("ray", "records"), tests="`skyrl`"),
)


def own_extras() -> list[Row]:
    """Builds one row for each of trustrl's own extras, from pyproject.toml."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    return [Row("trustrl's extra", name, tuple(needs), (name,), "`package`") for name, needs in extras.items()]


@dataclass(frozen=True, slots=True)
class Resolution:
    """The versions that a resolver chose, or the reason it found none."""

    versions: dict[str, str] | None
    cause: str = ""

    @property
    def found(self) -> bool:
        """True if there is a set of versions that fits."""
        return self.versions is not None


@dataclass(frozen=True, slots=True)
class Outcome:
    """One row with its three resolutions."""

    row: Row
    alone: Resolution
    core: Resolution
    with_extras: Resolution

    @property
    def broken(self) -> bool:
        """True if trustrl breaks an environment that resolves without it; CI must turn red."""
        return self.alone.found and not (self.core.found and self.with_extras.found)

    @property
    def cause(self) -> str:
        """Cause of a failed resolution, or ""."""
        return next((one.cause for one in (self.alone, self.core, self.with_extras) if not one.found), "")


Resolver = Callable[[Sequence[str], str], Resolution]


def resolve_row(row: Row, wheel: str, resolver: Resolver) -> Outcome:
    """Resolves a row with the wheel and its extras; only if that fails, also alone and with the wheel.

    Versions that fit all requirements fit fewer of them too, so one resolution settles a row that works.
    """
    with_extras = resolver([*row.requirements, f"trustrl[{','.join(row.ours)}] @ {wheel}"], row.python)
    if with_extras.found:
        return Outcome(row, with_extras, with_extras, with_extras)
    alone = resolver(row.requirements, row.python)
    if not alone.found:
        skipped = Resolution(None, alone.cause)
        return Outcome(row, alone, skipped, skipped)
    core = resolver([*row.requirements, f"trustrl @ {wheel}"], row.python)
    return Outcome(row, alone, core, with_extras)


def resolve_with_uv(requirements: Sequence[str], python: str) -> Resolution:
    """Asks uv for versions that fit, for Linux on x86-64; once more if it failed without finding a conflict."""
    said = ""
    for _ in range(2):
        done = _uv(requirements, python)
        if done.returncode == 0:
            return Resolution(dict(re.findall(r"^([\w.-]+)==(\S+)", done.stdout, re.M)))
        said = done.stderr
        if CONFLICT in said:
            break
    return Resolution(None, cause_of(said))


def _uv(requirements: Sequence[str], python: str) -> subprocess.CompletedProcess[str]:
    """Runs uv. It installs nothing and downloads no wheel."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "-", "--quiet", "--no-header", "--no-annotate"]
    command += ["--native-tls", "--no-progress", "--config-file", str(UV_SETTINGS)]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_39"]
    try:
        return subprocess.run(
            command, input="\n".join(requirements), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"error: No answer within {TIMEOUT_S} s")


def cause_of(said: str) -> str:
    """Returns uv's explanation of a conflict as one line: the facts, without the conclusions drawn from them."""
    words = " ".join(re.split(r"\n\s*hint:", said)[0].split())
    facts = re.split(r"\b(?:And b|B)ecause ", words.removeprefix("error: "))
    facts = facts[1:] or facts  # before the first "Because" stands what was tried
    kept = [re.split(r",? we can conclude that|,? (?:and )?you require", fact)[0].strip(" .,") for fact in facts]
    return "; ".join(fact for fact in kept if fact and not fact.startswith("you require"))[:400]


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns the Markdown table of the docs page, one line per row."""
    lines = [
        "| engine | extra | Python | torch | resolves alone | with trustrl | with its extras | tests run in | remark |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for one in outcomes:
        row = one.row
        chosen = (one.with_extras.versions or one.core.versions or one.alone.versions or {}).get("torch", "-")
        extras = f"{_yes(one.with_extras)} (`{','.join(row.ours)}`)"
        trust = ("-", "-") if not one.alone.found else (_yes(one.core), extras)
        cells = (row.engine, f"`{row.extra}`" if row.extra else "-", row.python, chosen, _yes(one.alone), *trust)
        lines.append(f"| {' | '.join(cells)} | {row.tests} | {one.cause} |")
    return "\n".join(lines)


def _yes(one: Resolution) -> str:
    return "yes" if one.found else "no"


def verdicts_in(page: str) -> dict[tuple[str, str], tuple[str, ...]]:
    """Reads a table: for each engine and extra, the first word of its three resolutions."""
    rows = [line.strip("| ").split(" | ") for line in between(page).splitlines()[2:]]
    return {(cells[0], cells[1].strip("`")): tuple(cell.split()[0] for cell in cells[4:7]) for cells in rows}


def between(page: str) -> str:
    """Returns the table of a page, or of the text that is nothing but a table."""
    inside = page.partition(MARKERS[0])[2].partition(MARKERS[1])[0] or page
    return inside[inside.index("| engine") :].strip()


def write(page: Path, outcomes: Sequence[Outcome], today: date) -> None:
    """Puts the table between the page's markers, with the date on which it was resolved."""
    text = page.read_text()
    head, _, rest = text.partition(MARKERS[0])
    tail = rest.partition(MARKERS[1])[2]
    said = f"Resolved on {today.isoformat()}:\n\n{table(outcomes)}"
    page.write_text(f"{head}{MARKERS[0]}\n{said}\n{MARKERS[1]}{tail}")


def build_wheels(folder: Path) -> str:
    """Builds the wheels of this checkout and returns the address of trustrl's."""
    for source in (ROOT, ROOT / "packages/verl_cpu"):
        command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(source)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    (wheel,) = folder.glob("trustrl-*.whl")
    return wheel.resolve().as_uri()


def main() -> int:
    """Resolves all rows, prints the table, and returns 1 if trustrl breaks an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="", help="Resolve only the engines whose name contains this.")
    parser.add_argument("--write", action="store_true", help="Write the table into the docs page.")
    asked = parser.parse_args()
    if asked.write and asked.name:
        parser.error("--write needs all rows. Leave the name out.")
    rows = [row for row in (*ENGINES, *own_extras()) if asked.name.lower() in row.engine.lower()]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(TWO_AT_A_TIME) as pool:
        wheel = build_wheels(Path(folder))

        def resolver(requirements: Sequence[str], python: str) -> Resolution:
            return resolve_with_uv([f"--find-links {folder}", *requirements], python)

        outcomes = []
        for one in pool.map(lambda row: resolve_row(row, wheel, resolver), rows):
            outcomes.append(one)
            found = ", ".join(_yes(part) for part in (one.alone, one.core, one.with_extras))
            print(f"{one.row.engine} [{one.row.extra}]: {found}", file=sys.stderr, flush=True)
    print(table(outcomes))
    print(f"\n{len(rows)} environments in {time.monotonic() - started:.0f} s")
    if asked.write:
        write(PAGE, outcomes, date.today())
    elif not asked.name and verdicts_in(table(outcomes)) != verdicts_in(PAGE.read_text()):
        print(f"{PAGE.relative_to(ROOT)} says something else. Run `nox -s pins -- --write`.")
    failed = [one for one in outcomes if one.broken]
    for one in failed:
        print(f"error: {one.row.engine} [{one.row.extra}]: {one.cause}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
