"""One real engine for the tests of this process, and the models whose weights it has."""

import os

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")


@pytest.fixture(scope="session")
def models(tmp_path_factory):
    """The folders of two models that differ in their weights."""
    from support.tiny_models import save_model

    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for seed, folder in enumerate(folders):
        save_model(folder, tied=False, seed=seed, max_position_embeddings=1024)
    return folders


@pytest.fixture(scope="session")
def sampler(models):
    """An engine with the weights of the first model."""
    pytest.importorskip("sglang")
    from support.sglang_world import Sampler

    engine = Sampler(models[0])
    yield engine
    engine.close()
