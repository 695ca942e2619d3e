"""Conversion of a notebook to a page of the site: prose, code, printed output, and pictures as files."""

import base64
import json
import re
from pathlib import Path

from set_repository import HOST, PLACEHOLDER

Images = dict[str, bytes]
"""Pictures by file name."""

FENCE = "````"

COLAB = "https://colab.research.google.com/github/{repository}/blob/main/docs/notebooks/{name}"


def page_of(notebook: Path, address: str) -> tuple[str, Images]:
    """Returns the notebook as Markdown, and its pictures.

    Args:
        notebook: The file.
        address: The repository's address. With the placeholder in it, the page has no link to Colab.
    """
    parts: list[str] = []
    images: Images = {}
    for cell in json.loads(notebook.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"{FENCE}python\n{source}\n{FENCE}")
        for output in cell["outputs"]:
            data = output.get("data", {})
            if "image/png" in data:
                name = f"{notebook.stem}-{len(images) + 1}.png"
                images[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Figure {len(images)} of this page]({name})")
                continue
            said = "".join(output.get("text", data.get("text/plain", "")))
            parts.append(f"{FENCE}text\n{said.rstrip()}\n{FENCE}")
    first, *rest = [*parts[:1], *colab_link(notebook, address), *parts[1:]]
    title, *more = re.split(r"\n+", first, maxsplit=1)
    about = f"*A notebook: `docs/notebooks/{notebook.name}`, run from top to bottom by a test.*"
    return "\n\n".join([title, about, *more, *rest]) + "\n", images


def colab_link(notebook: Path, address: str) -> list[str]:
    """Returns the link that opens the notebook in Colab, or nothing while the repository's address is not set."""
    repository = address.removeprefix(HOST)
    if repository.startswith(f"{PLACEHOLDER}/"):
        return []
    target = COLAB.format(repository=repository, name=notebook.name)
    return [f"[![Open in Colab](../assets/open-in-colab.svg)]({target})"]
