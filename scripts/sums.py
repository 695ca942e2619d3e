"""Code, page and recorded counts of the sums, written from the rows of `trustrl.core.sum_table` and the metrics.

python scripts/sums.py    writes the files in FILES, then records kernel counts and registers with Triton 3.7.1

The counts are limits of tests. If you add a sum, they rise: read the difference before you commit it.
"""

import ast
import os
import struct
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

from trustrl.core import sum_table as table
from trustrl.core.metrics import METRICS, Metric

ROOT = Path(__file__).parents[1]

EAGER = {
    "exp": "torch.exp({0})", "abs": "{0}.abs()", "where": "torch.where({0}, {1}, {2})", "finite": "{0}.isfinite()",
    "known": "~{0}.isnan()", "clip": "{0}.clamp({1}, {2})", "at_most": "{0}.clamp(max={1})", "inf": "torch.inf",
    "finite_part": "torch.nan_to_num({0}, posinf=0.0)", "only": "{1} * {0}", "inexact": "{0}",
    "pick": "({1} if {0} else {2})",
}  # fmt: skip
TRITON = {
    "exp": "tl.exp({0})", "abs": "tl.abs({0})", "where": "tl.where({0}, {1}, {2})",
    "finite": '(tl.abs({0}) < float("inf"))', "known": "({0} == {0})",
    "clip": "tl.minimum(tl.maximum({0}, {1}), {2})", "at_most": "tl.minimum({0}, {1})", "inf": 'float("inf")',
    "finite_part": 'tl.where({0} < float("inf"), {0}, 0.0)', "only": "tl.where({0}, {1}, 0.0)",
    "inexact": "tl.full((ROWS,), {0}, tl.float64)",  # a bare 0.3 may become 0.30000001
    "pick": EAGER["pick"],
}  # fmt: skip
SIGNS = {
    ast.BitAnd: "&", ast.BitOr: "|", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Invert: "~", ast.USub: "-",
}  # fmt: skip

COLUMNS = {column.name: column for column in table.COLUMNS}
SHARED = {shared.name: shared.expression for shared in table.SHARED}


def translated(expression: str, language: Mapping[str, str], names: Mapping[str, str]) -> str:
    """Returns an expression of the table in one language.

    Args:
        expression: The expression.
        language: EAGER or TRITON.
        names: Code of each column and shared expression.

    Raises:
        SystemExit: The expression uses something else.
    """

    def text(node: ast.AST, *, inner: bool = True) -> str:
        match node:
            case ast.Call(func=ast.Name(id=name), args=args) if name in language:
                exposed = "({0}" not in language[name]  # an operator or a method binds to a part of the argument
                return language[name].format(*(text(arg, inner=exposed) for arg in args))
            case ast.Name(id=name) if name in language or name in names or name in table.CONSTANTS:
                return language.get(name, names.get(name, name))
            case ast.Constant(value=int() | float() as value):
                return repr(value) if _exact(value) else language["inexact"].format(value)
            case ast.UnaryOp(op=op, operand=operand) if type(op) in SIGNS:
                return f"{SIGNS[type(op)]}{text(operand)}"
            case ast.BinOp(left=left, op=op, right=right) | ast.Compare(left=left, ops=[op], comparators=[right]) if (
                type(op) in SIGNS
            ):
                code = f"{text(left)} {SIGNS[type(op)]} {text(right)}"
                return f"({code})" if inner else code
        raise SystemExit(f"The table of sums must not use {ast.unparse(node)!r}, got {expression!r}.")

    return text(ast.parse(expression, mode="eval").body, inner=False)


def _exact(value: float) -> bool:
    """Returns True if float32 holds the number."""
    return struct.unpack("f", struct.pack("f", value))[0] == value


def read_by(expressions: Iterable[str]) -> set[str]:
    """Returns the names in some expressions."""
    return {node.id for text in expressions for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}


