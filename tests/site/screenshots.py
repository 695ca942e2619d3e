"""Pictures of the built site, to look at after a change: `python tests/site/screenshots.py SITE OUT [page ...]`."""

import sys
from itertools import product
from pathlib import Path

from playwright.sync_api import sync_playwright
from serving import CHROMIUM, KINDS, SIZES, served


def main(site: str, out: str, *pages: str) -> None:
    """One PNG of each page, at each width, light and dark; the first four screens of a long page."""
    with served(Path(site)) as address, sync_playwright() as started:
        browser = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        for (size, (width, height)), scheme in product(SIZES.items(), ("light", "dark")):
            context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
            for page in pages or KINDS:
                tab = context.new_page()
                tab.goto(address + page)
                tall = min(4 * height, tab.evaluate("document.documentElement.scrollHeight"))
                name = page.strip("/").replace("/", "-") or "home"
                tab.set_viewport_size({"width": width, "height": tall})
                tab.screenshot(path=Path(out) / f"{name}-{size}-{scheme}.png")
                tab.close()
            context.close()
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
