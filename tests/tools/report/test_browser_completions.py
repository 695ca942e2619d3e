"""Completions in a real browser: groups with prompts and rewards, order, search, runs without a region, live pages."""

import time
from contextlib import suppress

import pytest

pytest.importorskip("playwright.sync_api", reason="needs `pip install playwright`")
pytest.importorskip("pyarrow")
from playwright.sync_api import Error

from support import browsing

if browsing.CHROMIUM is None:
    pytest.skip("needs Chromium: `apt-get install chromium`", allow_module_level=True)

from support.report_pages import SIZES
from support.run_folders import HOSTILE, hostile_tokenizer, run_folder, steps, write_groups
from trustrl.recording.sequence_tables import write_sequences
from trustrl.runs.open_run import open_runs
from trustrl.tools.report.html_page import page as page_of
from trustrl.tools.report.report_contents import gather

GROUPS = {"1+1=": (1.0, 0.0, 0.25), "2+2=": (0.5, 0.5), "long\n" * 60: (1.0, 0.75, 0.0, 0.0, 0.0, 0.0)}


def with_groups(path, **more):
    folder = run_folder(path)
    write_groups(folder / "records", GROUPS, **more)
    return folder


def until(tab, script, wanted, seconds=60):
    """Waits until a script returns a value, also while the page reloads.

    `wait_for_function` would evaluate a string inside the page, which its policy forbids.
    """
    end, found = time.monotonic() + seconds, None
    while found != wanted and time.monotonic() < end:
        with suppress(Error):  # the page is just being loaded again
            found = tab.evaluate(script)
        time.sleep(0.1)
    assert found == wanted


def names(tab):
    """Sequences on the page, as numbers."""
    said = tab.locator("#sequences .sub").all_text_contents()
    return [int(one.split("sequence ")[1], 16) for one in said]


