"""The key that signs checkpoints: where it is, how it is made, and which files are refused as one."""

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from trustrl.errors import ConfigError
from trustrl.runner import signing
from trustrl.runner.signing import Key, key_file, load_key


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_KEY_FILE", str(tmp_path / "state" / "key"))
    return tmp_path / "state" / "key"


def test_the_key_is_in_the_state_directory_unless_a_variable_names_another_place(monkeypatch, tmp_path):
    monkeypatch.delenv("TRUSTRL_KEY_FILE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    assert key_file() == tmp_path / ".local/state/trustrl/key"
    monkeypatch.setenv("XDG_STATE_HOME", "not/absolute")
    assert key_file() == tmp_path / ".local/state/trustrl/key"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert key_file() == tmp_path / "state/trustrl/key"
    monkeypatch.setenv("TRUSTRL_KEY_FILE", "/shared/key")
    assert key_file() == Path("/shared/key")


def test_a_key_is_made_once_with_mode_0600_and_the_log_names_it(file):
    said = []
    before = os.umask(0)
    try:
        key = load_key(said.append)
    finally:
        os.umask(before)
    assert said == [f"made a key that signs checkpoints: {file}"]
    assert load_key(said.append) == key
    assert len(said) == 1
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert len(file.read_bytes()) == 32
    assert os.listdir(file.parent) == ["key"], "no scratch file is left"


def test_a_secret_is_not_shown_and_its_name_does_not_contain_it():
    key = Key(bytes(range(32)))
    assert repr(key) == "Key()"
    assert key.name != Key(bytes(32)).name
    assert key.secret.hex()[:8] not in key.name


def test_processes_that_start_together_get_one_key(file):
    code = "from trustrl.runner.signing import load_key; print(load_key(lambda _: None).name)"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert len({process.communicate()[0] for process in running}) == 1
    assert os.listdir(file.parent) == ["key"]


def test_another_process_may_make_the_key_first(file, monkeypatch):
    """Between the look and the link."""
    load_key(lambda _: None)
    monkeypatch.setattr(signing.os.path, "lexists", lambda path: False)
    said = []
    assert load_key(said.append).secret == file.read_bytes()
    assert said == []
    assert os.listdir(file.parent) == ["key"]


def test_a_file_system_without_hard_links_gets_a_key_too(file, monkeypatch):
    def refuse(*_):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    assert load_key(lambda _: None) == load_key(lambda _: None)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["key"]


def private(path, content=bytes(32)):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    path.chmod(0o600)


def link(path):
    private(path.with_name("target"))
    path.symlink_to("target")


def fifo(path):
    path.parent.mkdir()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        pytest.param(link, "a symbolic link", id="symbolic link"),
        pytest.param(lambda path: (path.parent.mkdir(), path.symlink_to("nowhere")), "a symbolic link", id="dangling"),
        pytest.param(fifo, "another kind of file", id="FIFO"),
        pytest.param(lambda path: path.mkdir(0o700, parents=True), "another kind of file", id="directory"),
        pytest.param(lambda path: private(path, bytes(31)), "got 31 bytes", id="too short"),
        pytest.param(lambda path: private(path, bytes(33)), "got more than 32 bytes", id="too long"),
        pytest.param(lambda path: private(path, b""), "got 0 bytes", id="empty"),
        *(
            pytest.param(lambda path, mode=mode: (private(path), path.chmod(mode)), f"mode {mode:04o}", id=f"{mode:o}")
            for mode in (0o640, 0o620, 0o604, 0o666)
        ),
    ],
)
def test_what_is_not_a_private_file_of_32_bytes_is_refused(file, make, said):
    make(file)
    with pytest.raises(ConfigError, match=rf"(?s){said}.*{file}.*TRUSTRL_KEY_FILE"):
        load_key(lambda _: None)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
def test_a_key_of_another_user_is_refused_to_root_as_well(file):
    private(file)
    os.chown(file, 12345, -1)
    with pytest.raises(ConfigError, match="a file of the user with id 12345"):
        load_key(lambda _: None)


def test_a_place_where_no_key_can_be_made_is_named(monkeypatch, tmp_path):
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv("TRUSTRL_KEY_FILE", str(tmp_path / "plain" / "key"))
    with pytest.raises(ConfigError, match=r"plain/key: File exists \(.*/plain\)\. Set TRUSTRL_KEY_FILE"):
        load_key(lambda _: None)


def test_a_key_is_for_manifests_alone():
    key = Key(bytes(32))
    assert key.signed({"a": 1}, key.signature({"a": 1}))
    assert not key.signed({"a": 2}, key.signature({"a": 1}))
    assert not Key(bytes([1] * 32)).signed({"a": 1}, key.signature({"a": 1}))
    assert not key.signed({"a": 1}, "ä")
