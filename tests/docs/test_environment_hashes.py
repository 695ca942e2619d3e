"""Every pinned package of an environment has the hashes of its files, and nox installs nothing else from there."""

import json
import re
from email.message import Message
from io import BytesIO
from pathlib import Path

import environment_hashes as tool
import pytest

ROOT = Path(__file__).parents[2]
FILES = tool.pin_files()
ONE, TWO, THREE, FOUR = (letter * 64 for letter in "abcd")
LISTED = {
    "some_engine-1.0-py3-none-any.whl": TWO,
    "some_engine-1.0.tar.gz": ONE,
    "some_engine-1.0.post1.tar.gz": THREE,
    "some_engine-1.0-py2.7.egg": FOUR,
    "some_engine-1.10-py3-none-any.whl": FOUR,
}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_pin_has_hashes_and_there_is_nothing_but_pins(file):
    text = file.read_text()
    joined = [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]
    found = tool.pins(text)
    assert len(found) == len(joined) > 0
    assert [name for name, _, hashes in found if not hashes] == []
    for line in joined:
        assert re.fullmatch(r"[\w.-]+==[\w.!+]+(\s+--hash=sha256:[0-9a-f]{64})+", line), line[:80]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_torch_and_trustrl_are_installed_apart(file):
    assert {"torch", "trustrl"}.isdisjoint(name for name, *_ in tool.pins(file.read_text()))


def test_one_release_has_the_same_hashes_in_every_environment():
    seen = {}
    for file in FILES:
        for name, version, hashes in tool.pins(file.read_text()):
            assert seen.setdefault((name, version), hashes) == hashes, f"{name} in {file.name}"


def test_nox_installs_a_file_of_pins_only_with_its_hashes():
    lines = (ROOT / "noxfile.py").read_text().splitlines()
    assert [line.strip() for line in lines if '"environments' in line or ('"-r"' in line and ".txt" in line)] == [
        'install(session, "-r", "benchmarks/smollm2-requirements.txt")',
        'def install_pinned(session: nox.Session, name: str, folder: str = "environments") -> None:',
        'install(session, "--require-hashes", "--no-deps", "-r", f"{folder}/{name}.txt")',
        'install(session, "--no-deps", "-r", "benchmarks/peers-requirements.txt")',
    ]


def answered(body, content):
    """An index that gives this page to everyone."""
    headers = Message()
    headers["Content-Type"] = content

    class Page(BytesIO):
        pass

    def urlopen(request, timeout):
        page = Page(body.encode())
        page.headers, page.address = headers, request.full_url
        asked.append(request.full_url)
        return page

    asked = []
    return urlopen, asked


JSON = json.dumps({"files": [{"filename": name, "hashes": {"sha256": one}} for name, one in LISTED.items()]})
HTML = "<html>" + "".join(f'<a href="https://files/x/{n}#sha256={h}">{n}</a><br/>' for n, h in LISTED.items())


@pytest.mark.parametrize(
    ("body", "content"),
    [(JSON, "application/vnd.pypi.simple.v1+json"), (HTML, "text/html; charset=utf-8")],
    ids=["json", "html"],
)
def test_all_files_of_the_release_and_of_no_other_are_written(monkeypatch, tmp_path, body, content):
    urlopen, asked = answered(body, content)
    monkeypatch.setattr(tool.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(tool, "FOLDERS", [tmp_path])
    file = tmp_path / "engine.txt"
    file.write_text(f"# Kept.\nSome_Engine==1.0 \\\n    --hash=sha256:{THREE}\n")
    assert tool.main(["--check", "--index", "https://index/simple/"]) == 1
    assert THREE in file.read_text()
    assert tool.main(["--index", "https://index/simple/"]) == 0
    assert file.read_text() == (f"# Kept.\nSome_Engine==1.0 \\\n    --hash=sha256:{ONE} \\\n    --hash=sha256:{TWO}\n")
    assert tool.main(["--check", "--index", "https://index/simple/"]) == 0
    assert set(asked) == {"https://index/simple/some-engine/"}


def test_a_release_that_the_index_does_not_have_is_named_and_nothing_is_written(monkeypatch, tmp_path, capsys):
    urlopen, _ = answered(HTML, "text/html")
    monkeypatch.setattr(tool.urllib.request, "urlopen", urlopen)
    monkeypatch.setattr(tool, "FOLDERS", [tmp_path])
    file = tmp_path / "engine.txt"
    file.write_text("some-engine==9.0\n")
    assert tool.main([]) == 1
    assert "some-engine==9.0" in capsys.readouterr().err
    assert file.read_text() == "some-engine==9.0\n"
