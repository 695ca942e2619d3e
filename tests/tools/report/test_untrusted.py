"""Text of models: everything in it can be seen, and nothing in it acts."""

import json
import sys
import unicodedata
from types import ModuleType

import pytest

from support.run_folders import HOSTILE, hostile_tokenizer
from trustrl.tools.report.safe_text import LONGEST, embedded, token_texts, visible


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a b", "a b", id="plain"),
        pytest.param("naïve 東京 🙂", "naïve 東京 🙂", id="letters of the world"),
        pytest.param("\n", "⏎", id="a line's end"),
        pytest.param("\t", "⇥", id="a tab"),
        pytest.param("\x00\x1b[2J", "\\x00\\x1b[2J", id="controls"),
        pytest.param("\u202eabc\u2066", "\\u202eabc\\u2066", id="directions"),
        pytest.param("\u200b\ufeff\U000e0041", "\\u200b\\ufeff\\U000e0041", id="nothing to see"),
        pytest.param("\ud800", "\\ud800", id="half a character"),
        pytest.param("\u2028\u2029", "\\u2028\\u2029", id="other line ends"),
        pytest.param("\u0301", "◌\u0301", id="an accent without a letter"),
        pytest.param("", "", id="nothing"),
    ],
)
def test_what_cannot_be_seen_is_written_out(text, shown):
    assert visible(text) == shown


@pytest.mark.parametrize("text", HOSTILE.values(), ids=ascii)
def test_hostile_text_becomes_short_and_printable(text):
    shown = visible(text)
    assert len(shown) < 12 * LONGEST
    assert not {unicodedata.category(one) for one in shown} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    shown.encode()  # no half characters


def test_long_text_is_cut_and_says_so():
    assert visible("x" * 1000) == "x" * (LONGEST - 1) + "…"


@pytest.mark.parametrize("text", HOSTILE.values(), ids=ascii)
def test_embedded_text_cannot_leave_its_script_element(text):
    found = embedded({"text": text, text: [text]})
    assert not set("<>&\u2028\u2029") & set(found)
    assert found.isascii()
    assert json.loads(found) == {"text": text, text: [text]}


def test_numbers_that_json_does_not_have_are_refused():
    with pytest.raises(ValueError, match="JSON"):
        embedded([float("nan")])


def test_texts_come_from_a_tokenizer_on_this_machine(tmp_path, monkeypatch):
    hostile_tokenizer(monkeypatch, tmp_path)
    texts, missing = token_texts("some/model", [0, 2, 10, -1])
    assert texts == {0: visible(HOSTILE[0]), 2: "\\x00\\x1b[2J\\x07"}  # there is no token 10, and none below 0
    assert missing == ""


@pytest.mark.parametrize(
    ("model", "said"),
    [
        pytest.param(None, "does not name a model", id="no model"),
        pytest.param("no-such-model", "Unknown model", id="an unknown name"),
        pytest.param("tiny", "not on this machine", id="one that would have to be trained"),
    ],
)
def test_without_a_tokenizer_there_are_no_texts_and_a_reason(model, said, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", ModuleType("transformers"))
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    if model == "tiny":
        pytest.importorskip("torch")
    texts, missing = token_texts(model, [1])
    assert texts == {}
    assert said in missing
    assert list(tmp_path.iterdir()) == []  # nothing was made


def test_without_transformers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert "trustrl[models]" in token_texts("tiny", [1])[1]
