"""Pages of reports in a real browser, for tests of what they show."""

import pytest

from support import browsing
from trustrl.runs.open_run import open_runs
from trustrl.tools.report.html_page import page as page_of
from trustrl.tools.report.report_contents import gather

SIZES = {"laptop": (1440, 900), "small laptop": (1366, 768), "phone": (390, 844)}


@pytest.fixture(scope="module")
def browser():
    with browsing.started() as found:
        yield found


@pytest.fixture
def opened(browser, tmp_path):
    """Opens a report of these folders; afterwards nothing may have gone wrong, and nothing was fetched."""
    contexts, wrong, requests = [], [], []

    def open_(*folders, size="laptop", scheme="light", text=None):
        tab = browsing.blank_tab(browser, SIZES[size], scheme)
        contexts.append(tab.context)
        tab.on("console", lambda message: wrong.append(message.text))
        tab.on("pageerror", lambda error: wrong.append(str(error)))
        tab.on("dialog", lambda dialog: wrong.append(dialog.message))
        tab.on("request", lambda request: requests.append(request.url))
        file = tmp_path / "report.html"
        file.write_text(text or page_of(gather(open_runs(folders))), encoding="utf-8")
        tab.goto(file.as_uri())
        return tab

    open_.wrong = wrong
    yield open_
    assert wrong == []
    assert set(requests) <= {(tmp_path / "report.html").as_uri()}
    for context in contexts:
        context.close()
