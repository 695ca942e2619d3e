"""README and home page: their size, and the cause in the picture is the one that `trustrl explain` names."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_readme_and_the_home_page_are_short():
    assert README.count("\n") <= 130
    assert (ROOT / "docs/index.md").read_text(encoding="utf-8").count("\n") <= 110
    assert (ROOT / "docs/figures/report-cause.png").stat().st_size < 200_000


def test_the_readme_has_the_cause_that_explain_names(tmp_path):
    pytest.importorskip("pyarrow")
    import report_picture

    from trustrl.tools.explain import explain

    (shown,) = re.findall(r"^\$ trustrl explain no-region\n(.*?)^```", README, re.M | re.S)
    printed = explain(report_picture.run_folder(tmp_path / "no-region")).text()
    assert printed.startswith(shown)
