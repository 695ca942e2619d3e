"""The answers that the interactive page is compared with are the library's."""

import explorer_points


def test_the_points_are_current():
    assert explorer_points.text() == explorer_points.FILE.read_text(), "Run `python scripts/explorer_points.py`."
