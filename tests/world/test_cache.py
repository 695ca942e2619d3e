"""The cache: whole folders or none. Runs without any framework."""

import threading

import pytest

from trustrl.errors import MissingDataError
from trustrl.world import cache


@pytest.fixture(autouse=True)
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_folder_is_made_once(empty_cache):
    calls = []

    def make(folder):
        calls.append(folder)
        (folder / "weights").write_text("1")

    first, second = cache.folder("model", make), cache.folder("model", make)
    assert first == second == empty_cache / "model"
    assert (first / "weights").read_text() == "1"
    assert len(calls) == 1
    assert [p.name for p in empty_cache.iterdir()] == ["model"]


@pytest.mark.parametrize("interruption", [RuntimeError, KeyboardInterrupt])
def test_an_interrupted_write_leaves_nothing(empty_cache, interruption):
    def fail(folder):
        (folder / "weights").write_text("half")
        raise interruption

    with pytest.raises(interruption):
        cache.folder("model", fail)
    assert not list(empty_cache.iterdir())
    made = cache.folder("model", lambda folder: (folder / "weights").write_text("whole"))
    assert (made / "weights").read_text() == "whole"


def test_nothing_is_under_the_name_before_it_is_whole(empty_cache):
    def make(folder):
        (folder / "weights").write_text("1")
        assert not (empty_cache / "model").exists()

    assert cache.folder("model", make).exists()


def test_of_two_runs_at_once_the_first_to_finish_wins(empty_cache):
    """Both are inside `make` at the same time, and both get the same whole folder."""
    both_inside, slow_may_finish = threading.Barrier(2), threading.Event()
    found = {}

    def run(who):
        def make(folder):
            both_inside.wait(10)
            if who == "slow":
                assert slow_may_finish.wait(10)
            (folder / "weights").write_text(who)

        found[who] = cache.folder("model", make)
        if who == "fast":
            slow_may_finish.set()

    threads = [threading.Thread(target=run, args=(who,)) for who in ("fast", "slow")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert found["fast"] == found["slow"] == empty_cache / "model"
    assert (empty_cache / "model" / "weights").read_text() == "fast"
    assert [p.name for p in empty_cache.iterdir()] == ["model"]


def test_where_only_kept_folders_count_nothing_is_made(empty_cache):
    made = cache.folder("kept", lambda folder: None)
    with cache.only_kept():
        assert cache.folder("kept", lambda folder: None) == made
        with pytest.raises(MissingDataError, match="must be cached already"):
            cache.folder("missing", lambda folder: None)
    assert not (empty_cache / "missing").exists()
    assert cache.folder("missing", lambda folder: None).is_dir()


def test_the_cache_lies_where_the_desktop_keeps_caches(monkeypatch, tmp_path):
    monkeypatch.delenv("TRUSTRL_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    for caches, expected in (
        (str(tmp_path / "caches"), "caches/trustrl"),
        ("relative", ".cache/trustrl"),
        ("", ".cache/trustrl"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", caches)
        assert cache.root() == tmp_path / expected