@pytest.mark.parametrize("size", SIZES)
def test_a_group_shows_its_prompt_once_and_rewards_side_by_side(size, opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"), size=size)
    assert tab.locator(".group").count() == 3
    group = tab.locator(".group", has_text="1+1=")
    assert group.locator(".question").count() == 1
    cards = group.locator(".sequence")
    assert cards.count() == 3
    first = cards.nth(0)
    for words in ("reward 1", "1 of 6 tokens masked", "advantage 0.5", "stop", "correct 1", "format 1"):
        assert words in first.text_content()
    assert group.locator(".badge.open").all_text_contents() == ["truncated (length)"]
    assert "equal rewards" in tab.locator(".group", has_text="2+2=").locator("h3").text_content()
    boxes = [cards.nth(at).bounding_box() for at in range(3)]
    assert len({box["y"] for box in boxes}) == 1
    assert boxes[0]["x"] + boxes[0]["width"] <= boxes[1]["x"]
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


@pytest.mark.parametrize(
    ("order", "first"),
    [
        ("stopped", {0, 100, 200}), ("log_ratio", {205}), ("reward", {1, 202, 203, 204, 205}), ("best", {0, 200}),
        ("gap", {200, 201, 202, 203, 204, 205}), ("truncated", {2, 101, 205}),
    ],
)  # fmt: skip
def test_completions_can_be_sorted_by_what_went_wrong(order, first, opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"))
    tab.locator("#layout").select_option("list")
    tab.locator("#sort").select_option(order)
    tab.locator("#more").click()
    found = names(tab)
    assert len(found) == 11
    assert set(found[: len(first)]) == first


def test_search_finds_text_tokens_and_prompts(opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"))  # without a tokenizer: ids, and the text of each completion
    tab.locator("#layout").select_option("list")
    tab.locator("#search").focus()
    tab.keyboard.type("ANSWER 10")
    assert set(names(tab)) == {100, 101}
    assert tab.locator("#matches").text_content().startswith("2 in 2 completions")
    assert tab.locator("mark").all_text_contents() == ["answer 10", "answer 10"]
    tab.locator("#search").fill("1+1")
    assert set(names(tab)) == {0, 1, 2}
    tab.locator("#search").fill("#2#3")  # across two tokens
    assert tab.locator("#sequences .hit").all_text_contents()[:2] == ["#2", "#3"]
    tab.locator("#search").fill("#")
    tab.locator("#whole").check()
    assert tab.locator("#matches").text_content() == "nothing found"
    tab.locator("#search").fill("#3")
    assert set(tab.locator("#sequences .hit").all_text_contents()) == {"#3"}
    tab.keyboard.press("Enter")
    assert tab.locator(".here").count() == 1
    tab.locator("#search").fill("")
    assert tab.locator("#sequences .hit").count() == 0


def test_a_masked_token_of_the_table_is_searched_for_with_a_click(opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"))
    tab.locator("button.find").first.click()
    assert tab.locator("#search").input_value() == "#0"
    assert set(tab.locator(".hit").all_text_contents()) == {"#0"}


def test_tokens_can_be_tinted_by_their_numbers(opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"))
    tab.locator("#layout").select_option("list")
    tab.locator("#sort").select_option("log_ratio")
    tab.locator("#tint").select_option("log_ratio")
    assert "h3" in tab.locator("#sequences .t").first.get_attribute("class").split()  # |log r| is exactly .5
    assert tab.locator("#text-legend li").count() == 6


def test_a_run_without_a_region_shows_no_verdicts(opened, tmp_path):
    records = write_groups(tmp_path / "records", GROUPS, region=None)
    tab = opened(records)
    body = tab.locator("main").text_content()
    assert "masked" not in body.replace("which would another region mask", "")
    assert "no region decided on them" in body
    assert tab.locator("#tint option").first.get_attribute("value") == "log_ratio"
    assert tab.locator("#sort option[value=stopped]").count() == 0
    token = tab.locator("#sequences .t").first
    token.scroll_into_view_if_needed()
    token.hover()
    assert "weight" not in tab.locator("#tip").text_content()
    assert "mismatch" in tab.locator("#tip").text_content()


def test_hostile_prompts_and_names_are_shown_as_text(opened, tmp_path, monkeypatch):
    hostile_tokenizer(monkeypatch, tmp_path)
    folder = run_folder(tmp_path / "a")
    rows = [
        {
            "sequence": at, "group": 0, "task_id": text, "reward": 1.0, "rewards": {text: 1.0}, "stop_reason": text,
            "prompt": text, "completion": text,
        }
        for at, text in HOSTILE.items()
    ]  # fmt: skip
    write_groups(folder / "records", {"x": (1.0,)})
    write_sequences(folder / "records", rows, step=0, rank=0, text=True)
    tab = opened(folder)
    assert tab.locator("img").count() == 0
    words = tab.locator("#sequences").text_content()
    assert HOSTILE[0] in words
    assert "\u202e" not in words
    assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    tab.locator("#search").fill("<img")
    assert tab.locator("#sequences mark").first.text_content() == "<img"


def test_a_live_page_reloads_and_keeps_its_state(opened, tmp_path):
    folder = run_folder(tmp_path / "a", rows=steps(300)[:200], finished=False, evaluations=())
    write_groups(folder / "records", GROUPS)
    tab = opened(text=page_of(gather(open_runs([folder])), reload_seconds=1))
    tab.locator("#live-pause").click()
    assert tab.locator("#live-state").text_content() == "Paused."
    tab.locator("#layout").select_option("list")
    tab.locator("#sort").select_option("reward")
    tab.locator("#search").fill("answer 2")
    tab.locator("#zoom-in").click()
    zoomed = tab.locator("#zoomed").text_content()
    tab.evaluate("scrollTo({top: 700, behavior: 'instant'})")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 201, "reward": 0.5}\n')
    (tmp_path / "report.html").write_text(page_of(gather(open_runs([folder])), reload_seconds=1), encoding="utf-8")
    tab.locator("#live-pause").evaluate("(button) => button.click()")  # a real click would scroll to it
    state = """[document.body.textContent.includes("unfinished, step 201"), scrollY, document.getElementById("zoomed").textContent,
        ...["layout", "sort", "search"].map((id) => document.getElementById(id).value), document.querySelectorAll("mark").length > 0]"""
    until(tab, state, [True, 700, zoomed, "list", "reward", "answer 2", True])
    (tmp_path / "report.html").write_text(page_of(gather(open_runs([folder]))), encoding="utf-8")
    until(tab, "document.getElementById('live') === null", True)


def test_a_page_prints_whole_groups(opened, tmp_path):
    tab = opened(with_groups(tmp_path / "a"))
    tab.emulate_media(media="print")
    assert tab.locator("#controls").is_hidden()
    assert tab.locator(".members").first.evaluate("(box) => box.scrollWidth <= box.clientWidth")
