"""Lint rule for the English in the source (docstrings, comments, error messages, help texts) and in the documentation.

    python scripts/plain_english.py [PATH ...]    checks files or folders, by default all packages, docs and README.md

Of a Markdown page it checks the text outside code blocks, addresses and blocks that a script writes. Each finding is
one line, `path:line: rule: text`. The exit code is 1 if there are findings. CONTRIBUTING.md explains the rules and
shows pairs of texts. Text between backticks is code and is not checked.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PLACES = ("src/trustrl", "packages", "docs", "README.md")
REGISTERED = ("registration-2.md", "k-protocol.md")
"""Pages that registered a study before it ran. Nobody edits them."""

# Verbs that may open a function's docstring, in this form or in the third person. Add a missing verb to the file.
VERBS = (ROOT / "scripts/verbs.txt").read_text(encoding="utf-8").split()

WH_WORDS = r"what|who|whom|whose|which|how|whether|where|when|why|whatever|whoever|whenever|wherever"

BRITISH = (
    r"normalis|penalis|optimis|synchronis|initialis|serialis|regularis|summaris|generalis|randomis|quantis|minimis|"
    r"maximis|vectoris|parallelis|tokenis|recognis|organis|specialis|finalis|materialis|utilis|categoris|factoris|"
    r"renormalis"
)

# Turns of phrase that a reader has to decode, and what to write.
PHRASES = {
    r"\bsa(?:id|y|ys) aloud\b": "write that the code warns or raises",
    r"\bsays? so\b": "write that the code warns or raises",
    r"\bof (?:ours|our own)\b": "name the owner: trustrl, this adapter",
    r"\bof (?:its|their|your) own(?! (?!and|or|that|which|so|where|for|in|at|on|with|when)[a-z])":
        "write 'its own ...' or 'a separate ...'",
    r"\bbeside\b": "write 'next to', 'with' or 'in addition to'",
    r"\bgo(?:es|ne|ing)? on with\b": "write 'resume' or 'continue'",
    r"\bin a sentence\b": "write that the code raises",
    r"\ba sentence (?:that|which|says)\b": "write 'an error that' or 'a message that'",
    r"\bamount(?:s|ed)? to\b": "write 'is', 'equals' or 'means'",
    r"\bhand(?:s|ed|ing)? (?:on|over)\b": "write 'pass' or 'return'",
    r"\b(?:look(?:s|ed|ing)?|a look) (?:at|into)\b": "write 'read', 'check' or 'inspect'",
    r"\bleav(?:e|es|ing) (?:it|them) alone\b": "name the effect",
    r"\bwhom(?:ever)?\b": "name the actor",
    r"\bwhoever\b": "name the actor",
    r"(?<!there\s)\b(?:is|are|was|were) no (?!longer\b|more\b|less\b|later\b|earlier\b|further\b|fewer\b|greater\b|"
    r"larger\b|smaller\b|better\b|worse\b|higher\b|lower\b|closer\b)[a-z]": "write 'is not a ...'",
    r"(?<!there\s)\b(?:is|are|was|were) (?-i:none)\b(?! of)": "write 'is not one' or 'does not exist'",
    r"\bdear(?:er|est)?\b": "write 'expensive'",
    r"\bstop(?:s|ped|ping)? (?:(?:a|an|the|each|every|any|no|some|single|other|rare|more|all) )*tokens?\b":
        "tokens are masked or clipped",
    r"\btokens? (?:that )?(?:(?:is|are|was|were|get|gets) )?stopped\b": "tokens are masked or clipped",
    r"\bgetting on\b": "write 'progress'",
}  # fmt: skip

RULES = {
    "bare-decimal": (re.compile(r"(?<![\w.)\]}/\\*-])-?\.\d+(?!\w|\.\w)"), "write 0.15, not .15"),
    "spaced-percent": (re.compile(r"[\d}] %(?![\w(%{])"), "write 93%, not 93 %"),
    "british": (
        re.compile(
            rf"(?<![\w\[.'\"])(?:(?:{BRITISH})(?:e|es|ed|er|ers|ing|ation|ations)"
            r"|behaviours?|colours?|centred?)(?![\w\]'\"=]|\.\w)",
            re.IGNORECASE,
        ),
        "use American spelling",
    ),
}
# A phrase may continue on the next line.
TURNS = [(re.compile(pattern.replace(" ", r"\s+"), re.IGNORECASE), advice) for pattern, advice in PHRASES.items()]

OPENS_WITH_WH = re.compile(rf"[(\"'*]*(?:{WH_WORDS})\b", re.IGNORECASE)
LABEL = re.compile(r"(?:`[^`]+`|\[[^\]]+\]): ")  # "`trustrl audit`: ..." and "[model]: ..."
CODE = re.compile(r"``.+?``|`[^`]*`", re.DOTALL)
NOT_PROSE = re.compile(
    r"^( *)```.*?^\1```|<!-- begin (?P<name>.*?) -->.*?<!-- end (?P=name) -->|<!--.*?-->|(?<=\])\([^)]*\)|\$\$.*?\$\$",
    re.DOTALL | re.MULTILINE,
)
"""Parts of a page: code, blocks that a script writes, comments, addresses of links, equations."""
DIRECTIVE = re.compile(r"#!|#\s*(?:(?:fmt|type|pyright|ruff|pylint):|noqa\b)", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z][a-z']+")


class Finding(NamedTuple):
    """One text that breaks a rule."""

    path: str
    line: int
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.rule}: {self.text}"


def third_person(verb: str) -> str:
    """Returns the third person singular of a regular verb."""
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return f"{verb[:-1]}ies"
    return f"{verb}es" if verb.endswith(("s", "x", "z", "ch", "sh", "o")) else f"{verb}s"


OPENING_VERBS = {form for verb in VERBS for form in (verb, third_person(verb))}


def opens_with_verb(text: str) -> bool:
    """Returns whether the first word is a listed verb. "Sums of ..." is a noun phrase, "Context manager ..." passes."""
    if text.startswith("Context manager "):
        return True
    first, _, rest = text.partition(" ")
    return first.rstrip(".,:;").lower() in OPENING_VERBS and not rest.startswith("of ")


def check_source(source: str, path: str) -> list[Finding]:
    """Returns the findings in one file, in the order of its lines."""
    tree = ast.parse(source)
    docstrings = dict(_docstrings(tree))
    found = []
    for node, kind in docstrings.items():
        found += [Finding(path, node.lineno, rule, text) for rule, text in check_docstring(node.value, kind)]
        found += _prose(node.value, path, node.lineno)
    for node, text in _strings(tree, set(docstrings)):
        found += _prose(text, path, node.lineno)
    for node in _helps(tree):
        found += [Finding(path, node.lineno, rule, text) for rule, text in check_help(_text(node))]
    for line, text in _comments(source):
        found += _prose(text, path, line)
    return sorted(set(found), key=lambda one: (one.line, one.rule, one.text))


def check_page(text: str, path: str) -> list[Finding]:
    """Returns the findings in one Markdown page, in the order of its lines."""
    prose = NOT_PROSE.sub(lambda part: re.sub(r"[^\n]", " ", part.group()), text)
    return sorted(_prose(prose, path, 1), key=lambda one: (one.line, one.rule, one.text))


def check_docstring(text: str, kind: str) -> Iterator[tuple[str, str]]:
    """Yields the rule and the first line of a docstring whose opening breaks it.

    Args:
        text: Docstring.
        kind: "module", "class", "function", "property" or "field".
    """
    summary = text.strip().split("\n")[0]
    opening = LABEL.sub("", summary, count=1) if LABEL.match(summary) else summary
    if OPENS_WITH_WH.match(opening):
        yield "wh-opening", summary
    elif re.match(r"[^.`]*\?", opening):
        yield "question", summary
    elif kind == "function" and not opens_with_verb(summary):
        yield "verb-first", summary


def check_help(text: str) -> Iterator[tuple[str, str]]:
    """Yields the rule that a command line's help text breaks."""
    if OPENS_WITH_WH.match(text):
        yield "wh-opening", text
    elif text[:1].islower():
        yield "help-capital", text


