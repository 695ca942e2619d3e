"""SECURITY.md: every row and sentence of its threat model names a test that exists, and some of these tests."""

import ast
import re
import shutil
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyarrow")

from support import recorded, run_folders
from support.touched import touched, written_outside
from trustrl.cli import VERBS
from trustrl.engines.catalogue import ENGINES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text()
MODEL = PAGE.partition("## Threat model\n")[2].partition("\n## ")[0]
NOTES = MODEL.partition("### Notes\n")[2]
COMMENT = re.compile(r"<!-- (.*?) -->", re.S)
ONE_BLOCK = "**Checkpoints can execute code.**"
"""The one note of several sentences that share their tests."""


def rows(section):
    """The rows of a section's table, without head and rule."""
    text = MODEL.partition(f"### {section}\n")[2].partition("\n### ")[0]
    return [line for line in text.splitlines() if line.startswith("|")][2:]


def notes():
    return [" ".join(one.split()) for one in re.split(r"^- ", NOTES, flags=re.M)[1:]]


def exists(name):
    path, _, function = name.partition("::")
    file = ROOT / path
    defined = ast.walk(ast.parse(file.read_text())) if file.is_file() else ()
    return any(isinstance(one, ast.FunctionDef) and one.name == function for one in defined)


@pytest.mark.parametrize("block", [*rows("Commands"), *rows("Engines"), *notes()], ids=lambda block: block[:40])
def test_every_row_and_sentence_names_tests_that_exist(block):
    *said, rest = re.split(r"<!-- .*? -->", block)
    assert not rest.strip()
    assert said
    for sentence in said:
        single = sentence.startswith("|") or ONE_BLOCK in sentence
        assert single or len(re.findall(r"[.!?](?= |$)", sentence.strip())) == 1, sentence
    for comment in COMMENT.findall(block):
        for name in comment.split(", "):
            assert exists(name), name


def test_a_test_that_does_not_exist_would_be_noticed():
    assert not exists("tests/contracts/test_security.py::test_no_such_test")
    assert not exists("tests/contracts/no_such_file.py::test_anything")


def test_every_command_and_every_engine_has_a_row():
    assert [re.match(r"\| `(\w+)`", row)[1] for row in rows("Commands")] == list(VERBS)
    named = ", ".join(row.split("|")[1] for row in rows("Engines"))
    for engine in ENGINES:
        assert re.search(rf"(^|[ ,]){re.escape(engine.name)}([ ,(]|$)", named), engine.name
    folders = {one.stem for one in (ROOT / "src/trustrl/engines").iterdir() if not one.name.startswith("_")}
    modules = {engine.module.rpartition(".")[2] for engine in ENGINES}
    assert folders - modules == {"catalogue", "common", "refusals", "sglang", "verl_cpu", "vllm"}
    assert "(`sglang`)" in named
    assert "(`trustrl_verl_cpu`)" in named
    assert "(`vllm`)" in named


# ── commands ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    recorded.add_rewards(recorded.record(folder / "recorded" / "records"))
    run_folders.run_folder(folder / "run")
    (folder / "losses").mkdir()
    (folder / "losses" / "my_loss.py").write_text(
        "import os, socket, subprocess, time\n"
        "kept = socket.create_server(('127.0.0.1', 0))\n"
        "socket.create_connection(kept.getsockname()).close()\n"
        "subprocess.run(['true'])\n"
        "open('imported', 'w').close()\n"
        "late = time.monotonic() + 60\n"  # until it is seen: what is listened on is sampled
        "while not os.path.exists('../here.listening') and time.monotonic() < late: time.sleep(0.1)\n"
        "from support.losses_under_test import dppo\n"
    )
    return folder