class EagerCode:
    """Calls of an accumulator with torch tensors. Rows whose columns may be absent stand in nested conditions."""

    def __init__(self, language: Mapping[str, str] = EAGER, column: str = "x.{}") -> None:
        """Starts with no line. `column` is the format of a column's name."""
        self.names = {name: column.format(name) for name in COLUMNS} | {name: name for name in SHARED}
        self.translated = partial(translated, language=language, names=self.names)
        self._lines: list[str] = []
        self._open: list[str] = []
        self._made: list[set[str]] = [set()]

    def body(self) -> str:
        """Returns the lines."""
        for needs, rows in groupby(table.ROWS, key=lambda row: row.needs):
            self._within(needs)
            for row in rows:
                # As late as possible: what waits for its first use occupies registers.
                self._make([row.expression, *(("masked", "gap") if row.reduction == "binned" else ())])
                self.add(self.row(row))
        return "\n".join(self._lines)

    def add(self, line: str | None) -> None:
        """Adds a line inside the open conditions."""
        if line:
            self._lines.append("    " * (len(self._open) + 1) + line)

    def made(self, name: str) -> bool:
        """Returns True if an earlier line has made it, in a condition that is still open."""
        return any(name in names for names in self._made)

    def _within(self, needs: tuple[str, ...]) -> None:
        """Closes and opens conditions, so that exactly these columns are there."""
        while self._open != list(needs[: len(self._open)]):
            self._open.pop()
            self._made.pop()
        for name in needs[len(self._open) :]:
            self.add(f"if {self.condition(name)}:")
            self._open.append(name)
            self._made.append(set())

    def _make(self, expressions: Iterable[str]) -> None:
        """Adds the columns and shared expressions that these read, unless they are made already."""
        wanted = read_by(expressions)
        for name, expression in reversed(SHARED.items()):
            if name in wanted and not self.made(name):
                wanted |= read_by([expression.rpartition(" or ")[2]])
        for name in (*COLUMNS, *SHARED):
            if name in wanted and not self.made(name):
                self.add(self.column(name) if name in COLUMNS else self._shared(name))
                self._made[-1].add(name)

    def _shared(self, name: str) -> str:
        column, _, instead = SHARED[name].rpartition(" or ")
        return f"{name} = {self.either(column, instead) if column else self.translated(instead)}"

    def condition(self, name: str) -> str:
        """Returns the condition that a column is there."""
        return f"x.{name}" if COLUMNS[name].kind == "switch" else f"x.{name} is not None"

    def column(self, name: str) -> str | None:
        """Returns the line that reads a column, if it takes a line: here columns are fields."""

    def either(self, column: str, instead: str) -> str:
        """Returns a column, or the other one where it is absent."""
        return f"x.{instead} if x.{column} is None else x.{column}"

    def row(self, row: table.Row) -> str | None:
        """Returns the call that takes the row's values."""
        same = next(other for other in table.ROWS if _slot(other) == _slot(row))
        if same is not row:
            return f'totals.same("{row.name}", "{same.name}")'
        verb = "count_all" if row.over == "all" else row.reduction
        more = ", masked, gap" if row.reduction == "binned" else ""
        return f'totals.{verb}("{row.name}", {self.translated(row.expression)}{more})'


class KernelCode(EagerCode):
    """The same as loads and stores of one block of tokens in Triton."""

    def __init__(self) -> None:
        """Starts with no line."""
        super().__init__(TRITON, "_{}")
        self.names |= {column.name: column.name for column in table.COLUMNS if column.kind == "switch"}
        self._sums, self._extremes, self._histograms = slots("count", "sum"), slots("max"), slots("histogram")
        self._stored: set[int] = set()

    def condition(self, name: str) -> str:
        """Returns the condition that a column is there, known when Triton compiles."""
        return name if COLUMNS[name].kind == "switch" else f"{name} is not None"

    def column(self, name: str) -> str | None:
        """Returns the load of a column. A switch is an argument."""
        return None if COLUMNS[name].kind == "switch" else f"_{name} = {self._load(name)}"

    def either(self, column: str, instead: str) -> str:
        """Returns the load of a column, or the other one where it is absent."""
        return f"_{instead} if {column} is None else {self._load(column)}"

    def _load(self, name: str) -> str:
        kind = COLUMNS[name].kind
        # A token after the last must not look masked.
        other = int(name == "keep") if kind == "flag" else "0.0"
        code = f"tl.load({name} + rows{' * bound_step' if kind == 'bound' else ''}, mask=here, other={other})"
        return f"{code} != 0" if kind == "flag" else f"{code}.to(tl.float64)"

    def row(self, row: table.Row) -> str | None:
        """Returns the store of a row's sum, unless its slot has it already."""
        name, code, bins = row.name, self.translated(row.expression), "HALF, FIRST_BIN, BIN_SHIFT"
        if row.reduction == "max":
            return f"top(tops, {self._extremes[name]}, {code}, _usable)  # {name}"
        if row.reduction == "histogram":
            return f"add_to_bins(bins + {self._histograms[name]} * num_bins, {code}, _usable, {bins})  # {name}"
        if row.reduction == "binned":
            edges = f"{name.removeprefix('by_').upper()}_EDGES"
            return f"put_binned(out + {binned_slots()[name]}, {code}, _usable, masked, gap, {edges})  # {name}"
        slot = self._sums[name]
        if slot in self._stored:
            return None
        self._stored.add(slot)
        if row.over == "usable":
            code = f"_usable & ({code})" if row.reduction == "count" else f"tl.where(_usable, {code}, 0.0)"
        return f"put(out, {slot}, {code})  # {name}"


