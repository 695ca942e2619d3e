"""Models by name. Runs without any framework."""

from pathlib import Path

import pytest

import trustrl
from trustrl.world import cache, models


@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "HuggingFaceTB/SmolLM2-135M-Instruct", "./not/there", "/nor/there"]
)
def test_hub_ids_and_paths_pass_through_untouched(name):
    assert models.path(name) == name


def test_a_folder_that_exists_passes_through(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("checkpoint").mkdir()
    assert models.path("checkpoint") == "checkpoint"
    assert models.path(tmp_path / "checkpoint") == str(tmp_path / "checkpoint")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("tinny", "Did you mean 'tiny'?", id="a typing mistake"),
        pytest.param("smollm2", "Did you mean 'smollm2-135m'?", id="a size left out"),
        pytest.param(
            "gpt2",
            "stand-in-smollm3, tiny, tiny-long, tiny-long-llama, tiny-tied. A model can also be an existing directory, or a hub id",
            id="others",
        ),
    ],
)
def test_other_names_are_refused_with_the_nearest(name, says):
    with pytest.raises(trustrl.errors.UnknownNameError, match="Unknown model") as caught:
        models.path(name)
    assert says in str(caught.value)


def test_a_known_name_means_the_same_in_every_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("known").mkdir()
    models.MODELS.register("known")(lambda: Path("/somewhere/else"))
    try:
        assert models.path("known") == "/somewhere/else"
        assert models.path("./known") == "./known"
    finally:
        models.MODELS._entries.pop("known")


def test_a_known_model_is_local_only_once_it_has_been_made(tmp_path, monkeypatch):
    monkeypatch.setenv("TRUSTRL_CACHE", str(tmp_path))
    models.MODELS.register("known")(lambda: cache.folder("known", lambda folder: None))
    try:
        assert models.local("known") is None
        assert list(tmp_path.iterdir()) == []
        assert models.path("known") == models.local("known") == str(tmp_path / "known")
    finally:
        models.MODELS._entries.pop("known")


def test_hub_ids_are_left_to_whoever_loads_them():
    assert models.local("Qwen/Qwen3-0.6B") == "Qwen/Qwen3-0.6B"
