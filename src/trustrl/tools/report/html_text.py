"""Small pieces of HTML that the sections of the page share."""

from html import escape
from typing import Any

from trustrl.tools.report.safe_text import visible

DASHES, COLOURS = 6, 8


def said(text: Any, longest: int = 500) -> str:
    """Escapes untrusted text for HTML."""
    return escape(visible(str(text), longest))


def swatch(run: int) -> str:
    """Returns the run's line style as an SVG swatch."""
    dash = (run + run // COLOURS) % DASHES
    return (
        f'<svg width="34" height="10" aria-hidden="true" class="c{run % COLOURS}">'
        f'<path class="run d{dash}" d="M2 5H32"/></svg>'
    )


def letter(run: int) -> str:
    """Returns the run's letter in charts."""
    return chr(65 + run) if run < 26 else f"R{run + 1}"
