"""The commit in environment.json, in repositories whose configuration would run programs."""

import subprocess

import pytest

from trustrl.runner.git_commit import commit


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The current directory is a repository with one file."""
    folder = tmp_path / "repository"
    folder.mkdir()
    monkeypatch.chdir(folder)
    (folder / "file").write_text("one")
    git("init", "-q")
    git("add", ".")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    return folder


@pytest.fixture
def ran(tmp_path):
    return tmp_path / "ran"


@pytest.fixture
def program(tmp_path, ran):
    """A program that leaves a file behind."""
    file = tmp_path / "program"
    file.write_text(f"#!/bin/sh\ntouch {ran}\n")
    file.chmod(0o755)
    return file


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_a_commit_is_marked_if_tracked_files_differ_from_it(repository):
    head = git("rev-parse", "HEAD")
    assert commit() == head
    (repository / "new").write_text("untracked")
    assert commit() == head
    (repository / "file").write_text("two")
    assert commit() == f"{head}-dirty"


def test_a_directory_without_a_repository_has_no_commit(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert commit() is None


@pytest.mark.parametrize("name", ["core.fsmonitor", "filter.evil.clean", "filter.evil.process"])
def test_a_repository_s_own_programs_are_not_run(repository, program, ran, name):
    git("config", name, str(program))
    (repository / ".git/info/attributes").write_text("* filter=evil\n")
    (repository / "file").write_text("two")
    assert commit() == git("rev-parse", "HEAD") + "-unchecked"
    assert not ran.exists()
    subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, check=False)
    assert ran.exists(), "the call of release 0.1.0 runs it"


def test_a_program_of_a_submodule_is_not_run(repository, program, ran):
    inner = repository / "inner"
    inner.mkdir()
    (inner / "file").write_text("one")
    for arguments in (
        ["init", "-q"], ["add", "."], ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "one"],
    ):  # fmt: skip
        git("-C", str(inner), *arguments)
    git("add", "inner")
    git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-q", "-m", "two")
    git("-C", str(inner), "config", "filter.evil.clean", str(program))
    (inner / ".git/info/attributes").write_text("* filter=evil\n")
    (inner / "file").write_text("two")
    assert commit() == git("rev-parse", "HEAD")
    assert not ran.exists()
    subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, check=False)
    assert ran.exists(), "the call of release 0.1.0 runs it"
