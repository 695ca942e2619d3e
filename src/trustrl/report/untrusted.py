"""Text that a model or a file brought along, made safe to look at.

Nothing of it may act: not as HTML, not as a terminal's escape sequence, not by turning the direction of what follows.
"""

import json
import unicodedata
from collections.abc import Iterable
from typing import Any

from trustrl import models
from trustrl.errors import TrustRLError
from trustrl.packages import need

LONGEST = 80
"""Characters of one token that are shown."""

MOST_MARKS = 3
"""Accents on one letter; more would climb over the lines above."""

WHITE = {"\n": "⏎", "\t": "⇥"}


def visible(text: str, longest: int = LONGEST) -> str:
    r"""The text with everything that cannot be seen, or changes how the rest is seen, written out.

    Example:
        >>> visible("a\n\u202eb\x00")
        'a⏎\\u202eb\\x00'
    """
    cut = text if len(text) <= longest else text[: longest - 1] + "…"
    shown, marks = [], 0
    for character in cut:
        kind = unicodedata.category(character)
        marks = marks + 1 if kind[0] == "M" else 0
        if marks and not shown:
            shown.append("◌")  # it would sit on whatever stands before the text
        shown.append(_shown(character, kind) if marks <= MOST_MARKS else _escape(character))
    return "".join(shown)


def _shown(character: str, kind: str) -> str:
    if character in WHITE:
        return WHITE[character]
    # Cc controls, Cf formats such as U+202E, Cs lone surrogates, Co and Cn without a meaning, Zl and Zp line ends.
    return _escape(character) if kind[0] == "C" or kind in ("Zl", "Zp") else character


def _escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def embedded(data: Any) -> str:
    """JSON that may stand inside a script element: no character in it can end the element or begin a tag."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)  # U+2028 is an escape here too
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def token_texts(model: str | None, ids: Iterable[int]) -> tuple[dict[int, str], str]:
    """The text of each id by the model's tokenizer, and why there is none where there is none.

    Only a tokenizer that is on this machine is used; nothing is downloaded, trained or executed.
    """
    if not model:
        return {}, "The recipe names no model."
    try:
        transformers = need("transformers", extra="models")
        folder = models.local(model)
        if folder is None:
            return {}, f"The tokenizer of {visible(model)} is not on this machine."
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (TrustRLError, OSError, ValueError, KeyError, ImportError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        return {}, f"There is no tokenizer for {visible(model)}: {visible(first, 200)}"
    return {one: text for one in set(ids) if (text := _decoded(tokenizer, one)) is not None}, ""


def _decoded(tokenizer: Any, one: int) -> str | None:
    if not 0 <= one < len(tokenizer):
        return None
    return visible(tokenizer.decode([one], skip_special_tokens=False, clean_up_tokenization_spaces=False))
