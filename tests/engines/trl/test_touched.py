"""What the commands that train or sample do to the world around them, on TRL and a model of this machine."""

import json
import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("trl")

from support.tiny_models import save_model
from support.touched import touched
from trustrl.runner.recipe import Recipe, load

ROOT = Path(__file__).parents[3]
RECIPE = str(ROOT / "recipes/sanity.toml")
ASIDE = {"git", "uname"}
LOOPBACK = ("('127.0.0.1', ", "('::1', ")

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
    pytest.mark.xdist_group("touched"),
]


def programs(events):
    return [json.loads(what) for kind, what in events if kind == "subprocess.Popen"]


def assert_connects_to_nothing(events, listened):
    assert {one for one in events if one[0] in ("socket.connect", "socket.sendto", "os.system", "os.exec")} == set()
    assert {what for kind, what in events if kind == "socket.bind" and not what.startswith(LOOPBACK)} == set()
    assert {host for host, _ in listened if not host.is_loopback} == set()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    save_model(folder, tied=True)
    return folder


def test_a_run_connects_to_nothing_and_starts_git_alone(model, tmp_path):
    words = [RECIPE, f"model.name={model}", "schedule.steps=2", "--out", "run"]
    code, events, listened = touched(tmp_path / "here", "run", *words, HF_HUB_OFFLINE="1")
    assert code == 0
    assert_connects_to_nothing(events, listened)
    assert {os.path.basename(command[0]) for command in programs(events)} <= ASIDE


def test_a_comparison_starts_runs_alone(model, tmp_path):
    words = [RECIPE, f"model.name={model}", "schedule.steps=2", "--regions", "ppo", "--seeds", "1", "--out", "grid"]
    code, events, listened = touched(tmp_path / "here", "compare", *words, HF_HUB_OFFLINE="1")
    assert code == 0
    assert_connects_to_nothing(events, listened)
    started = [command for command in programs(events) if os.path.basename(command[0]) not in ASIDE]
    assert [command[:4] for command in started] == [[sys.executable, "-m", "trustrl.cli", "run"]]


def test_a_selection_connects_to_nothing_and_starts_judges_alone(model, tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text('{"prompt": "1+1=", "answer": "2"}\n')
    plain = {key: table for key, table in load(RECIPE, [f"model.name={model}"]).to_dict().items() if key != "task"}
    recipe = Recipe.from_dict({**plain, "data": {"files": str(data)}, "reward": {"function": "exact"}})
    (tmp_path / "mine.toml").write_text(recipe.to_toml())
    words = [str(tmp_path / "mine.toml"), "--answers", "2", "--out", "kept"]
    code, events, listened = touched(tmp_path / "here", "select", *words, HF_HUB_OFFLINE="1")
    assert code == 0
    assert_connects_to_nothing(events, listened)
    assert {tuple(command[1:3]) for command in programs(events)} == {("-m", "trustrl.world.rewards.judge")}


def test_a_probe_of_a_local_model_connects_to_nothing(model, tmp_path):
    words = [str(model), "--sampler", "transformers", "--length", "4"]
    code, events, listened = touched(tmp_path / "here", "probe", *words, HF_HUB_OFFLINE="1")
    assert code in (0, 1)
    assert_connects_to_nothing(events, listened)
    assert {os.path.basename(command[0]) for command in programs(events)} <= ASIDE