def _slot(row: table.Row) -> tuple[str, str, str]:
    """Returns what the rows of a slot have in common."""
    return row.expression, row.over, "sum" if row.reduction == "count" else row.reduction


def slots(*reductions: str) -> dict[str, int]:
    """Returns the slot of each row. Rows with the same expression over the same tokens share a slot."""
    places: dict[object, int] = {}
    rows = (row for row in table.ROWS if row.reduction in reductions)
    return {row.name: places.setdefault(_slot(row), len(places)) for row in rows}


def binned_slots() -> dict[str, int]:
    """Returns the first slot of each binned sum: eight bins of three columns, after the plain sums."""
    first = len(set(slots("count", "sum").values()))
    binned = (row.name for row in table.ROWS if row.reduction == "binned")
    return {name: first + 24 * place for place, name in enumerate(binned)}


def eager() -> str:
    """Returns core/eager_sums.py."""
    fields = [
        f"    {column.name}: {'bool' if column.kind == 'switch' else 'Tensor | None' if column.optional else 'Tensor'}"
        for column in table.COLUMNS
    ]
    constants = ", ".join(f"{name}: float" for name in table.CONSTANTS)
    return EAGER_FILE.format(fields="\n".join(fields), constants=constants, body=EagerCode().body())


def kernel() -> str:
    """Returns kernels/sum_kernels.py."""
    binned = binned_slots()
    pointers = [column.name for column in table.COLUMNS if column.kind != "switch"]
    switches = [f"{column.name}: tl.constexpr" for column in table.COLUMNS if column.kind == "switch"]
    constants = [f"{name}: tl.constexpr" for name in table.CONSTANTS]
    return KERNEL_FILE.format(
        arguments="\n".join([*_wrapped(pointers), *_wrapped(switches + constants)]),
        sums=_listed(slots("count", "sum")), extremes=_listed(slots("max")), histograms=_listed(slots("histogram")),
        binned=_listed(binned), needs=_listed({row.name: row.needs for row in table.ROWS if row.needs}),
        num_sums=len(set(slots("count", "sum").values())) + 24 * len(binned),
        num_extremes=len(set(slots("max").values())), num_histograms=len(set(slots("histogram").values())),
        body=KernelCode().body(),
    )  # fmt: skip


def _wrapped(arguments: list[str]) -> list[str]:
    return [f"    {', '.join(arguments[i : i + 6])}," for i in range(0, len(arguments), 6)]


def _listed(places: Mapping[str, object]) -> str:
    return "\n".join(f'    "{name}": {place},'.replace("'", '"') for name, place in places.items())


def metrics_page() -> str:
    """Returns docs/reference/metrics.md with its tables written again."""
    page = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
    rows = [
        f"| `{row.name}` | `{_cell(row.expression)}` | {row.unit} | {row.reduction} | {_names(row.needs)} |"
        for row in table.ROWS
    ]
    page = _between(page, "metrics", "\n".join(_metric(metric) for metric in METRICS))
    return _between(page, "sums", "\n".join(rows))


def _metric(metric: Metric) -> str:
    elsewhere = ", ".join(f"{engine}: `{name}`" for engine, name in sorted(metric.elsewhere.items()))
    texts = (_cell(text) for text in (metric.formula, metric.unit, metric.healthy, metric.action))
    return f"| `trustrl/{metric.name}` | {' | '.join(texts)} | {elsewhere or '–'} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _names(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names) or "–"


def _between(page: str, name: str, rows: str) -> str:
    """Returns the page with other rows between the marks of a table, below its two lines of headings."""
    before, begin, rest = page.partition(f"<!-- {name}: begin (python scripts/sums.py) -->\n")
    table_text, end, after = rest.partition(f"\n<!-- {name}: end -->")
    if not (begin and end):
        raise SystemExit(f"docs/reference/metrics.md must contain the marks of the table of {name}.")
    headings = "\n".join(table_text.split("\n")[:2])
    return f"{before}{begin}{headings}\n{rows}{end}{after}"


