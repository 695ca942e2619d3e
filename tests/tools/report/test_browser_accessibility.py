"""A report for readers who need contrast, names and a keyboard: axe-core finds nothing serious, and Tab comes to all."""

import pytest

pytest.importorskip("axe_playwright_python", reason="needs `pip install axe-playwright-python`")
pytest.importorskip("pyarrow")
from support import browsing

if browsing.CHROMIUM is None:
    pytest.skip("needs Chromium: `apt-get install chromium`", allow_module_level=True)

from support.accessibility import beyond_the_keyboard, violations
from support.run_folders import run_folder, steps, write_records


@pytest.fixture
def folder(tmp_path):
    """A run with curves, completions and recorded tokens, some of them masked."""
    made = run_folder(tmp_path / "run", rows=steps(64))
    write_records(
        made / "records", {"token_id": [number % 10 for number in range(40)], "kept": [True] * 30 + [False] * 10}
    )
    return made


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["small laptop", "phone"])
def test_axe_finds_nothing_serious(size, scheme, folder, opened):
    assert violations(opened(folder, size=size, scheme=scheme)) == []


@pytest.mark.parametrize("size", ["small laptop", "phone"])
def test_the_keyboard_comes_to_every_control(size, folder, opened):
    assert beyond_the_keyboard(opened(folder, size=size)) == []
