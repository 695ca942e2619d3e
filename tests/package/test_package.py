"""What a user gets: wheel and sdist are built, looked into, and installed where there is no source.

`nox -s package` runs this; anywhere else it is skipped, for it makes an environment with torch of its own.
"""

import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

TORCH = os.environ.get("TRUSTRL_PACKAGE_TORCH")
if TORCH is None:
    pytest.skip("run by `nox -s package`", allow_module_level=True)

ROOT = Path(__file__).parents[2]
RIG = ROOT / "packages/verl_cpu"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
TOGETHER = [
    ("doctor", "models", "otel", "plots", "ray", "records", "run", "tasks", "trl"),
    ("math", "verl", "verl-cpu"),
]
"""Extras that one environment has; verl wants other versions of what the others share."""

NEED_MORE = {
    "trustrl.core.impl.triton": "triton, which comes with torch for GPUs",
    "trustrl.kernels.projection_kernels": "triton, which comes with torch for GPUs",
    "trustrl.kernels.projection_pass": "triton, which comes with torch for GPUs",
    "trustrl.kernels.sum_kernels": "triton, which comes with torch for GPUs",
    "trustrl.kernels.token_kernels": "triton, which comes with torch for GPUs",
    "trustrl.kernels.token_pass": "triton, which comes with torch for GPUs",
    "trustrl.kernels.triton_divergence": "triton, which comes with torch for GPUs",
    "trustrl.kernels.triton_launch": "triton, which comes with torch for GPUs",
    "trustrl.kernels.triton_kernels": "triton, which comes with torch for GPUs",
    "trustrl.kernels.triton_pass": "triton, which comes with torch for GPUs",
    "trustrl.engines.areal": "areal",
    "trustrl.engines.axolotl": "axolotl",
    "trustrl.engines.common.kept_columns": "numpy, which every engine has",
    "trustrl.engines.common.loss_seam": "transformers",
    "trustrl.engines.common.sampled_record": "numpy, which every sampler has",
    "trustrl.engines.common.sampler_contract": "numpy, which every sampler has",
    "trustrl.engines.common.vocabulary_forward": "transformers",
    "trustrl.engines.common.vocabulary_read": "transformers",
    "trustrl.engines.nemo_rl": "nemo_rl",
    "trustrl.engines.openrlhf.experience_maker": "openrlhf",
    "trustrl.engines.openrlhf.losses": "openrlhf",
    "trustrl.engines.openrlhf.rollout_actor": "openrlhf and ray",
    "trustrl.engines.openrlhf.sampled_rows": "numpy, which every sampler has",
    "trustrl.engines.openrlhf.trainer": "openrlhf",
    "trustrl.engines.openrlhf.vocabulary": "openrlhf",
    "trustrl.engines.prime_rl": "prime_rl",
    "trustrl.engines.rlinf": "rlinf",
    "trustrl.engines.sglang": "numpy, which SGLang has",
    "trustrl.engines.skyrl": "skyrl",
    "trustrl.engines.swift": "ms-swift",
    "trustrl.engines.trinity": "trinity",
    "trustrl.engines.trl": "trl and transformers",
    "trustrl.engines.verl": "verl",
    "trustrl.engines.verl_cpu": "trustrl_verl_cpu, whose old name it is",
    "trustrl.engines.vllm.decode_record": "numpy, which vLLM has",
    "trustrl.engines.vllm.kept_in_engine": "vllm",
    "trustrl.engines.vllm.sampler_adapter": "numpy, which vLLM has",
    "trustrl.engines.vllm.gloo_transfer": "vLLM",
    "trustrl.engines.vllm.routed_experts": "numpy, which vLLM has",
}
"""What cannot be imported with the core alone, and why."""


@pytest.fixture
def our_warnings_are_errors():
    """Takes the place of the fixture for all tests, which imports trustrl: here it is not to be found."""


RUNNER_AND_OLD_NAME = {"trustrl/runner/verl_cpu_settings.py", "trustrl/engines/verl_cpu.py"}
"""The settings that a plan checks, and the command's old name: all that trustrl's wheel has of verl on a CPU."""


def run(*command, cwd=None, stderr=subprocess.PIPE, code=0):
    """Its output; what it said where it fails. Neither our source nor our settings of Python reach it."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        list(map(str, command)), cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=stderr, text=True, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + (done.stderr or "")[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder with the sdists of both packages, and the wheels that were made from them."""
    folder = tmp_path_factory.mktemp("built")
    for source in (ROOT, RIG):
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, source)
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    (found,) = built.glob("trustrl-*.whl")
    return found