EAGER_FILE = '''"""Sums over tokens as torch operations.

Written by `python scripts/sums.py` from `trustrl.core.sum_table`: change the rows there.
"""
# fmt: off
# ruff: noqa

from typing import NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor


class SumInputs(NamedTuple):
    """Columns of the table, flat. Without an optional column, the sums that need it are left out."""

{fields}


@runtime_checkable
class Accumulator(Protocol):
    """Receiver of the values of each row."""

    def count(self, name: str, x: Tensor) -> None: ...
    def count_all(self, name: str, x: Tensor) -> None: ...
    def same(self, name: str, other: str) -> None: ...
    def sum(self, name: str, x: Tensor) -> None: ...
    def max(self, name: str, x: Tensor) -> None: ...
    def histogram(self, name: str, x: Tensor) -> None: ...
    def binned(self, name: str, x: Tensor, masked: Tensor, gap: Tensor) -> None: ...


def add_up(totals: Accumulator, x: SumInputs, *, {constants}) -> None:
    """Adds every row whose columns are there."""
{body}
'''

KERNEL_FILE = '''"""Sums over tokens in one Triton launch.

Written by `python scripts/sums.py` from `trustrl.core.sum_table`: change the rows there.
"""
# The bodies are Triton's language, whose values have no Python types; `triton` itself may not be installed.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportMissingImports=false
# fmt: off
# ruff: noqa

import triton.language as tl

from trustrl.kernels.token_kernels import add_to_bins, put, put_binned, top
from trustrl.kernels.triton_launch import jit

NUM_SUMS, NUM_EXTREMES, NUM_HISTOGRAMS = {num_sums}, {num_extremes}, {num_histograms}
SUMS: dict[str, int] = {{
{sums}
}}
EXTREMES: dict[str, int] = {{
{extremes}
}}
HISTOGRAMS: dict[str, int] = {{
{histograms}
}}
BINNED: dict[str, int] = {{
{binned}
}}
"""Slot of each row."""

NEEDS: dict[str, tuple[str, ...]] = {{
{needs}
}}
"""Columns without which a row's slot holds garbage."""


@jit
def sums_kernel(
{arguments}
    partials, extremes, bins, n, num_bins, bound_step, PROBABILITY_EDGES: tl.constexpr, STALENESS_EDGES: tl.constexpr,
    HALF: tl.constexpr, FIRST_BIN: tl.constexpr, BIN_SHIFT: tl.constexpr, NUM_SUMS: tl.constexpr,
    NUM_EXTREMES: tl.constexpr, ROWS: tl.constexpr,
):
    """Sums one block of tokens. Blocks are added in a fixed order later; only histograms, which count, are atomic."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = rows < n
    out = partials + tl.program_id(0) * NUM_SUMS
    tops = extremes + tl.program_id(0) * NUM_EXTREMES
    # Numbers may arrive in the record's dtype. All sums are taken in float64, as the eager ones are.
{body}
'''

FILES = {
    "src/trustrl/core/eager_sums.py": eager,
    "src/trustrl/kernels/sum_kernels.py": kernel,
    "docs/reference/metrics.md": metrics_page,
}


def record_counts() -> None:
    """Records the kernels and registers of the written code, and their table in docs/cost.md, in new processes."""
    if not find_spec("triton"):
        print("Triton is not installed, so kernels and registers were not counted again.", file=sys.stderr)
        return
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    counting = [sys.executable, "-m", "support.kernel_counts", "--write"]
    counts = subprocess.run(
        counting, env=environment | {"TRITON_INTERPRET": "1"}, check=True, capture_output=True, text=True
    )
    page = ROOT / "docs/cost.md"
    before, begin, rest = page.read_text(encoding="utf-8").partition("<!-- begin launches -->\n")
    _, end, after = rest.partition("<!-- end launches -->")
    page.write_text(f"{before}{begin}{counts.stdout}{end}{after}", encoding="utf-8")
    compiling = ROOT / "tests/kernels/test_token_kernels_compiled.py"
    registers = subprocess.run(
        [sys.executable, str(compiling)], env=environment, check=True, capture_output=True, text=True
    )
    compiling.with_name("token_kernel_resources.json").write_text(registers.stdout, encoding="utf-8")


def main() -> None:
    """Writes everything."""
    for name, write in FILES.items():
        (ROOT / name).write_text(write(), encoding="utf-8")
    record_counts()


if __name__ == "__main__":
    main()
