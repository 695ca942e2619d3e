"""Terminal lines. Characters that control the terminal, or the direction of text, are shown as escape sequences."""

import json
import re
import sys
import unicodedata
import warnings
from typing import IO, Any

from trustrl.errors import TrustRLWarning

_PLAIN = re.compile(r"[\n\t\x20-\x7e]*")


def is_hidden(character: str) -> bool:
    """Returns True for characters that are invisible, or change how other characters are displayed.

    Cc controls, Cf formats such as U+202E, Cs lone surrogates, Co and Cn unassigned, Zl and Zp line ends.
    """
    kind = unicodedata.category(character)
    return kind[0] == "C" or kind in ("Zl", "Zp")


def escape(character: str) -> str:
    r"""Returns the escape sequence of a character.

    Example:
        >>> escape("\x1b"), escape("\u202e")
        ('\\x1b', '\\u202e')
    """
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def escaped(text: str) -> str:
    r"""Escapes hidden characters, except line ends and tabs.

    Example:
        >>> escaped("a\x1b[31m\u202eb\n")
        'a\\x1b[31m\\u202eb\n'
    """
    if _PLAIN.fullmatch(text):
        return text
    return "".join(escape(char) if char not in "\n\t" and is_hidden(char) else char for char in text)


def one_line(text: object) -> str:
    r"""Returns text from outside as one line, escaped.

    Example:
        >>> one_line("a\nb\x1b")
        'a\\x0ab\\x1b'
    """
    return escaped(str(text)).replace("\n", escape("\n")).replace("\t", escape("\t"))


def say(text: object, *, file: IO[str] | None = None, end: str = "\n") -> None:
    """Prints text, escaped. All terminal lines of trustrl are printed by this function."""
    print(escaped(str(text)), file=file or sys.stdout, end=end, flush=True)


def complain(text: object) -> None:
    """Prints a message on stderr, escaped. Further lines are indented, as text that belongs to it."""
    say(str(text).replace("\n", "\n  "), file=sys.stderr)


def escape_warnings() -> None:
    """Prints the warnings of this process as escaped messages from now on."""
    warnings.showwarning = _show


def _show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
    ours = issubclass(category, TrustRLWarning)
    complain(f"warning: {message}" if ours else warnings.formatwarning(message, category, filename, lineno).rstrip())


def say_json(data: Any, *, indent: int | None = 1) -> None:
    """Prints data as JSON. Hidden characters are escaped as JSON escapes them."""
    is_unicode = (sys.stdout.encoding or "").lower().startswith("utf")
    text = json.dumps(data, indent=indent, ensure_ascii=not is_unicode, default=str)
    if not _PLAIN.fullmatch(text):
        text = "".join(json.dumps(char)[1:-1] if char != "\n" and is_hidden(char) else char for char in text)
    print(text, flush=True)