def check_prose(text: str) -> Iterator[tuple[int, str, str]]:
    """Yields offset, rule and the words that break it, outside of backticks."""
    plain = CODE.sub(lambda code: "`" + re.sub(r"[^\n]", "x", code.group())[2:] + "`", text)
    for rule, (pattern, advice) in [*RULES.items(), *(("phrase", turn) for turn in TURNS)]:
        for match in pattern.finditer(plain):
            yield match.start(), rule, f"{_around(text, match)} ({advice})"


def _prose(text: str, path: str, line: int) -> list[Finding]:
    return [Finding(path, line + text.count("\n", 0, at), rule, said) for at, rule, said in check_prose(text)]


def _around(text: str, match: re.Match[str]) -> str:
    """Returns the match with a few words on both sides, on one line."""
    start, end = max(0, match.start() - 30), match.end() + 30
    return " ".join(text[start:end].split())


def _docstrings(tree: ast.Module) -> Iterator[tuple[ast.Constant, str]]:
    """Yields every docstring and its kind, fields included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            for before, statement in zip([None, *node.body], node.body, strict=False):
                match statement:
                    case ast.Expr(value=ast.Constant(value=str()) as value):
                        if before is None:
                            yield value, _kind(node)
                        elif isinstance(before, ast.Assign | ast.AnnAssign):
                            yield value, "field"


def _kind(node: ast.AST) -> str:
    if isinstance(node, ast.Module):
        return "module"
    if isinstance(node, ast.ClassDef):
        return "class"
    decorators = [ast.unparse(one) for one in node.decorator_list]  # type: ignore[attr-defined]
    return "property" if any(one.endswith(("property", ".setter")) for one in decorators) else "function"


def _strings(tree: ast.Module, docstrings: set[ast.Constant]) -> Iterator[tuple[ast.expr, str]]:
    """Yields the string literals that read as sentences: at least three words, and more prose than code."""
    inner = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str)):
            if node in docstrings or (isinstance(node, ast.Constant) and id(node) in inner):
                continue
            text = _text(node)
            if reads_as_sentence(text):
                yield node, text


def reads_as_sentence(text: str) -> bool:
    """Returns whether a string is prose rather than a name, a pattern, markup or a program."""
    words = WORD.findall(text)
    return len(words) >= 3 and " " in text and not re.search(r"[;{]\n|</\w+>|<\w+ [\w-]+=|\\[bsdw]|\(\?", text)


def _text(node: ast.AST) -> str:
    """Returns a literal's text, with `{}` for each value of an f-string."""
    match node:
        case ast.Constant(value=str() as value):
            return value
        case ast.JoinedStr(values=values):
            return "".join(one.value if isinstance(one, ast.Constant) else "{}" for one in values)  # type: ignore[misc]
    return ""


