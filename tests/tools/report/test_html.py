"""The page as text: one file, nothing to fetch, and nothing of a model in it but data."""

import base64
import hashlib
import json
import re
import struct
from html.parser import HTMLParser

import pytest

pytest.importorskip("pyarrow")

from support.run_folders import HOSTILE, hostile_tokenizer, run_folder, steps, write_records
from trustrl.runs.open_run import open_runs
from trustrl.tools.report.html_page import page
from trustrl.tools.report.report_contents import gather


class Seen(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.inside, self.raw, self.ids = [], None, {"script": [], "style": []}, []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.elements.append((tag, dict(attributes)))
        self.inside = tag if tag in self.raw else None
        if self.inside:
            self.raw[tag].append("")

    def handle_endtag(self, tag):
        if tag == self.inside:
            self.inside = None

    def handle_data(self, data):
        if self.inside:
            self.raw[self.inside][-1] += data
        else:
            self.text += data


def seen(*folders, **bounds):
    text = page(gather(open_runs(folders), **bounds))
    text.encode()
    return Seen(text), text


def data_of(found):
    return json.loads(found.raw["script"][0])


def hostile_run(tmp_path, monkeypatch):
    hostile_tokenizer(monkeypatch, tmp_path)
    folder = run_folder(tmp_path / "a", name=HOSTILE[0] + HOSTILE[1], finished=False)
    (tmp_path / "a.log").write_text(f"error: {HOSTILE[0]}{HOSTILE[2]}\n")
    ids = [*HOSTILE, *HOSTILE]
    write_records(folder / "records", {"token_id": ids, "kept": [False] * len(ids)})
    dump = folder / "records" / "dump-00000001"
    dump.mkdir()
    (dump / "trigger.rank-0000.json").write_text(
        json.dumps({"step": HOSTILE[0], "fired": [{"trigger": {"kind": HOSTILE[5]}, "found": {"x": HOSTILE[9]}}]})
    )
    return folder


ELEMENTS = {
    "html", "head", "meta", "title", "style", "body", "div", "header", "p", "h1", "h2", "h3", "nav", "ul", "li", "a", "main",
    "section", "article", "span", "b", "dl", "dt", "dd", "pre", "figure", "figcaption", "strong", "label", "select", "option",
    "canvas", "table", "caption", "thead", "tbody", "tr", "th", "td", "button", "footer", "script", "svg", "path", "details",
    "summary", "input", "output", "h4",
}  # fmt: skip


def test_hostile_text_adds_no_element_and_no_handler(tmp_path, monkeypatch):
    found, text = seen(hostile_run(tmp_path, monkeypatch))
    assert {tag for tag, _ in found.elements} <= ELEMENTS
    assert [tag for tag, _ in found.elements].count("script") == 2
    names = {name for _, attributes in found.elements for name in attributes}
    assert not {
        name for name in names if name.startswith("on") or name in ("src", "srcdoc", "style", "srcset", "action")
    }
    assert not set("\x00\x1b\u202e\u2028\u2029") & set(text)
    assert HOSTILE[0] in found.text  # as text


def test_every_hostile_token_is_in_the_data(tmp_path, monkeypatch):
    found, _ = seen(hostile_run(tmp_path, monkeypatch))
    texts = data_of(found)["texts"]
    assert HOSTILE[0] in texts
    assert {"\\u202ereversed\\u202c", "\\ud800", "⏎"} <= set(texts)
    assert max(map(len, texts)) < 1000


def test_the_policy_names_exactly_the_pages_own_style_and_script(tmp_path):
    found, _ = seen(run_folder(tmp_path / "a"))
    policy = next(one["content"] for tag, one in found.elements if tag == "meta" and "http-equiv" in one)
    for kind, text in (("style", found.raw["style"][0]), ("script", found.raw["script"][1])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy


def test_nothing_is_fetched(tmp_path):
    found, text = seen(run_folder(tmp_path / "a"))
    links = [one["href"] for tag, one in found.elements if tag == "a"]
    assert all(link.startswith("#") for link in links)
    assert set(re.findall(r"https?://[^\"' ;]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, not an address
    assert not re.search(r"@import|url\(|innerHTML|insertAdjacentHTML|document\.write|eval\(|fetch\(|XMLHttp", text)


def test_links_lead_to_parts_that_exist(tmp_path):
    for folder in (run_folder(tmp_path / "a"), run_folder(tmp_path / "b", rows=[], evaluations=(), finished=False)):
        found, _ = seen(folder)
        ids = [one["id"] for _, one in found.elements if "id" in one]
        assert len(ids) == len(set(ids))
        for tag, one in found.elements:
            if tag == "a":
                assert one["href"][1:] in ids
            for name in ("aria-labelledby", "for"):
                assert set(one.get(name, ids[0]).split()) <= set(ids)


def test_a_run_says_what_it_was_and_what_became_of_it(tmp_path):
    found, _ = seen(run_folder(tmp_path / "a"))
    for words in (
        "small",
        "exceeds 0.15 (probability)",
        "25.0% → 75.0%",
        "finished",
        "TRL, 1 × cpu",
        "8 of 8",
        "This run has no token records",
    ):
        assert words in found.text
    assert "collapsed" not in found.text.split("A run collapsed if")[0]


def test_unfinished_and_collapsed_runs_and_missing_evaluations_are_said(tmp_path):
    rows = [*steps(8), {"step": 9, "reward": 0.0, "loss": None}]
    found, _ = seen(run_folder(tmp_path / "a", rows=rows, evaluations=(), finished=False))
    for words in ("unfinished, step 9 of 8", "collapsed", "held-out accuracy was not measured"):
        assert words in found.text


def test_an_accuracy_that_was_only_measured_before_is_not_a_change(tmp_path):
    found, _ = seen(run_folder(tmp_path / "a", evaluations=((0, 0.25),), finished=False))
    assert "25.0% → " not in found.text
    assert "25.0%" in found.text


def test_records_that_cannot_be_read_are_said(tmp_path):
    folder = run_folder(tmp_path / "a")
    (folder / "records").mkdir()
    (folder / "records" / "step-00000000.rank-0000.parquet").write_bytes(b"PAR1")
    found, _ = seen(folder)
    assert "Cannot read the records of this run" in found.text


def test_packed_numbers_are_the_records(tmp_path):
    folder = run_folder(tmp_path / "a")
    write_records(
        folder / "records", {"policy_logp": [-0.5, float("nan")], "token_id": [7, 8], "divergence_lower": [0.125, 0.25]}
    )
    found, _ = seen(folder)
    (tokens,) = data_of(found)["tokens"]
    floats = struct.unpack("<2f", base64.b64decode(tokens["rows"]["policy_logp"]))
    assert floats[0] == -0.5
    assert floats[1] != floats[1]
    assert struct.unpack("<2f", base64.b64decode(tokens["rows"]["divergence_lower"]))[1] == 0.25
    assert "entropy" not in tokens["rows"]  # nobody recorded it
    places = struct.unpack("<2i", base64.b64decode(tokens["rows"]["text"]))
    assert [data_of(found)["texts"][place] for place in places] == ["#7", "#8"]


@pytest.mark.parametrize(
    ("region", "edge"),
    [
        ("dppo-binary-tv", {"on": "gap", "low": 0.15, "high": 0.15}), ("ppo", {"on": "ratio", "low": 0.2, "high": 0.28}),
        ("dppo-topk-tv", None), ("tis", None), ("gspo", None), ("troll", None),
    ],
)  # fmt: skip
def test_only_an_edge_that_the_sampled_token_decides_is_drawn(region, edge, tmp_path):
    folder = run_folder(tmp_path / "a", region=region)
    write_records(folder / "records", {"token_id": [1]}, region=region)
    found, _ = seen(folder)
    assert data_of(found)["tokens"][0]["edge"] == edge


@pytest.mark.parametrize(("engine", "update", "step"), [("trl", 0, 4), ("verl", 0, 5), ("verl", 1, 6)])
def test_recorded_steps_are_shown_as_the_curves_count_them(engine, update, step, tmp_path):
    """TRL records count the updates that are done, verl's the batches, here of two updates."""
    folder = run_folder(tmp_path / "a", updates=2)
    recipe = (folder / "recipe.toml").read_text()
    (folder / "recipe.toml").write_text(recipe.replace('name = "trl"', f'name = "{engine}"'))
    write_records(folder / "records", {"token_id": [1], "update": [update]}, step=3)
    found, _ = seen(folder)
    (tokens,) = data_of(found)["tokens"]
    assert tokens["completions"][0]["step"] == step
    assert struct.unpack("<i", base64.b64decode(tokens["points"]["step"]))[0] == step


def test_many_runs_share_the_tokens_a_page_may_hold(tmp_path):
    folders = [run_folder(tmp_path / name, name=f"s-{name}") for name in "abc"]
    for folder in folders:
        write_records(folder / "records", {"token_id": [1] * 90})
    found, _ = seen(*folders, max_points=60, max_shown=0)
    data = data_of(found)
    assert [len(base64.b64decode(one["points"]["mu"])) // 4 for one in data["tokens"]] == [20, 20, 20]
    assert [run["label"] for run in data["runs"]] == ["a", "b", "c"]
    assert "3 runs compared" in found.text
