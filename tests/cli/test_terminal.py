"""Text from outside on the terminal: every command shows control characters and bidi marks, and sends none."""

import json
import re
import shutil
import warnings
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from support.run_folders import run_folder, steps, write_groups
from trustrl import cli
from trustrl.cli import VERBS, main
from trustrl.errors import TrustRLWarning
from trustrl.terminal import complain, escape_warnings, escaped, say_json

HOSTILE = ("\x1b[31mred\x1b[0m", "\u202ereversed", "\x9b2J\x07", "a\nFORGED: line", "\u2066\u200f\ufeff", "\r\x08x")
SRC = Path(cli.__file__).parents[1]


def shown(said):
    """The output, which must be free of characters that act."""
    for text in (said.out, said.err):
        assert [one for one in text if not (one == "\n" or one.isprintable())] == []
        assert not re.search(r"^FORGED", text, re.MULTILINE)
    return said.out + said.err


@pytest.fixture
def run(tmp_path, request):
    """A run whose every text is hostile: names, metrics, records, file names, and the path."""
    hostile = request.param
    folder = tmp_path / f"of {hostile}"
    run_folder(folder, name=hostile, rows=steps(8, **{hostile: 1.0}), finished=False)
    recipe = (folder / "recipe.toml").read_text(encoding="utf-8")
    (folder / "recipe.toml").write_text(
        recipe.replace('name = "tiny"', f"name = {json.dumps(hostile)}").replace(
            'name = "trl"', f"name = {json.dumps(hostile)}"
        ),
        encoding="utf-8",
    )
    (folder / f"{hostile}.jsonl").write_text("{")
    (folder / f"link {hostile}").symlink_to("/nowhere")
    folder.with_suffix(".log").write_text(f"error: {hostile}\nTraceback {hostile}", encoding="utf-8")
    write_groups(folder / "records", {hostile: (0.0, 1.0), f"{hostile}2": (1.0, 0.5)})
    about = {
        "version": 3, "trustrl": hostile, "engine": {"name": hostile, "version": hostile}, "packages": {hostile: hostile},
        "model": hostile, "tokenizer": hostile, "dtypes": {"trainer": hostile, "sampler": hostile}, "sampling": None,
        "region": None, "region_role": hostile, "recording": {}, "started": hostile,
    }  # fmt: skip
    (folder / "records/run.json").write_text(json.dumps(about))
    return folder


def commands(run):
    """Commands that read the run, each with the words that it must print."""
    yield from (["report", run], ["report", run, "--json"], ["explain", run], ["explain", run, "--json"])
    yield from (["explain", run, run], ["report", run, run])
    yield from (["audit", run], ["audit", run, "--json"], ["calibrate", run], ["calibrate", run, "--json"])
    yield from (["bound", run], ["bound", run, "--json"])
    yield from (["records", "check", run], ["records", "check", run, "--json"])
    yield from (["plan", run / "recipe.toml"], ["plan", run / "recipe.toml", "--json"], ["run", run / "recipe.toml"])
    yield ["compare", run / "recipe.toml", "--regions", "ppo", "--out", run / "grid"]
    yield ["compare", "--draw", run]
    yield ["probe", "--model", "tiny", "--prompts", run / "nowhere"]


@pytest.mark.parametrize("run", HOSTILE, indirect=True, ids=range(len(HOSTILE)))
def test_every_command_that_reads_files_escapes_their_text(run, capsys):
    for command in commands(run):
        main(list(map(str, command)))
        assert shown(capsys.readouterr()).strip(), command


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
@pytest.mark.parametrize("verb", VERBS)
def test_every_command_escapes_its_arguments(verb, hostile, capsys):
    if verb != "doctor":
        assert main([verb, hostile]) != 0
        assert shown(capsys.readouterr()).strip()
    assert main([verb, f"--{hostile}"]) != 0
    shown(capsys.readouterr())


@pytest.mark.parametrize("hostile", HOSTILE, ids=range(len(HOSTILE)))
def test_an_unknown_verb_is_escaped(hostile, capsys):
    assert main([hostile]) == 2
    assert "Unknown verb" in shown(capsys.readouterr())


@pytest.mark.parametrize("run", HOSTILE[:1], indirect=True)
def test_a_damaged_record_with_a_hostile_path_is_refused_in_escaped_words(run, capsys):
    (part,) = (run / "records").glob("*.parquet")
    part.write_bytes(part.read_bytes()[:-20])
    for command in (["audit", run], ["calibrate", run], ["bound", run], ["explain", run], ["report", run]):
        assert main(list(map(str, command))) == 1
        assert part.name in shown(capsys.readouterr())


def test_a_log_of_a_comparison_is_escaped(tmp_path, capsys, monkeypatch):
    from support.recipes import small

    recipe = tmp_path / "small.toml"
    recipe.write_text(small().to_toml())
    monkeypatch.setattr(
        "trustrl.runner.grid.command_of",
        lambda cell: [shutil.which("printf"), "%b", r"error: \033[31mred\342\200\256x\n"],
    )
    assert main(["compare", str(recipe), "--regions", "ppo", "--seeds", "1", "--out", str(tmp_path / "grid")]) == 1
    assert r"\x1b[31mred\u202ex" in shown(capsys.readouterr())


def test_warnings_are_escaped_lines(capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        escape_warnings()
        warnings.warn(f"a {HOSTILE[0]}{HOSTILE[3]}", TrustRLWarning, stacklevel=1)
        warnings.warn(f"b {HOSTILE[1]}", UserWarning, stacklevel=1)
    text = shown(capsys.readouterr())
    assert text.startswith("warning: a \\x1b[31m")
    assert "UserWarning: b \\u202e" in text


def test_json_keeps_its_value_and_readable_text_its_letters(capsys):
    data = {"π": [*HOSTILE, "\U000e0001", "\ud800"]}
    say_json(data)
    out = capsys.readouterr().out
    assert json.loads(out) == data
    assert '"π"' in out
    assert all(one == "\n" or one.isprintable() for one in out)
    complain("Größe π → ✓")
    assert capsys.readouterr().err == "Größe π → ✓\n"
    assert escaped("a\tb\n") == "a\tb\n"


def test_all_terminal_lines_go_through_one_function():
    """Only `trustrl.terminal` prints. The two other places write a file to stdout, and a script for wandb."""
    writes = re.compile(r"^(?!\s*>>> ).*((?<![\w.])print\(|sys\.std(out|err)\.(write|buffer))", re.M)
    found = {
        str(file.relative_to(SRC))
        for part in ("cli", "tools", "runs", "runner", "recording", "terminal.py")
        for file in ([SRC / part] if part.endswith(".py") else sorted((SRC / part).rglob("*.py")))
        if writes.search(file.read_text(encoding="utf-8"))
    }
    assert found == {"terminal.py", "cli/metrics.py", "tools/dashboards.py"}
