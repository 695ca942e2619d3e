"""Pictures of the built site, to look at after a change: `python tests/site/screenshots.py SITE OUT [page ...]`."""

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from support import browsing
from support.site_server import KINDS, SIZES, served


def main(site: str, out: str, *pages: str) -> None:
    """One PNG of each page, at each width, light and dark; the first four screens of a long page."""
    with served(Path(site)) as address, browsing.started() as browser:
        for (size, (width, height)), scheme in product(SIZES.items(), ("light", "dark")):
            for page in pages or KINDS:
                tab = browsing.blank_tab(browser, (width, height), scheme)
                tab.goto(address + page)
                tall = min(4 * height, tab.evaluate("document.documentElement.scrollHeight"))
                name = page.strip("/").replace("/", "-") or "home"
                tab.set_viewport_size({"width": width, "height": tall})
                tab.screenshot(path=Path(out) / f"{name}-{size}-{scheme}.png")
                tab.context.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
