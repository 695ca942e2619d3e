"""Charts in a real browser: zoom, smoothing, healthy bands, explanations."""

import re

import pytest

pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
from support import browsing

if browsing.CHROMIUM is None:
    pytest.skip("needs Chromium: `apt-get install chromium`", allow_module_level=True)

from support.run_folders import run_folder, steps

LONG = "trustrl/gap_abs_mean_probability_below_0.0001"
REWARD = "#chart-reward .plot > svg"


def long_run(path, **more):
    rows = [row | {"reward": row["step"] / 300 + 0.2 * (row["step"] % 2)} for row in steps(300)]
    return run_folder(path, rows=rows, **more)


def last_step(tab, chart="#chart-reward"):
    """The step at the right end of an axis."""
    texts = tab.locator(f"{chart} .plot > svg > text").all_text_contents()
    return int(next(text for text in texts if text.startswith("step ")).removeprefix("step "))


def dragged(tab, start, end):
    """Drags across the reward from one share of its width to another."""
    tab.locator(REWARD).scroll_into_view_if_needed()
    box = tab.locator(REWARD).bounding_box()
    y = box["y"] + box["height"] / 2
    tab.mouse.move(box["x"] + start * box["width"], y)
    tab.mouse.down()
    tab.mouse.move(box["x"] + (start + end) / 2 * box["width"], y)
    assert tab.locator("#chart-reward .selection").get_attribute("visibility") == "visible"
    tab.mouse.move(box["x"] + end * box["width"], y)
    tab.mouse.up()


def test_a_drag_zooms_every_chart_and_a_double_click_resets(opened, tmp_path):
    tab = opened(long_run(tmp_path / "a"))
    assert last_step(tab) == 300
    dragged(tab, 0.3, 0.5)
    assert 120 < last_step(tab) < 180
    assert last_step(tab, "#chart-kl_k3") == last_step(tab)
    first, last = map(int, re.findall(r"\d+", tab.locator("#zoomed").text_content()))
    assert 60 < first < last == last_step(tab)
    highest = tab.evaluate(
        "Math.max(...[...document.querySelectorAll('#chart-reward text')].map((x) => parseFloat(x.textContent)).filter(x => x < 2))"
    )
    assert highest < 1  # the scale follows the visible part, where the reward is below .8
    tab.locator(REWARD).dblclick()
    assert last_step(tab) == 300
    assert tab.locator("#zoomed").text_content() == ""


def test_keys_and_buttons_zoom(opened, tmp_path):
    tab = opened(long_run(tmp_path / "a"))
    tab.locator(REWARD).focus()
    for key, last in (("+", 225), ("+", 187), ("-", 225), ("0", 300)):
        tab.keyboard.press(key)
        assert abs(last_step(tab) - last) <= 1
    tab.keyboard.press("Home")  # the key that was pressed last still reaches the chart
    assert tab.locator("#chart-reward .readout").text_content().startswith("step 1:")
    tab.locator("#zoom-in").click()
    assert last_step(tab) < 300
    tab.locator("#zoom-out").click()
    assert last_step(tab) == 300
    tab.locator("#zoom-in").click()
    tab.locator("#zoom-reset").click()
    assert last_step(tab) == 300


def test_the_wheel_zooms_only_with_ctrl(opened, tmp_path):
    tab = opened(long_run(tmp_path / "a"))
    tab.locator(REWARD).hover()
    tab.mouse.wheel(0, -100)
    assert last_step(tab) == 300
    tab.locator(REWARD).hover()
    tab.keyboard.down("Control")
    tab.mouse.wheel(0, -100)
    tab.keyboard.up("Control")
    tab.wait_for_selector("#zoomed:has-text('steps')")


def test_smoothing_can_be_chosen(opened, tmp_path):
    tab = opened(long_run(tmp_path / "a"))

    def shape():
        return tab.locator("#chart-reward path.run:not(.raw)").get_attribute("d"), tab.locator(
            "#chart-reward .raw"
        ).count()

    automatic, behind = shape()
    assert behind == 1
    tab.locator("#smooth").select_option("0")
    plain, behind = shape()
    assert behind == 0
    assert plain.count("L") == 299
    tab.locator("#smooth").select_option("0.2")
    strong, behind = shape()
    assert behind == 1
    assert len({automatic, plain, strong}) == 3
    heights = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", strong)]
    assert heights[100:] == sorted(heights[100:], reverse=True)  # the reward rises without the teeth


def test_hovering_over_one_chart_reads_the_step_in_all(opened, tmp_path):
    tab = opened(long_run(tmp_path / "a"))
    tab.locator(REWARD).hover()
    said = tab.locator("#chart-reward .readout").text_content().split(":")[0]
    assert re.fullmatch(r"step 1\d\d", said)
    assert tab.locator("#chart-kl_k3 .readout").text_content().split(":")[0] == said


def test_a_band_covers_the_healthy_values(opened, tmp_path):
    rows = [row | {"trustrl/kl_k3": 0.02 * row["step"] / 8} for row in steps(8)]
    tab = opened(run_folder(tmp_path / "a", rows=rows))
    band = tab.locator("#chart-kl_k3 .band").bounding_box()
    at = dict(
        tab.evaluate(
            """[...document.querySelectorAll("#chart-kl_k3 text[text-anchor=end]")]
            .map((text) => [text.textContent, text.getBoundingClientRect()]).map(([text, box]) => [text, box.y + box.height / 2])"""
        )
    )
    assert band["y"] == pytest.approx(at["0.01"], abs=4)
    assert band["y"] + band["height"] == pytest.approx(at["0"], abs=4)
    assert tab.locator("#chart-grad_norm .band").count() == 0
    assert "below 0.01" in tab.locator("#chart-kl_k3 .about").text_content()


@pytest.mark.parametrize("key", ["kl_k3", "reward"])
def test_every_chart_leads_to_its_explanation_and_back(key, opened, tmp_path):
    tab = opened(run_folder(tmp_path / "a"))
    assert tab.locator("figure[id^=chart]").count() == tab.locator("figure[id^=chart] a.why").count()
    tab.locator(f"#chart-{key} a.why").click()
    entry = tab.locator(f"#about-{key}")
    assert entry.evaluate("(one) => one.matches(':target')")
    for word in ("definition", "healthy", "action"):
        assert word in entry.text_content()
    entry.locator("a").click()
    assert tab.url.endswith(f"#chart-{key}")


def test_other_metrics_are_folded_and_drawn_when_opened(opened, tmp_path):
    rows = [{"step": step, "reward": 0.5, "perf/throughput": 3.0 * step, LONG: 0.1} for step in (1, 2, 3)]
    tab = opened(run_folder(tmp_path / "a", rows=rows, evaluations=()), size="phone")
    assert tab.locator("#others path.run").count() == 0
    tab.locator("#others > summary").click()
    tab.wait_for_selector("#others path.run", state="attached")
    assert tab.locator("#others strong").all_text_contents() == ["perf/throughput", LONG]
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    tab.locator("#others a.why").click()
    tab.wait_for_selector(f"#explained .entry:has-text('{LONG}')")  # its folded part is open
