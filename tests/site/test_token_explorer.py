"""The interactive page in a real browser: the library's numbers, by keyboard, on a phone, in both schemes."""

import json
from pathlib import Path

import pytest

PAGE = "concepts/clip-mask-project/"
POINTS = json.loads((Path(__file__).parent / "token-explorer.json").read_text())
ANSWERS = """(points) => points.map((point) => {
  for (const [name, value] of Object.entries(point)) {
    const input = document.getElementById(`explorer-${name}`);
    if (name == "answers") continue;
    if (name == "cap") {
      const box = document.getElementById("explorer-cap-on");
      if (box.checked != (value !== null)) box.click();
      if (value === null) continue;
    }
    input.value = value;
    input.dispatchEvent(new Event("input"));
  }
  return [...document.querySelectorAll("#token-explorer section")].map(
    ({ dataset }) => [dataset.keep == "true", Number(dataset.weight), Number(dataset.gradient)]);
})"""


def test_the_page_has_the_librarys_numbers(opened):
    tab = opened(PAGE)
    assert len(POINTS) >= 50
    for point, shown in zip(POINTS, tab.evaluate(ANSWERS, POINTS), strict=True):
        for (keep, *numbers), (found, *others) in zip(point["answers"], shown, strict=True):
            assert keep == found, point
            assert others == pytest.approx(numbers, rel=1e-8, abs=1e-12), point
    assert {keep for point in POINTS for keep, *_ in point["answers"]} == {True, False}


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", ["laptop", "phone"])
def test_it_fits_and_every_input_has_a_label(opened, size, scheme):
    tab = opened(PAGE, size, scheme)
    assert not tab.evaluate("document.documentElement.scrollWidth > window.innerWidth")
    for field in tab.locator("#token-explorer input").all():
        assert field.evaluate("(one) => one.getAttribute('aria-label') || one.labels.length")
    assert tab.locator("#token-explorer svg[aria-label]").count() == 3


def test_the_keyboard_moves_a_slider_and_presses_an_example(opened):
    tab = opened(PAGE)
    verdicts = "#token-explorer [role=status]"
    tab.locator("#token-explorer button", has_text="A rare token triples").focus()
    tab.keyboard.press("Enter")
    assert tab.locator(verdicts).text_content().startswith("PPO, clip 0.2/0.28: masked; DPPO, Binary TV: kept")
    while tab.evaluate("document.activeElement.type") != "range":
        tab.keyboard.press("Tab")
    tab.keyboard.press("End")  # μ is now nearly 1, and A > 0 pulls the token back up
    assert "masked" not in tab.locator(verdicts).text_content()


def test_a_value_that_is_no_probability_is_named(opened):
    tab = opened(PAGE)
    tab.locator("#explorer-mu").fill("1.5")
    assert "must be from 0.0001 to 0.9999" in tab.locator("#token-explorer [role=status]").text_content()