@pytest.fixture(scope="module")
def sdist(built):
    (found,) = built.glob("trustrl-*.tar.gz")
    return found


@pytest.fixture(scope="module")
def rig(built):
    """The wheel of the package that runs verl on a CPU."""
    (found,) = built.glob("trustrl_verl_cpu-*.whl")
    return found


@pytest.fixture(scope="module")
def bin(wheel, tmp_path_factory):
    """The commands of a new environment: torch first, then the wheel, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run(folder / "bin/pip", "install", "--quiet", TORCH)
    run(folder / "bin/pip", "install", "--quiet", wheel)
    return folder / "bin"


@pytest.fixture(scope="module")
def both(built, tmp_path_factory):
    """The commands of a new environment with the extra that brings the second package, and without verl."""
    folder = tmp_path_factory.mktemp("both")
    venv.create(folder)
    install = (sys.executable, "-m", "uv", "pip", "install", "--quiet", "--python", folder / "bin/python")
    run(*install, TORCH)
    run(*install, "--find-links", built, f"trustrl[verl-cpu]=={PROJECT['version']}")
    return folder / "bin"


def contents(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {one.filename: one.CRC for one in archive.infolist()}


def test_the_wheel_is_the_package_the_shipped_recipes_and_the_tested_environments(wheel):
    code = [file for file in (ROOT / "src").rglob("*") if file.is_file() and "__pycache__" not in file.parts]
    expected = {str(file.relative_to(ROOT / "src")) for file in code}
    assert not any("verl_cpu" in name for name in expected - RUNNER_AND_OLD_NAME)
    expected |= {f"trustrl/recipes/{file.name}" for file in (ROOT / "recipes").glob("*.toml")}
    expected |= {f"trustrl/recipes/arms/{file.name}" for file in (ROOT / "recipes/arms").glob("*.toml")}
    expected |= {f"trustrl/environments/{file.name}" for file in (ROOT / "environments").glob("*.txt")}
    assert {"trustrl/py.typed", "trustrl/tools/report/page/main.js", "trustrl/recipes/tour.toml"} <= expected
    assert {name for name in contents(wheel) if ".dist-info/" not in name} == expected


def test_the_other_wheel_is_the_package_that_runs_verl_on_a_cpu(rig, wheel, built):
    (sdist,) = built.glob("trustrl_verl_cpu-*.tar.gz")
    run(sys.executable, "-m", "twine", "check", "--strict", rig, sdist)
    source = RIG / "src"
    expected = {str(file.relative_to(source)) for file in source.rglob("*") if file.suffix in (".py", ".typed")}
    assert "trustrl_verl_cpu/plugin.py" in expected
    assert {name for name in contents(rig) if ".dist-info/" not in name} == expected
    assert contents(rig).keys().isdisjoint(contents(wheel))
    with zipfile.ZipFile(rig) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = message_from_string(archive.read(name).decode())
    assert told["Version"] == PROJECT["version"]
    assert told.get_all("Requires-Dist") == [f"trustrl=={PROJECT['version']}"]


def test_the_sdist_is_what_is_committed(sdist):
    """So that it has tests and pages, and no caches, runs or notes. What serves the repository alone is left out."""
    committed = set(run("git", "ls-files", cwd=ROOT).splitlines())
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert names - committed == {"PKG-INFO"}
    of_the_repository = (".ci/", ".github/", ".pre-commit-config.yaml")
    assert {name for name in committed - names if not name.startswith(of_the_repository)} == set()


def test_the_source_tree_builds_the_same_wheel_as_the_sdist(wheel, tmp_path):
    run(sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, ROOT)
    assert contents(tmp_path / wheel.name) == contents(wheel)


def test_the_metadata_is_sound_and_asks_for_torch_and_jaxtyping_alone(wheel, sdist):
    run(sys.executable, "-m", "twine", "check", "--strict", wheel, sdist)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        told = message_from_string(archive.read(name).decode())
    needed = [line for line in told.get_all("Requires-Dist") if "extra ==" not in line]
    assert sorted(re.split(r"[<>=]", line)[0] for line in needed) == ["jaxtyping", "torch"]
    assert set(told.get_all("Provides-Extra")) == set(EXTRAS)
    assert told["Version"] == PROJECT["version"]


def test_the_command_runs_where_there_is_no_source(bin, tmp_path):
    assert "trustrl <verb>" in run(bin / "trustrl", "--help", cwd=tmp_path)
    assert run(bin / "trustrl", "--version", cwd=tmp_path).strip() == PROJECT["version"]
    assert "GRPOConfig" in run(bin / "trustrl", "plan", "tour", cwd=tmp_path)
    listed = run(bin / "trustrl", "recipes", cwd=tmp_path).splitlines()
    assert [line.split()[0] for line in listed] == sorted(file.stem for file in (ROOT / "recipes").glob("*.toml"))


def test_the_extra_brings_the_command_that_runs_verl_on_a_cpu(both, tmp_path):
    assert run(both / "python", "-m", "trustrl_verl_cpu", "--help", cwd=tmp_path).startswith(
        "python -m trustrl_verl_cpu"
    )
    defaults = run(both / "python", "-m", "trustrl_verl_cpu", "--defaults", cwd=tmp_path).splitlines()
    assert "trainer.v1.sampler.custom_sampler.path=pkg://trustrl_verl_cpu.plugin" in defaults


def test_a_recipe_on_a_cpu_is_refused_without_its_packages_before_anything_starts(bin, tmp_path):
    """verl is a file that must not be imported: what is missing is the package for CPUs."""
    (tmp_path / "verl.py").write_text("raise SystemExit('imported')")
    code = "import sys; sys.path.insert(0, '.'); from trustrl.cli import main; sys.exit(main(sys.argv[1:]))"
    done = subprocess.run(
        [bin / "python", "-c", code, "run", "verl-tour", "--out", "here"], cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode not in (0, None)
    assert 'trustrl_verl_cpu is not installed. Run `pip install "trustrl[verl,verl-cpu]"`.' in done.stderr
    assert not (tmp_path / "here").exists()


def test_the_first_lines_of_the_readme_run(bin, tmp_path):
    first = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.M | re.S)
    assert "policy_loss" in first[1]
    assert run(bin / "python", "-c", first[1], cwd=tmp_path)


def test_every_other_module_imports_with_the_core_alone(bin, tmp_path):
    code = (
        "import importlib, json, pkgutil, trustrl\n"
        "failed = {}\n"
        "for found in pkgutil.walk_packages(trustrl.__path__, 'trustrl.', onerror=lambda name: None):\n"
        "    try:\n"
        "        importlib.import_module(found.name)\n"
        "    except ImportError as error:\n"
        "        failed[found.name] = str(error)\n"
        "print(json.dumps(failed))"
    )
    failed = json.loads(run(bin / "python", "-c", code, cwd=tmp_path))
    allowed = tuple(NEED_MORE)
    assert {name: why for name, why in failed.items() if not name.startswith(allowed)} == {}
    assert {name for name in allowed if not any(one.startswith(name) for one in failed)} == set(), (
        "the list is out of date"
    )


def test_type_checkers_know_every_public_name_and_no_others(bin, tmp_path):
    code = "import json, trustrl; print(json.dumps([trustrl.__all__, trustrl.regions.__all__]))"
    top, regions = json.loads(run(bin / "python", "-c", code))
    names = [*top, *(f"regions.{name}" for name in regions)]
    lines = ["import trustrl", *(f"reveal_type(trustrl.{name})" for name in names), "trustrl.DPPO", "trustrl.dppo_loss"]
    (tmp_path / "user.py").write_text("\n".join(lines))
    command = (sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", bin / "python", "user.py")
    said = run(*command, cwd=tmp_path, code=1)  # the last two are in `trustrl.regions` and `trustrl.functional`
    messages = [remark["message"] for remark in json.loads(said)["generalDiagnostics"]]
    errors = [f'"{name}" is not a known attribute of module "trustrl"' for name in ("DPPO", "dppo_loss")]
    assert [message for message in messages if "is not a known attribute" in message] == errors
    assert sum(message.startswith("Type of ") for message in messages) == len(names)
    assert [message for message in messages if re.search(r"\bUnknown\b", message)] == []


@pytest.mark.parametrize("extras", TOGETHER, ids=",".join)
def test_extras_can_be_installed_together_and_leave_torch_as_it_is(extras, bin, wheel, built):
    """uv finds versions that fit, in a tenth of pip's time; nothing is installed. What fits together fits alone."""
    into = (f"{wheel}[{','.join(extras)}]", "--python", bin / "python", "--find-links", built)
    said = run(sys.executable, "-m", "uv", "pip", "install", "--dry-run", *into, stderr=subprocess.STDOUT)
    chosen = {plain(name) for name in re.findall(r"^ \+ ([^=@ ]+)", said, re.M)}
    wanted = {plain(re.split(r"[<>=\[]", line)[0]) for extra in extras for line in EXTRAS[extra]}
    assert wanted <= chosen
    assert "torch" not in chosen


def plain(name):
    return re.sub(r"[-_.]+", "-", name).lower()


def test_every_extra_is_among_those():
    assert sorted(extra for extras in TOGETHER for extra in extras) == sorted(EXTRAS)
