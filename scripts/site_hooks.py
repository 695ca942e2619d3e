"""mkdocs hooks that add the repository's own pages and the notebooks to the site, with working links.

Links are written for a reader of the repository. The hook resolves each link to its file, and then to the place of that
file on the site. It leaves links to files that are not on the site unchanged, and the strict build refuses them.
"""

import os
import re
import tomllib
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from notebook_pages import page_of
from set_repository import current

ROOT = Path(__file__).resolve().parents[1]
PLACES = {
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
    "SECURITY.md": "project/security.md",
    "CODE_OF_CONDUCT.md": "project/code-of-conduct.md",
}
"""Files outside docs/ and their pages on the site."""

REDIRECTS = tomllib.loads((ROOT / "scripts/redirects.toml").read_text())
"""Removed pages and the places that have their content now, as paths in docs/."""

SEARCH = tomllib.loads((ROOT / "scripts/search.toml").read_text())
"""Words that the search finds a page by, and pages that rank low."""

REDIRECT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="robots" content="noindex">
<meta http-equiv="refresh" content="0; url={url}">
<title>Moved</title>
<p>This page has moved to <a href="{url}">{url}</a>.
</html>
"""

EQUATION = '<div class="equation">'
KATEX = """<link rel="stylesheet" href="{base}/assets/katex/katex.min.css">
<script defer src="{base}/assets/katex/katex.min.js"></script>
<script defer src="{base}/assets/equations.js"></script>
"""
"""Loaded by pages with equations alone: the other pages stay 300 kB smaller."""

SHORT_CELL = re.compile(r"<td>([^<]{1,10}|[\d.]+ \[[\d., ]+\])</td>")
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)\s]*)?\))")


def on_config(config: Any) -> Any:
    """Adds the algorithms that the menu does not name to it, so that a new region edits no list."""
    menu = next(section["Algorithms"] for section in config.nav if "Algorithms" in section)
    named = [page for entry in menu if isinstance(entry, dict) for page in entry.values()]
    others = []
    for page in sorted((ROOT / "docs/algorithms").glob("*.md")):
        place = f"algorithms/{page.name}"
        if place not in (*named, "algorithms/index.md"):
            heading = page.read_text().partition("\n")[0]
            others.append({heading.removeprefix("# ").partition(":")[0]: place})
    menu[-1:-1] = others  # before the regions left out
    return config


def on_files(files: Files, config: Any) -> Files:
    """Adds the repository's own pages, and the notebooks."""
    for name, place in PLACES.items():
        files.append(File.generated(config, place, content=(ROOT / name).read_text()))
    for notebook in sorted((ROOT / "docs/notebooks").glob("*.ipynb")):
        text, images = page_of(notebook, current())
        files.append(File.generated(config, f"notebooks/{notebook.stem}.md", content=text))
        for name, picture in images.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Rewrites links between the repository's pages and docs/, and gives the search its words."""
    place = page.file.src_uri
    page.meta["tags"] = SEARCH["tags"].get(place, [])
    boosts = [boost for start, boost in SEARCH["boost"].items() if place.startswith(start)]
    page.meta["search"] = {"boost": boosts[0]} if boosts else {}
    source = {place: name for name, place in PLACES.items()}.get(place, f"docs/{place}")

    def on_the_site(link: re.Match[str]) -> str:
        meant = os.path.normpath(os.path.join(os.path.dirname(source), link[2]))
        target = "index.md" if meant == "README.md" else PLACES.get(meant, meant.removeprefix("docs/"))
        target = re.sub(r"\.ipynb$", ".md", target)
        if target == meant:  # neither in docs/ nor in PLACES
            return link[0]
        return f"{link[1]}{os.path.relpath(target, os.path.dirname(place) or '.')}{link[3]}"

    return LINK.sub(on_the_site, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Keeps numbers such as 1.7e-01, and a mean with its interval, in one piece: a browser breaks narrow columns."""
    return SHORT_CELL.sub(r'<td class="short">\1</td>', html)


def on_post_page(output: str, page: Any, **_: Any) -> str:
    """Names the theme's search dialog for screen readers, and loads KaTeX on pages that have equations."""
    output = output.replace('role="dialog"', 'role="dialog" aria-label="Search"')
    if EQUATION not in output:
        return output
    base = os.path.relpath(".", _address(page.file.src_uri))
    return output.replace("</head>", KATEX.format(base=base) + "</head>", 1)


def on_post_build(config: Any) -> None:
    """Writes a page at each removed address that leads to the new one."""
    for old, new in REDIRECTS.items():
        page, _, section = new.partition("#")
        url = os.path.relpath(_address(page), _address(old)) + "/" + (f"#{section}" if section else "")
        folder = Path(config.site_dir) / _address(old)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "index.html").write_text(REDIRECT.format(url=url))


def _address(page: str) -> str:
    """Returns the folder of a page on the site."""
    return page.removesuffix(".md").removesuffix("index").rstrip("/") or "."
