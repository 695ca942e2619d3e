"""Escaping of untrusted text from models and files.

Escaped text cannot act as HTML or as a terminal escape sequence, and cannot change the direction of the text after it.
"""

import json
import unicodedata
from collections.abc import Iterable
from html import escape as html_escape
from typing import Any

from trustrl.errors import TrustRLError
from trustrl.optional_imports import need
from trustrl.terminal import escape, is_hidden
from trustrl.world import models

LONGEST = 80
"""Maximum number of characters to show for one token."""

MOST_MARKS = 3
"""Maximum number of accents on one letter. More would cover the lines above."""

WHITE = {"\n": "⏎", "\t": "⇥"}


def visible(text: str, longest: int = LONGEST, *, lines: bool = False) -> str:
    r"""Escapes characters that are invisible or change how the rest of the text is displayed.

    Args:
        text: The text.
        longest: Maximum number of characters. The rest is replaced by an ellipsis.
        lines: Keep line ends and tabs, for text that is shown on several lines.

    Example:
        >>> visible("a\n\u202eb\x00")
        'a⏎\\u202eb\\x00'
    """
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    shown, marks = [], 0
    for character in cut:
        if lines and character in WHITE:
            shown.append(character)
            marks = 0
            continue
        kind = unicodedata.category(character)
        marks = marks + 1 if kind[0] == "M" else 0
        if marks and not shown:
            shown.append("◌")  # otherwise it would combine with whatever precedes the text
        if character in WHITE:
            shown.append(WHITE[character])
        else:
            shown.append(escape(character) if marks > MOST_MARKS or is_hidden(character) else character)
    return "".join(shown)


def said(text: Any, longest: int = 500) -> str:
    """Escapes untrusted text for HTML."""
    return html_escape(visible(str(text), longest))


def embedded(data: Any) -> str:
    """Serializes JSON for a script element. No character in it can end the element or open a tag."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)  # also escapes U+2028
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def token_texts(model: str | None, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """Decodes token ids with the model's tokenizer. Returns the texts, and the reason if there are none.

    Uses only a tokenizer on this machine, and does not download, train, or execute anything.
    """
    if not model:
        return {}, "The recipe does not name a model."
    try:
        transformers = need("transformers", extra="models")
        folder = models.local(model)
        if folder is None:
            return {}, f"The tokenizer of {visible(model)} is not on this machine."
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (TrustRLError, OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {}, f"Cannot load the tokenizer of {visible(model)}: {visible(first, 200)}"
    exact = {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
    known = [token for token in set(ids) if 0 <= token < len(tokenizer)]
    return {token: visible(tokenizer.decode([token], **exact)) for token in known}, ""
