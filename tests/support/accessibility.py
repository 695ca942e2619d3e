"""Accessibility of a page in a browser: what axe-core finds, and what the keyboard cannot reach."""

from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Page

GRAVE = ("serious", "critical")

REACHABLE = """() => {
    const shown = (box) => box.checkVisibility({ visibilityProperty: true }) && box.getClientRects().length > 0;
    const inputs = "input:not([type=hidden], [type=radio]:not(:checked)), select, summary";
    const controls = `:is(a[href], button, ${inputs}, [tabindex='0']):not([disabled], [hidden])`;
    window.wanted = [...document.querySelectorAll(controls)].filter((box) => shown(box) && box.tabIndex >= 0);
    return window.wanted.length;
}"""
"""Notes the controls that are shown, and returns their number. Of a group of radio buttons Tab comes to the chosen one."""

FOCUSED = "() => window.wanted.indexOf(document.activeElement)"


def violations(tab: Page) -> list[str]:
    """What axe-core calls serious or critical: rule, number of elements, first element and reason."""
    if not tab.evaluate("typeof axe == 'object'"):
        tab.evaluate(AXE_SCRIPT)
    found = tab.evaluate("axe.run(document, { resultTypes: ['violations'] })")["violations"]
    return [
        f"{rule['id']}, {len(rule['nodes'])} of {rule['nodes'][0]['target']}: {rule['nodes'][0]['failureSummary']}"
        for rule in found
        if rule["impact"] in GRAVE
    ]


def beyond_the_keyboard(tab: Page) -> list[str]:
    """The shown controls that Tab does not come to, as HTML."""
    number = tab.evaluate(REACHABLE)
    reached = set()
    for _ in range(number + 5):
        tab.keyboard.press("Tab")
        reached.add(tab.evaluate(FOCUSED))
    missed = [at for at in range(number) if at not in reached]
    return [tab.evaluate("(at) => window.wanted[at].outerHTML", at)[:200] for at in missed]
