"""Size rules for the source: length of files and functions, and number of parameters.

    python scripts/house.py [PATH]    prints a table of folders and the offenders, all packages by default

A file has at most 400 lines. A function has at most 60 lines of code; its docstring, comments and blank lines do not
count, and neither do the functions defined in it. A function takes at most 7 parameters, `self` and `cls` not counted;
kernels and the signatures in `DICTATED` are exempt. Functions of a file that a script writes may have any length,
because nobody edits them. Names that do not say what a value is are counted, and the counts may only fall. The exit
code is 1 if there are offenders.
"""

import ast
import io
import sys
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from statistics import median
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src/trustrl", ROOT / "packages/verl_cpu/src/trustrl_verl_cpu")
MOST_LINES, MOST_CODE, MOST_PARAMETERS = 400, 60, 7

WRITTEN = "Written by `python scripts/"
"""Words in the docstring of a file that a tool writes."""

# Functions whose parameters are not ours to choose, by qualified name.
DICTATED = {
    "token_logprobs": "the public front of the kernels",
    "TrustRegionMixin.__init__": "GRPOTrainer's own arguments pass through, and the region's are keywords next to them",
    "RegionLoss.forward": "OpenRLHF's PolicyLoss is called with them",
}

# Names that say what happened to a value and not what it is, with the number of times that the source binds each. Lower
# a number when you lower the count.
VAGUE = {"found": 2, "one": 0, "given": 1, "at": 1}

Function = ast.FunctionDef | ast.AsyncFunctionDef
LAYOUT = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip


class Offender(NamedTuple):
    """One file or function over its limit."""

    path: str
    line: int
    rule: str
    name: str
    size: int
    limit: int

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.name} has {self.size}, at most {self.limit} are allowed"


def num_lines(source: str) -> int:
    """Returns the number of lines of a file, as `wc` counts them."""
    return len(source.splitlines())


def code_lines(source: str) -> set[int]:
    """Returns the numbers of the lines that hold code: no comment, blank line or docstring."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return lines


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yields every function with its qualified name."""
    for node in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(node, Function | ast.ClassDef):
            inside = f"{prefix}{node.name}."
        if isinstance(node, Function):
            yield f"{prefix}{node.name}", node
        yield from functions(node, inside)


def num_parameters(function: Function) -> int:
    """Returns the number of parameters, `*args` and `**kwargs` included, `self` and `cls` not."""
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args]
    bound = bool(named) and named[0].arg in ("self", "cls")
    stars = [star for star in (arguments.vararg, arguments.kwarg) if star is not None]
    return len(named) - bound + len(arguments.kwonlyargs) + len(stars)


def num_code_lines(function: Function, code: set[int]) -> int:
    """Returns the lines of code of a function, signature included, functions defined in it not."""
    own = set(range(function.lineno, (function.end_lineno or function.lineno) + 1))
    for _, inner in functions(function):
        own.difference_update(range(inner.lineno, (inner.end_lineno or inner.lineno) + 1))
    return len(own & code)


def offenders_in(source: str, path: str) -> Iterator[Offender]:
    """Yields what is over its limit in one file."""
    if num_lines(source) > MOST_LINES:
        yield Offender(path, 1, "file-lines", Path(path).name, num_lines(source), MOST_LINES)
    code, tree = code_lines(source), ast.parse(source)
    written = WRITTEN in (ast.get_docstring(tree) or "")
    for name, function in functions(tree):
        if (size := num_code_lines(function, code)) > MOST_CODE and not written:
            yield Offender(path, function.lineno, "function-lines", name, size, MOST_CODE)
        free = "kernels" in Path(path).parts or name in DICTATED
        if (count := num_parameters(function)) > MOST_PARAMETERS and not free:
            yield Offender(path, function.lineno, "parameters", name, count, MOST_PARAMETERS)


def bound_names(tree: ast.AST) -> Iterator[str]:
    """Yields every name that the code binds: by assignment, as a loop variable, as a parameter, or by `except`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.ExceptHandler) and node.name:
            yield node.name


def vague_names(texts: Iterable[str]) -> dict[str, int]:
    """Returns how often the files bind each name of `VAGUE`."""
    counts = Counter(name for text in texts for name in bound_names(ast.parse(text)))
    return {name: counts[name] for name in VAGUE}


def sources(folder: Path) -> dict[Path, str]:
    """Returns the text of every Python file below a folder, by its path from there."""
    return {file.relative_to(folder): file.read_text(encoding="utf-8") for file in sorted(folder.rglob("*.py"))}


def table(texts: dict[Path, str]) -> str:
    """Returns files, lines and median of each folder directly below, and of everything."""
    groups: dict[str, list[int]] = defaultdict(list)
    for path, text in texts.items():
        groups[path.parts[0] if len(path.parts) > 1 else "(top)"].append(num_lines(text))
    rows = [*sorted(groups.items()), ("all", [size for sizes in groups.values() for size in sizes])]
    lines = [f"{'folder':<14}{'files':>7}{'lines':>8}{'median':>8}{'largest':>9}{'< 50':>6}"]
    for name, sizes in rows:
        small = sum(size < 50 for size in sizes)
        lines.append(f"{name:<14}{len(sizes):>7}{sum(sizes):>8}{median(sizes):>8g}{max(sizes):>9}{small:>6}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Prints the table and the offenders, and returns the exit code."""
    folders = [Path(arguments[0])] if arguments else PACKAGES
    offenders = []
    for folder in folders:
        texts = sources(folder)
        print(table(texts))
        offenders += [str(x) for path, text in texts.items() for x in offenders_in(text, str(folder.name / path))]
    names = vague_names(text for folder in folders for text in sources(folder).values())
    print("vague names:", ", ".join(f"{name} {count}" for name, count in names.items()))
    offenders += [
        f"the name `{name}` is bound {count} times, at most {VAGUE[name]} are allowed: use a noun for what the value is"
        for name, count in names.items()
        if count > VAGUE[name]
    ]
    print(*offenders, sep="\n", end="\n" if offenders else "")
    return 1 if offenders else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