def _helps(tree: ast.Module) -> Iterator[ast.expr]:
    """Yields the literals given as `help` or `description`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg in ("help", "description") and _text(node.value):
            yield node.value


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Yields each block of comments with the line it starts on."""
    block: list[str] = []
    start = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not DIRECTIVE.match(token.string):
            alone = not token.line[: token.start[1]].strip()
            if block and (not alone or token.start[0] != start + len(block)):
                yield start, "\n".join(block)
                block = []
            if not block:
                start = token.start[0]
            block.append(token.string.lstrip("# "))
            if not alone:
                yield start, "\n".join(block)
                block = []
    if block:
        yield start, "\n".join(block)


def check_paths(paths: list[Path]) -> list[Finding]:
    """Returns the findings in all Python files and Markdown pages of the given files and folders."""
    files = [file for path in paths for file in ([path] if path.is_file() else sorted(path.rglob("*.[pm][yd]")))]
    return [
        finding
        for file in files
        if file.name not in REGISTERED
        for finding in (check_page if file.suffix == ".md" else check_source)(
            file.read_text(encoding="utf-8"), str(_relative(file))
        )
    ]


def _relative(file: Path) -> Path:
    """Returns the path from the working directory where possible."""
    return file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file


def main(arguments: list[str]) -> int:
    """Prints the findings and returns the exit code."""
    found = check_paths([Path(one).resolve() for one in arguments or (ROOT / place for place in PLACES)])
    print(*found, sep="\n", end="\n" if found else "")
    files = len({one.path for one in found})
    print(f"{len(found)} findings in {files} files" if found else "plain English: no findings", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
