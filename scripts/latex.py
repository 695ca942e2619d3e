"""LaTeX for the equations of docstrings, which are Unicode text that a terminal shows as it is.

Two spaces end a statement. A word of two letters or more is text, unless it names a function. Statements share a row
while they fit a phone. A character without a translation raises, so that nothing is guessed.
"""

import re
from collections.abc import Iterator

WIDTH = 46
"""Characters of a row, counted in the docstring. A gap between statements counts as four."""

NAMED = r"KL|argmin|clip|sg|sign(?=\()|mean(?=[_(])"
FUNCTION = rf"(?:log|exp|min|max|{NAMED})(?![A-Za-z])"
SYMBOLS = {
    "α": "alpha", "δ": "delta", "ε": "varepsilon", "λ": "lambda", "μ": "mu", "π": "pi",
    "σ": "sigma", "τ": "tau", "φ": "varphi", "ℓ": "ell", "Σ": "sum", "Π": "prod", "∂": "partial",
    "∇": "nabla", "≤": "le", "≥": "ge", "∈": "in", "·": "cdot", "×": "times", "‖": "Vert",
}  # fmt: skip
SIGNS = {"−": "-", "²": "^2", "⁺": "^+", "⁻": "^-", "{": r"\{", "}": r"\}"}
OPERATORS = "-−=,<>≤≥∈·×/:‖+^_([{"

WORD = rf"(?!{FUNCTION})(?:s\.t\.|[A-Za-z]{{2,}}(?![A-Za-z_])(?:[-'][A-Za-z]+)*)"
TOKEN = re.compile(
    rf"""(?P<code>`[^`]+`|"[^"]+"|(?:min|max)_[a-z]{{2,}})   # a name in the code, such as min_ratio
    |(?P<text>\(eq\.[^)]*\)|[ ]*{WORD}(?:[ ](?:{WORD}|a(?=[ ]{WORD})))*[ ]*)
    |(?P<function>{FUNCTION})
    |_(?:(?P<under>[A-Za-z0-9]+)|\{{(?P<group>[^}}]*)\}})
    |(?P<hat>.)\u0302
    |(?P<plain>[A-Za-z0-9.,:;=<>+/()\[\]|'^])
    |(?P<gap>[ ]+)
    |(?P<symbol>.)""",
    re.X,
)


def block(equation: str) -> str:
    """Returns an equation of a docstring as a fenced block of LaTeX."""
    rows = [f"& {row.strip()}" for line in equation.splitlines() if line.strip() for row in rows_of(line.strip())]
    return "\n".join(["```math", r"\begin{aligned}", " \\\\\n".join(rows), r"\end{aligned}", "```"])


def rows_of(line: str) -> Iterator[str]:
    """Yields the rows of one line: its statements, packed while they fit."""
    row, used = "", 0
    for starts, part in parts(line):
        gap, room = (r"\qquad ", 4) if starts else (r"\ ", 1)
        ends = starts and row.startswith(r"\qquad") and not part.startswith("(eq.")
        if row and (ends or used + room + len(part) > WIDTH):
            yield row
            row, used = "" if starts else r"\qquad ", 0  # the rest of a statement is indented
        elif row:
            row, used = row + gap, used + room
        row, used = row + latex(part), used + len(part)
    yield row


def parts(line: str) -> Iterator[tuple[bool, str]]:
    """Yields the statements of a line. A long one is split before its conjunctions: its rest does not start one."""
    label = 0
    for statement in re.split(r"[,.]?\s{2,}", re.sub(r"\s+(iff|or|s\.t\.)\s+", r" \1 ", line)):
        conjunction = r"\s(?=(?:iff|or|and|if|until|else|whatever)\b)" if label + len(statement) > WIDTH else "$^"
        for number, part in enumerate(re.split(conjunction, statement)):
            yield number == 0, part
        label = len(statement) + 4 if statement.isalpha() else 0


def latex(text: str) -> str:
    """Returns one statement as LaTeX.

    Raises:
        ValueError: If a character has no translation.
    """
    return re.sub(
        r"(\\[A-Za-z]+) (?![A-Za-z])", r"\1", "".join(translated(token, text) for token in TOKEN.finditer(text))
    )


def translated(token: re.Match[str], text: str) -> str:
    """Returns one token as LaTeX, with a space after a command."""
    part = token[token.lastgroup]
    match token.lastgroup:
        case "gap":
            after = text[token.end() :]
            apart = text[token.start() - 1] in OPERATORS or after[0] in OPERATORS[:-3] or re.match(FUNCTION, after)
            follows = re.search(rf"{FUNCTION}[²]?$", text[: token.start()])
            return "" if apart or follows else r"\,"
        case "code":
            return rf"\texttt{{{part.strip('`').replace('_', chr(92) + '_')}}}"
        case "text":
            return rf"\text{{{part}}}"
        case "function":
            return rf"\operatorname{{{part}}}" if part not in ("log", "exp", "min", "max") else rf"\{part} "
        case "under":
            return f"_{part}" if len(part) == 1 else rf"_\text{{{part}}}"
        case "group":
            return f"_{{{latex(part)}}}"
        case "hat":
            return rf"\hat{{{latex(part)}}}"
        case "plain":
            return part
    if part in SIGNS:
        return SIGNS[part]
    if part not in SYMBOLS:
        raise ValueError(f"scripts/latex.py must have a symbol for {part!r} in {text!r}. Add one to SYMBOLS.")
    return rf"\{SYMBOLS[part]} "