COMMANDS = {
    "regions": (["dppo-topk-tv"], 0),
    "recipes": ([], 0),
    "plan": (["tour"], 0),
    "report": (["{run}", "--out", "page.html"], 0),
    "watch": (["{run}", "--out", "page.html"], 0),
    "explain": (["{run}"], 0),
    "metrics": (["kl_k3"], 0),
    "conformance": (["support.losses_under_test:dppo", "--kind", "dppo"], 0),
    "doctor": ([], None),
    "audit": (["{recorded}"], 0),
    "calibrate": (["{recorded}"], None),
    "bound": (["{recorded}"], 0),
    "reproduce": (["{run}", "--figure", "dppo-3", "--out", "figure.png"], 0),
    "records": (["check", "{recorded}"], 0),
}
"""The commands that need no engine, and their exit codes where it is the same everywhere."""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("verb", COMMANDS)
def test_a_command_touches_nothing_but_its_output(verb, inputs, tmp_path):
    given, code = COMMANDS[verb]
    words = [one.format(run=inputs / "run", recorded=inputs / "recorded") for one in given]
    ended, events, listened = touched(tmp_path / "here", verb, *words)
    assert ended in ((0, 1) if code is None else (code,))
    assert {one for one in events if one[0] != "write"} == set()
    assert written_outside(events, tmp_path) == set()
    assert listened == set()
    assert bool(written_outside(events)) is ("--out" in given)


def test_every_command_is_tried_here_or_with_an_engine():
    assert VERBS.keys() - COMMANDS.keys() == {"run", "compare", "probe", "select"}  # tests/engines/trl/test_touched.py


def test_conformance_imports_the_module_that_it_is_told_to(inputs, tmp_path):
    """Which also shows that what a command touches would be seen."""
    shutil.copytree(inputs / "losses", tmp_path / "here")
    ended, events, listened = touched(tmp_path / "here", "conformance", "my_loss:dppo", "--kind", "dppo")
    assert ended == 0
    assert written_outside(events, ROOT) == {str((tmp_path / "here" / "imported").resolve())}
    assert {kind for kind, _ in events} == {"write", "socket.bind", "socket.connect", "subprocess.Popen"}
    assert {str(host) for host, _ in listened} == {"127.0.0.1"}


# ── network ─────────────────────────────────────────────────────────────────────────────────────────────────────────

MODULES = {
    "socket", "socketserver", "ssl", "http", "urllib.request", "requests", "httpx", "aiohttp", "ftplib", "smtplib",
    "xmlrpc", "zmq", "uvicorn", "fastapi", "websockets", "grpc", "fsspec", "fsspec.core", "pyarrow.fs",
}  # fmt: skip
CALLS = {"TCPStore", "create_server", "start_server", "start_unix_server", "create_connection", "from_uri"}

REACHES = {
    "engines/vllm/clients.py": "the vLLM server that the user names",
    "engines/vllm/gloo_channel.py": "the weight channel, on loopback",
    "recording/spool.py": "the same, from an address",
    "recording/storage.py": "the object store that the user names",
    "recording/writers.py": "asks this machine for its name",
    "runner/processes.py": "looks for a free port on loopback",
    "runner/ray_cluster.py": "the Ray cluster that RAY_ADDRESS names",
    "tools/audit/mapreduce.py": "Ray, with --ray",
    "trustrl_verl_cpu/plugin.py": "torch's store for verl's ranks, on loopback",
}
"""The files that can reach the network, and what they reach."""


def reaches(text):
    """Whether code imports a module for networks, or calls what connects or listens."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
            names = {first} if called in {"import_module", "need", "require"} else set()
            if called in CALLS or ast.unparse(node.func) == "ray.init":
                return True
        else:
            continue
        if MODULES & names:
            return True
    return False


def test_only_these_files_reach_the_network():
    found = {
        str(file.relative_to(source))
        for source in (ROOT / "src/trustrl", ROOT / "packages/verl_cpu/src")
        for file in source.rglob("*.py")
        if reaches(file.read_text(encoding="utf-8"))
    }
    assert found == REACHES.keys()


@pytest.mark.parametrize(
    "line",
    [
        "import socket", "from urllib import request", "from urllib.request import urlopen", "import requests",
        "need('pyarrow.fs', extra='records')", "dist.TCPStore('::', 1)", "asyncio.start_server(f)", "ray.init()",
    ],
)  # fmt: skip
def test_each_way_to_the_network_is_found(line):
    assert reaches(line)


def test_addresses_alone_are_not_the_network():
    assert not reaches("from urllib.parse import urlsplit\nrequests = []\nfor request in requests: request.send()")
