"""The first screen of a report in a real browser: the cause, its mark on the curve, and the way to its completions."""

import pytest

pytest.importorskip("playwright")

from support.report_pages import SIZES
from support.run_folders import run_folder, steps, write_groups

BROKE = 24


def collapsed(folder, **more):
    rows = [
        row
        | {
            "trustrl/kl_k3": 0.1 * ((row["step"] - 1) % 4) * (row["step"] > BROKE),
            "reward": 0.6 - 0.58 * (row["step"] > BROKE),
        }
        for row in steps(96)
    ]
    write_groups(
        run_folder(folder, rows=rows, updates=4, evaluations=(), **more) / "records", {"Why?": [0.0, 1.0]}, step=BROKE
    )
    return folder


@pytest.mark.parametrize(("size", "scheme"), [("small laptop", "light"), ("phone", "dark")])
def test_cause_setting_and_mark_are_on_the_first_screen(opened, tmp_path, size, scheme):
    tab = opened(collapsed(tmp_path / "a"), size=size, scheme=scheme)
    width, height = SIZES[size]
    for part in (".cause h3", ".change", "svg line.mark"):
        box = tab.locator(part).first.bounding_box()
        assert box["y"] + box["height"] <= height, part
        assert box["x"] + box["width"] <= width, part
    assert tab.locator("svg text.mark").first.text_content() == f"from step {BROKE + 2}"


def test_a_comparison_names_the_cause_of_each_run_on_the_first_screen(opened, tmp_path):
    folders = collapsed(tmp_path / "a", name="s-fast"), run_folder(tmp_path / "b", name="s-slow")
    tab = opened(*folders, size="phone")
    box = tab.locator(".heads").bounding_box()
    assert box["y"] + box["height"] <= SIZES["phone"][1]
    assert "learning rate too large" in tab.locator(".heads li").first.text_content()


def test_the_link_of_a_cause_lists_the_completions_near_its_step_first(opened, tmp_path):
    tab = opened(collapsed(tmp_path / "a"))
    tab.locator('.cause a[href="#text"]').first.click()
    assert tab.locator("#sort").input_value() == "near"
    assert tab.locator("#sequences").is_visible()
