"""TRL's checkpoints on resume, without TRL: the parts they need, their step, and their author."""

import json
import os
import zipfile
from types import SimpleNamespace

import pytest

from support.checkpoint_folders import OURS, safetensors
from support.recipes import small
from trustrl.errors import ConfigError, EngineError
from trustrl.runner import trl_run
from trustrl.runner.checkpoints import only_the_owner_writes
from trustrl.runner.directory import RunDirectory
from trustrl.runner.manifests import MANIFEST, write_manifest

PARTS = ["model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth", "trainer_state.json"]


class Log:
    """Stands in for Progress."""

    def __init__(self):
        self.lines = []

    def log(self, line):
        self.lines.append(line)


def checkpoint(folder, step, *, seal=OURS, without=(), state=None):
    made = folder / "checkpoints" / f"checkpoint-{step}"
    with only_the_owner_writes():
        made.mkdir(parents=True)
        for name in PARTS:
            with zipfile.ZipFile(made / name, "w") as file:
                file.writestr("data", bytes(100))
        (made / "model.safetensors").write_bytes(safetensors())
        (made / "trainer_state.json").write_text(json.dumps({"global_step": step} if state is None else state))
        for name in without:
            (made / name).unlink()
        if seal is not None:
            write_manifest(made, seal)
    return made


def last(folder, log=None, **more):
    folder.chmod(0o755)
    survey = trl_run.survey_of(small(), RunDirectory(folder, **more), log or Log(), OURS)
    return survey.step, survey.chosen


def names_in(folder):
    return sorted(one.name for one in (folder / "checkpoints").iterdir())


@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("removed", ["before the manifest", "after it"])
def test_a_checkpoint_without_one_of_its_parts_is_set_aside_and_the_one_before_is_used(tmp_path, name, removed):
    before = checkpoint(tmp_path, 4)
    newest = checkpoint(tmp_path, 8, without=[name] if removed == "before the manifest" else [])
    if removed == "after it":
        (newest / name).unlink()
    log = Log()
    assert last(tmp_path, log) == (4, before)
    assert len(log.lines) == 1
    assert log.lines[0].startswith("warning: checkpoint-8 is not used: ")
    assert names_in(tmp_path) == ["checkpoint-4", "set-aside-checkpoint-8"]


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"global_step": 6}, "its trainer_state.json is of step 6"),
        ({"global_step": "8"}, "its trainer_state.json is of step '8'"),
        ({}, "trainer_state.json has no global_step"),
        ([], "trainer_state.json has no global_step"),
    ],
)
@pytest.mark.parametrize("trusted", [False, True])
def test_the_step_is_the_trainer_s_and_not_the_directory_s(tmp_path, state, said, trusted):
    before = checkpoint(tmp_path, 4)
    checkpoint(tmp_path, 8, state=state)
    log = Log()
    assert last(tmp_path, log, trust_checkpoints=trusted) == (4, before)
    assert said in log.lines[0]


def test_two_checkpoints_that_changed_places_are_not_used(tmp_path):
    for step in (4, 8):
        checkpoint(tmp_path, step)
    folder = tmp_path / "checkpoints"
    (folder / "checkpoint-8").rename(folder / "x")
    (folder / "checkpoint-4").rename(folder / "checkpoint-8")
    (folder / "x").rename(folder / "checkpoint-4")
    with pytest.raises(EngineError, match=r"(?s)belongs to 'checkpoint-4'.*belongs to 'checkpoint-8'"):
        last(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-4", "checkpoint-8"]


@pytest.mark.parametrize("marked", [True, False], ids=["with its mark", "killed before its mark"])
def test_a_checkpoint_of_release_0_1_0_needs_trust_and_an_incomplete_one_is_set_aside(tmp_path, marked):
    made = checkpoint(tmp_path, 8, seal=None)
    if not marked:
        assert last(tmp_path) == (0, None)
        assert names_in(tmp_path) == ["set-aside-checkpoint-8"]
        return
    (made / MANIFEST).touch()
    with pytest.raises(ConfigError, match=r"no manifest, as trustrl 0\.1\.0 left it"):
        last(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-8"]
    assert last(tmp_path, trust_checkpoints=True) == (8, made)


def test_a_checkpoint_of_0_1_0_below_damaged_ones_is_not_set_aside_either(tmp_path):
    (checkpoint(tmp_path, 4, seal=None) / MANIFEST).touch()
    os.truncate(checkpoint(tmp_path, 8) / "optimizer.pt", 5)
    with pytest.raises(ConfigError, match=r"no manifest.*checkpoint-4"):
        last(tmp_path)
    assert names_in(tmp_path) == ["checkpoint-4", "checkpoint-8"]


def test_a_model_that_is_evaluated_alone_is_as_the_trainer_had_it(monkeypatch, tmp_path):
    """Of a run that was killed between its last checkpoint and its result."""
    loads = []

    class Model:
        def to(self, device):
            loads.append(device)
            return self

        @classmethod
        def from_pretrained(cls, folder, **settings):
            loads.append((folder, settings))
            return cls()

    monkeypatch.setattr(trl_run, "need", lambda *_, **__: SimpleNamespace(AutoModelForCausalLM=Model))
    recipe = small("engine.device=cuda", "model.dtype=bfloat16", "sampler.dtype=bfloat16")
    assert isinstance(trl_run._loaded(recipe, tmp_path), Model)
    assert loads == [(str(tmp_path), {"dtype": "bfloat16"}), "cuda"]
