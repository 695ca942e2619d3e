"""The English check: it refuses the first text of each pair in CONTRIBUTING.md and accepts the second."""

import re
import subprocess
import sys
from pathlib import Path

import plain_english
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
(TABLE,) = re.findall(r"<!-- begin pairs -->\n(.*?)<!-- end pairs -->", PAGE, re.S)
PAIRS = [tuple(cell.strip() for cell in row.strip("|").split(" | ")) for row in TABLE.splitlines()[2:]]

SOURCES = {
    "module": '"""{}"""\n',
    "class": 'class Thing:\n    """{}"""\n',
    "function": 'def thing():\n    """{}"""\n',
    "property": 'class Thing:\n    @property\n    def it(self):\n        """{}"""\n',
    "comment": "x = 1  # {}\n",
    "error": 'raise ValueError("{}")\n',
    "help": 'parser.add_argument("--it", help="{}")\n',
}


def rules(kind, text):
    return {one.rule for one in plain_english.check_source(SOURCES[kind].format(text), "thing.py")}


def test_there_are_ten_pairs_of_every_kind():
    assert len(PAIRS) == 10
    assert {kind for kind, _, _ in PAIRS} == set(SOURCES)


@pytest.mark.parametrize(("kind", "before", "after"), PAIRS, ids=[pair[2][:40] for pair in PAIRS])
def test_the_text_before_is_refused_and_the_text_after_is_accepted(kind, before, after):
    assert rules(kind, before)
    assert not rules(kind, after)


@pytest.mark.parametrize(
    ("kind", "text", "rule"),
    [
        ("module", "`trustrl plan RECIPE`: what a recipe means.", "wh-opening"),
        ("property", "Where its tokens are, if it recorded any.", "wh-opening"),
        ("help", "Whether to draw.", "wh-opening"),
        ("help", "draws the curves too", "help-capital"),
        ("function", "The region's loss per token.", "verb-first"),
        ("function", "Sums of this layout.", "verb-first"),
        ("function", "½ log² r: never negative.", "verb-first"),
        ("error", "A worker of ours computes it.", "phrase"),
        ("error", "The region is kept beside the checkpoint.", "phrase"),
        ("error", "OMP_NUM_THREADS is no number.", "phrase"),
        ("error", "Settings that are none of these are none.", "phrase"),
        ("error", "Each run gets a folder of its own.", "phrase"),
        ("comment", "what Ray hands over is read-only", "phrase"),
        ("comment", "the region stopped this many tokens; it stops a token only once", "phrase"),
        ("comment", "both sides are normalised", "british"),
        ("comment", "a bound of .3 is loose", "bare-decimal"),
        ("error", "It must be in [.9, 1.1], got nothing.", "bare-decimal"),
        ("error", "At most 5 % of tokens.", "spaced-percent"),
    ],
)
def test_each_rule_refuses(kind, text, rule):
    assert rules(kind, text) == {rule}


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("function", "Returns, for each token, the mean of x."),
        ("function", "Merges two sums."),
        ("function", "Context manager that delays Ctrl-C."),
        ("property", "`where` of two numbers."),
        ("error", "The name is none of these, and there is none like it."),
        ("function", "Raise if the value is negative."),
        ("property", "Sequences, for regions whose needs include them."),
        ("class", "Counts by name."),
        ("module", "Registry of regions, and how to add one."),
        ("error", "The value is no longer accepted."),
        ("error", "The error is no larger than 1e-3."),
        ("error", "There is no file at this path."),
        ("error", "It runs besides one of its own workers."),
        ("error", "action must be 'penalise', got 'mask'."),
        ("error", "optimiser.learning_rate must be a number."),
        ("error", "`what is no text` and `.15` are code."),
        ("comment", "version 2.13.0, section 1.5 and file run.1.txt"),
        ("comment", "the handle is None where it is not needed"),
        ("comment", "x % 7 and 50% of it"),
        ("comment", "fmt: skip"),
    ],
)
def test_plain_text_is_accepted(kind, text):
    assert not rules(kind, text)


def test_values_and_formats_of_f_strings_are_not_prose():
    source = 'def f(x):\n    return f"The share of tokens is {x:.3f}, that is {x:.0%} of all."\n'
    assert not plain_english.check_source(source, "f.py")
    assert plain_english.check_source('print(f"The share is {x} %, which is much.")\n', "f.py")


def test_patterns_markup_and_short_strings_are_not_prose():
    for text in (r"(?:what|who) beside \\d+ words", "<p>goes on with</p> the rest", "beside"):
        assert not plain_english.check_source(f"X = '{text}'\n", "f.py")


def test_a_finding_names_its_line_inside_a_long_docstring():
    source = (
        '"""Module of things.\n\nIt is kept\nbeside the file.\n"""\n\n\nclass A:\n    x: int\n    """How much."""\n'
    )
    lines = {(one.line, one.rule) for one in plain_english.check_source(source, "f.py")}
    assert lines == {(4, "phrase"), (10, "wh-opening")}


def test_a_phrase_is_found_across_lines():
    assert rules("module", "Module of things.\n\nA worker of\nours adds them.") == {"phrase"}
    source = "# A worker of\n# ours adds them.\nx = 1\n"
    assert [one.line for one in plain_english.check_source(source, "f.py")] == [1]


def test_a_page_is_checked_outside_code_addresses_and_written_blocks():
    skipped = "```text\na bound of .3\n```\n<!-- begin rows -->\n5 % of tokens\n<!-- end rows -->\n[a](b beside c)\n"
    assert not plain_english.check_page(skipped, "a.md")
    found = plain_english.check_page(f"# A\n\n{skipped}\n| 5 % | `.3` |\nIt lies\nbeside it.\n", "a.md")
    assert [(one.line, one.rule) for one in found] == [(11, "spaced-percent"), (13, "phrase")]


def test_the_command_prints_path_line_rule_and_text_and_fails(tmp_path):
    (tmp_path / "a.py").write_text('"""Module of things."""\n\n\ndef f():\n    """The thing."""\n')
    (tmp_path / "b.py").write_text('"""Module of things."""\n')
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/plain_english.py", "."], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (1, "a.py:5: verb-first: The thing.\n")
    done = subprocess.run([sys.executable, ROOT / "scripts/plain_english.py", tmp_path / "b.py"], capture_output=True)
    assert (done.returncode, done.stdout) == (0, b"")
