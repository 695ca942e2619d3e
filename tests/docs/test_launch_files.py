"""The launch files name recipes, settings, extras and versions that exist. How they were run: docs/guides/launch.md."""

import json
import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from trustrl.cli import main, parser_of

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
RAY_JOB, TASK = (yaml.safe_load((LAUNCH / f"{name}.yaml").read_text()) for name in ("kuberay", "skypilot"))
CLUSTER = RAY_JOB["spec"]["rayClusterSpec"]
IN_SLURM = {"recipe": "qwen3-128gpu", "run": "/runs/mine", "nodes[@]": "", "#nodes[@]": "16", "@": ""}
IN_TASK = TASK["envs"] | {"SKYPILOT_NUM_NODES": str(TASK["num_nodes"])}


def command_of(text, values):
    (line,) = re.findall(r"^ *(trustrl run .*)$", text, re.M)
    line = re.sub(r"\$\{?([#@\w]+(?:\[@\])?)\}?", lambda name: values[name[1]], line)
    return [argument for argument in shlex.split(line)[1:] if argument]


COMMANDS = {
    "slurm": command_of((LAUNCH / "slurm.sbatch").read_text(), IN_SLURM),
    "kuberay": command_of(RAY_JOB["spec"]["entrypoint"], {}),
    "skypilot": command_of(TASK["run"], IN_TASK),
}


@pytest.mark.parametrize("launcher", COMMANDS)
def test_the_command_is_a_run_that_a_plan_accepts_and_that_resumes(launcher, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    options = parser_of("run").parse_intermixed_args(COMMANDS[launcher][1:])
    assert options.resume
    assert Path(options.out).parent == Path("/runs")
    assert main(["plan", options.recipe, *options.settings, "--json"]) == 0
    engine = json.loads(capsys.readouterr().out)["recipe"]["engine"]
    gpus = {
        "kuberay": sum(
            group["replicas"] * int(group["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"])
            for group in CLUSTER["workerGroupSpecs"]
        ),
        "skypilot": TASK["num_nodes"] * int(TASK["resources"]["accelerators"].partition(":")[2]),
        "slurm": 16 * 8,
    }
    assert engine["nodes"] * engine["ranks_per_node"] == gpus[launcher]


@pytest.mark.parametrize("text", [(LAUNCH / "Dockerfile").read_text(), TASK["setup"]], ids=["Dockerfile", "skypilot"])
def test_an_environment_has_the_tested_verl_and_extras_that_exist(text):
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r'"\.\[([\w,-]+)\]"', text)
    assert set(extras.split(",")) <= set(known)
    assert {"verl", "records", "run"} <= set(extras.split(","))
    assert "verl[vllm]==0.9.1" in text
    assert "verl==0.9.1" in (ROOT / "environments/verl.txt").read_text()


def test_the_cluster_has_the_tested_ray_and_asks_for_a_token():
    assert f"ray=={CLUSTER['rayVersion']}" in (ROOT / "environments/verl.txt").read_text()
    assert CLUSTER["authOptions"]["mode"] == "token"
    for text in ((LAUNCH / "slurm.sbatch").read_text(), TASK["run"]):
        assert "RAY_AUTH_MODE=token" in text
        assert "RAY_AUTH_TOKEN" in text


def test_the_script_is_bash():
    assert subprocess.run(["bash", "-n", LAUNCH / "slurm.sbatch"], check=False).returncode == 0
