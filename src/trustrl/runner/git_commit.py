"""Commit of the current directory, read without running programs that the repository's configuration names."""

import re
import subprocess

HARMLESS = re.compile(
    r"core\.(repositoryformatversion|filemode|bare|logallrefupdates|ignorecase|precomposeunicode|symlinks)"
    r"|core\.(autocrlf|eol)|remote\..*\.(url|pushurl|fetch|tagopt)"
    r"|(branch|user|submodule)\..*|(pull|push|rebase|fetch)\.[^.]*"
)
"""Settings with which git runs nothing while it compares files with a commit. Filters and lazy fetches run programs."""

OPTIONS = ("--no-optional-locks", "-c", "core.fsmonitor=false", "-c", "core.hooksPath=/dev/null")
STATUS = ("status", "--porcelain", "--untracked-files=no", "--ignore-submodules=all")


def commit() -> str | None:
    """Returns the commit of the current directory, or None if there is none.

    Ends in `-dirty` if tracked files differ from the commit. Ends in `-unchecked` if the files were not compared,
    because the repository's own configuration has settings that could make git run programs.
    """
    head = _git("rev-parse", "--verify", "HEAD")
    if head is None:
        return None
    changed = _git(*STATUS) if _runs_nothing() else None
    return f"{head}-unchecked" if changed is None else f"{head}-dirty" if changed else head


def _runs_nothing() -> bool:
    listed = _git("config", "--show-scope", "--name-only", "--list")
    if listed is None:
        return False
    scopes = [line.partition("\t") for line in listed.splitlines()]
    return all(HARMLESS.fullmatch(name) for scope, _, name in scopes if scope not in ("system", "global", "command"))


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", *OPTIONS, *arguments], capture_output=True, text=True, errors="replace", check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
