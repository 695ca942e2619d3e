"""Sessions for contributors and CI. `nox` runs everything that CI runs, each session in a separate environment.

Each session installs torch alone and first, so that a machine without a GPU gets the CPU build where pip finds one.
"""

import importlib.util
import os
import shutil
import sys
from pathlib import Path

import nox

nox.needs_version = ">=2026.1"
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = [
    "lint", "tests", "compiled", "real_model", "trl", "trl_vllm", "verl", "verl_megatron", "skyrl", "losses",
    "report", "docs", "package", "pins",
]  # fmt: skip

TORCH = "torch==2.13.0"

RIG = "packages/verl_cpu"
CHECKOUT = ("-e", ".", "-e", RIG)
"""Both packages of this repository: trustrl, and the one that runs verl on a CPU."""


def install(session: nox.Session, *what: str) -> None:
    """Installs packages with uv where nox came with it (`pip install nox[uv]`), and otherwise with pip.

    uv installs vLLM's environment in 20 s, where pip takes 209 s. pip tries again what uv cannot install.
    """
    if importlib.util.find_spec("uv"):
        into = ("--python", f"{session.bin}/python")
        try:
            session.run_install(sys.executable, "-m", "uv", "pip", "install", "--quiet", *into, *what, external=True)
        except nox.command.CommandFailed:
            session.warn("uv failed: pip tries")
        else:
            return
    session.install(*what)


def install_torch(session: nox.Session, torch: str = TORCH) -> None:
    """Installs torch: with pip, unless UV_FIND_LINKS names the place where uv finds the CPU build."""
    if os.environ.get("UV_FIND_LINKS"):
        install(session, torch)
    else:
        session.install(torch)


def install_core(session: nox.Session, *groups: str) -> None:
    """Installs torch, the package, and the named dependency groups of pyproject.toml."""
    install_torch(session)
    install(session, *CHECKOUT, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), *groups))


@nox.session(python="3.11")
def lint(session: nox.Session) -> None:
    """Checks format, lint, types, import rules, sizes, clones and English."""
    install_core(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("pyright")
    session.run("lint-imports")
    session.run("python", "scripts/house.py")
    # Two files may not share 12 lines; see [tool.pylint] in pyproject.toml.
    session.run("pylint", "src/trustrl", f"{RIG}/src/trustrl_verl_cpu")
    session.run("python", "scripts/plain_english.py")


@nox.session(python="3.11")
def tests(session: nox.Session) -> None:
    """Runs the quick tests with every shape annotation checked at run time, then all tests that compile nothing."""
    install_core(session, "test")
    session.env["OMP_NUM_THREADS"] = "1"  # two workers with two threads each would fight over two cores
    if not session.posargs:
        session.run("pytest", "-q", "-n", "2", "--no-header", *SHAPES)
    session.run("pytest", "-n", "2", *(session.posargs or ("-m", "not compiled and not long")))


@nox.session(python="3.11")
def compiled(session: nox.Session) -> None:
    """Runs the tests that trace or compile: regions, kernels, and the GPU kernels without a GPU.

    Triton's kernels run under its interpreter and are compiled ahead for four kinds of GPU.
    """
    install_core(session, "test")
    install(session, "--no-deps", "triton==3.7.1")  # the version that torch 2.13 is built with
    session.env["OMP_NUM_THREADS"] = "1"
    if session.posargs:
        session.run("pytest", "-n", "2", "-m", "compiled", *session.posargs)
        return
    # On both workers: the test in each file that starts a process for the interpreter would keep one for minutes.
    session.run("pytest", "-n", "2", *INTERPRETED, env={"TRITON_INTERPRET": "1"})
    others = ("-m", "compiled and not long", "-k", "not under_the_interpreter")
    session.run("pytest", "-n", "2", *others, "tests/contracts", "tests/core", "tests/kernels")


# Tests of kernels under Triton's interpreter.
INTERPRETED = (
    "tests/core/test_triton_steps.py", "tests/kernels/test_triton.py", "tests/kernels/test_vocabulary_impl.py",
)  # fmt: skip

# Decorated functions cannot be compiled whole, so a separate run checks shapes.
SHAPES = (
    *("--jaxtyping-packages=trustrl,research,beartype.beartype", "-m", "not compiled"),
    *("tests/core/regions", "tests/contracts/test_dtypes.py", "tests/kernels/test_token_logprobs.py"),
    # Hundreds of updates by calls that other tests make too.
    "--deselect=tests/core/regions/test_troll.py::test_pitfall_5_the_tails_gradient_keeps_entropy_from_exploding",
    # The shape check refuses these before our own sentences can.
    "--deselect=tests/kernels/test_token_logprobs.py::test_what_does_not_fit_is_refused_in_a_sentence",
)


@nox.session(python="3.11")
def real_model(session: nox.Session) -> None:
    """Tests bf16 log-probs, their bound and exact divergences on SmolLM2-135M's hidden states; runs the notebooks."""
    install_notebooks(session)
    session.run("python", "benchmarks/accuracy.py")
    session.run("pytest", "tests/kernels/test_real_model.py", "tests/docs/test_notebooks.py")


@nox.session(python="3.11")
def notebooks(session: nox.Session) -> None:
    """Runs the notebooks again and saves their outputs. CI only runs them."""
    install_notebooks(session)
    session.run("python", "scripts/run_notebooks.py", *session.posargs)


def install_notebooks(session: nox.Session) -> None:
    """Installs the requirements of SmolLM2, and a Jupyter kernel in the same environment."""
    install_core(session, "test", "notebooks")
    install(session, "-r", "benchmarks/smollm2-requirements.txt")
    session.env["OMP_NUM_THREADS"] = "1"


def install_engine(session: nox.Session, environment: str, torch: str = TORCH) -> None:
    """Installs exactly the packages of one environment file, and the test tools."""
    install_torch(session, torch)
    install_pinned(session, environment)
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "engine_test"))
    install(session, "--no-deps", *CHECKOUT)
    session.env.update({"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"})


LOCKS = ".github/locks"
"""What the jobs of a release install: the tools that build and sign it, and those that write the site."""


def install_pinned(session: nox.Session, name: str, folder: str = "environments") -> None:
    """Installs the packages of one file of pins. A package whose hash is not written there is refused."""
    install(session, "--require-hashes", "--no-deps", "-r", f"{folder}/{name}.txt")


def other_release(session: nox.Session, package: str, version: str) -> str:
    """Unpacks another release of an engine next to the environment. Put it first on PYTHONPATH to use it."""
    folder = f"{session.virtualenv.location}/{package}-{version}"
    session.run("pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", folder, f"{package}=={version}")
    return folder


@nox.session(python="3.11")
def trl(session: nox.Session) -> None:
    """Tests every region in TRL's own trainer; regions on the sampled token also at the oldest TRL and one between."""
    install_engine(session, "trl")
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "trackers"))
    # The last TRL that has its own DPPO: an oracle.
    session.env["TRUSTRL_TRL_1_8"] = other_release(session, "trl", "1.8.0")
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/trl.md]"
    probe = ("tests/tools/probe", "tests/cli/test_probe.py")  # with a network of transformers on both sides
    tests = ("tests/engines/trl", "tests/world", "tests/tools/dashboards", *probe, guide)
    # A comparison and the runs to kill are trained once for all tests of their file.
    session.run("pytest", "-n", "2", "--dist", "loadgroup", "-m", "not long", *tests, *session.posargs)
    fused = other_release(session, "trl", "1.15.0")  # the oldest for Top-K, TROLL and exact regions
    session.run("pytest", "-n", "2", "tests/engines/trl/test_seam.py", env={"PYTHONPATH": fused})
    parity = [f"tests/engines/trl/test_parity.py::{name}" for name in TRL_PARITY]
    stock = "tests/engines/trl/test_stock_record.py"
    older = ("tests/engines/trl/test_floor.py", "tests/engines/trl/test_rollout_func.py", stock, *parity)
    for version in ("1.0.0", "1.9.0"):
        session.run("pytest", "-n", "2", *older, env={"PYTHONPATH": other_release(session, "trl", version)})


TRL_PARITY = (
    "test_a_region_is_trls_own_clip",
    "test_a_region_that_stops_nothing_is_trls_own_weight",
    "test_a_preset_on_the_sampled_token_has_the_cores_verdicts_and_gradient",
)
"""Tests of regions on the sampled token, for releases of TRL without a fused output layer."""


@nox.session(python="3.11")
def failures(session: nox.Session) -> None:
    """Makes the rows of docs/reference/failures.md that run in TRL's environment. Not in CI: an hour.

    The page says how to make the rows of verl and vLLM.
    """
    install_engine(session, "trl")
    session.env["PYTHONPATH"] = "studies/10-runs-survive"
    rows = session.run("python", "-m", "failures", "list", silent=True).split()
    here = [name for name in rows if name.startswith(("trl-", "compare-", "power"))]
    session.run("python", "-m", "failures", "run", *(session.posargs or ("--only", *here)))
    session.run("python", "-m", "failures", "page")


@nox.session(python="3.11")
def trl_vllm(session: nox.Session) -> None:
    """Tests the same with a real vLLM as the sampler, on the CPU."""
    install_engine(session, "trl-vllm")
    session.env.update({"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCHDYNAMO_DISABLE": "1"})
    session.run(
        "pytest", "-n", "2", "--dist", "loadgroup", "tests/engines/vllm", "tests/engines/trl_vllm", *session.posargs
    )
    session.run("pytest", "tests/engines/contract", "-m", "not long")


@nox.session(python="3.11")
def contract(session: nox.Session) -> None:
    """Runs every row of the sampler contract on vLLM and writes its page. Not in CI: four engines start one by one."""
    install_engine(session, "trl-vllm")
    results = Path("build/contract").resolve()
    results.mkdir(parents=True, exist_ok=True)
    session.env["TRUSTRL_CONTRACT_RESULTS"] = str(results)
    session.run("pytest", "tests/engines/contract", *session.posargs)
    session.run("python", "scripts/sampler_contract.py", *map(str, sorted(results.glob("*.json"))))


@nox.session(python="3.11")
def sglang(session: nox.Session) -> None:
    """Tests a real SGLang as the sampler on the CPU, alone, in TRL and in verl's `main_ppo`.

    Not in CI: it starts slowly.
    """
    install_sglang(session)
    in_trl = "tests/engines/sglang/test_trl_run.py"
    session.run("pytest", "tests/engines/sglang", f"--ignore={in_trl}", "tests/engines/contract", *session.posargs)
    # Beside the environment: verl's workers do not start where this TRL is installed.
    both = os.pathsep.join((other_release(session, "trl", "1.16.0"), session.env["PYTHONPATH"]))
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/sglang.md]"
    session.run("pytest", in_trl, guide, *session.posargs, env={"PYTHONPATH": both})


@nox.session(python="3.11")
def sglang_oldest(session: nox.Session) -> None:
    """Tests the sampler contract on SGLang 0.5.12, which verl 0.9.1 pins. Not in CI."""
    install_sglang(session)
    install_pinned(session, "sglang-oldest")
    session.run("pytest", "tests/engines/contract/test_sglang.py", *session.posargs)


def install_sglang(session: nox.Session) -> None:
    """Installs SGLang with stubs of its kernels."""
    install_engine(session, "sglang")
    stubs = str(Path("tests/support/sglang_on_cpu").resolve())
    session.env.update({"PYTHONPATH": stubs, "SGLANG_USE_CPU_ENGINE": "1"})


@nox.session(python="3.11")
def verl(session: nox.Session) -> None:
    """Tests regions in verl: its workers, and `main_ppo` on Ray."""
    install_engine(session, "verl")
    test_verl(session, "-m", "not long")


@nox.session(python="3.11")
def verl_oldest(session: nox.Session) -> None:
    """Tests the same at the oldest verl that we support. Not in CI: several minutes."""
    install_engine(session, "verl")
    oldest = other_release(session, "verl", "0.9.0")
    session.run("pytest", "-n", "2", "-m", "not long", *VERL, env={"PYTHONPATH": oldest})


@nox.session(python="3.11")
def verl_long(session: nox.Session) -> None:
    """Tests long runs on verl, such as thirty steps of a mixture of experts, and an asynchronous mode.

    Not in CI. Run `nox -s trl_vllm` first, which makes vLLM's environment.
    """
    install_engine(session, "verl")
    test_verl(session, "-m", "long")


@nox.session(python="3.11")
def slurm(session: nox.Session) -> None:
    """Tests the launch file for Slurm on two nodes on this machine. Not in CI: needs slurm-wlm, munge and root."""
    install_engine(session, "verl")
    session.run("pytest", "tests/launch", *session.posargs)


@nox.session(python="3.11")
def verl_veomni(session: nox.Session) -> None:
    """Tests every kind of region on verl's VeOmni engine. Not in CI: each of five tests starts two ranks anew."""
    install_engine(session, "verl")
    install_pinned(session, "verl-veomni")
    session.run("pytest", "tests/engines/verl_veomni", *session.posargs)


@nox.session(python="3.11")
def verl_megatron(session: nox.Session) -> None:
    """Tests regions in verl's Megatron engine on the CPU: its worker on gloo, and `main_ppo` on Ray with vLLM."""
    install_megatron(session)
    session.run("pytest", *VERL_MEGATRON, "-m", "not long", *session.posargs)


@nox.session(python="3.11")
def verl_megatron_long(session: nox.Session) -> None:
    """Tests long runs on verl's Megatron engine. Not in CI. Run `nox -s trl_vllm` first, as for `verl_long`."""
    install_megatron(session)
    session.run("pytest", *VERL_MEGATRON, "-m", "long", *session.posargs)


VERL_MEGATRON = ("-n", "2", "--dist", "loadgroup", "tests/engines/verl_megatron")


def install_megatron(session: nox.Session) -> None:
    """Installs verl's environment with Megatron on top, and names vLLM's environment if it exists."""
    install_engine(session, "verl")
    install_pinned(session, "verl-megatron")
    name_vllm(session)


@nox.session(python="3.11")
def verl_pins(session: nox.Session) -> None:
    """Tests verl at its own pins, `verl[cpu]==0.9.1` with torch 2.11. Not in CI: it needs 6 GB for CUDA packages."""
    install_engine(session, "verl-pins", torch="torch==2.11.0")
    test_verl(session)


VERL = ("tests/engines/verl", "tests/engines/verl_cpu")


def test_verl(session: nox.Session, *chosen: str) -> None:
    """Runs the tests of the verl adapter in an environment that has verl."""
    name_vllm(session)
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/verl.md]"
    # Audits through Ray Data, which no other environment has.
    on_ray = ("tests/tools/audit/test_mapreduce.py", "tests/tools/audit/test_bucket.py")
    trackers = "tests/runs/test_trackers.py"  # wandb and tensorboard are installed here
    session.env["TRUSTRL_MOTO"] = s3_server(session)
    # Each run is trained once for all tests of its file.
    session.run("pytest", "-n", "2", "--dist", "loadgroup", *VERL, *on_ray, trackers, guide, *chosen, *session.posargs)


def s3_server(session: nox.Session) -> str:
    """Installs moto's S3 server next to the environment, whose packages it would change. It runs in its own process."""
    folder = f"{session.virtualenv.location}/moto"
    if not Path(folder).exists():
        session.run("pip", "install", "--quiet", "--target", folder, "moto[s3,server]==5.2.5")
    return folder


def name_vllm(session: nox.Session) -> None:
    """Sets the Python of vLLM's server, which needs another transformers than verl, if `trl_vllm` has installed it."""
    vllm = Path(session.virtualenv.location).parent / "trl_vllm" / "bin" / "python"
    if vllm.exists():
        session.env["TRUSTRL_VLLM_PYTHON"] = str(vllm)


@nox.session(python="3.11")
def skyrl(session: nox.Session) -> None:
    """Tests regions in SkyRL: its registry, its own losses compared with ours, and its workers on Ray."""
    install_engine(session, "skyrl")
    typed = str(Path("tests/engines/skyrl/python311").resolve())  # without it, Python 3.11 cannot import SkyRL
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/skyrl.md]"
    session.env["PYTHONPATH"] = typed
    session.run("pytest", "-n", "2", "--dist", "loadfile", "tests/engines/skyrl", *session.posargs)
    session.run("pytest", guide)  # in a separate process: it registers, as the tests have


@nox.session(python="3.11")
@nox.parametrize("engine", ["TRL", "verl", "Megatron", "VeOmni", "ms-swift", "OpenRLHF", "SkyRL"])
def precision(session: nox.Session, engine: str) -> None:
    """Compares policies with themselves in every layout and precision, and writes docs/reference/precision.md.

    Not in CI, which measures one bf16 layout of TRL, verl and Megatron: about ten minutes per engine. Kinds of regions,
    such as TROLL, measure those alone: `nox -s precision -- TROLL`.
    """
    folders = ["tests"]
    if engine == "OpenRLHF":
        folders.append(install_openrlhf(session))
    else:
        install_engine(session, {"TRL": "trl", "ms-swift": "swift", "SkyRL": "skyrl"}.get(engine, "verl"))
    if engine == "SkyRL":
        folders.append("tests/engines/skyrl/python311")
    if engine in ("Megatron", "VeOmni"):
        install_pinned(session, f"verl-{engine.lower()}")
    rows = f"build/precision/{engine}.json"
    kinds, env = session.posargs, {"PYTHONPATH": os.pathsep.join(folders)}
    session.run("python", "-m", "support.precision_layouts", engine, rows, *kinds, env=env)
    session.run("python", "scripts/precision.py", rows)


@nox.session(python="3.11")
def gpu(session: nox.Session) -> None:
    """Runs tests/gpu/run.py without a GPU, each part in the environment that another session made. Not in CI."""
    install_core(session, "test")
    folder = Path(session.virtualenv.location).parent
    homes = {"kernels": "trl_vllm", "trl": "trl", "verl": "verl", "verl-megatron": "verl_megatron"}
    homes["main_ppo"] = "verl_megatron"
    pythons = [f"--python={part}={folder / name / 'bin/python'}" for part, name in homes.items()]
    name_vllm(session)
    session.run("python", "tests/gpu/run.py", "--cpu", *pythons, *session.posargs)


@nox.session(python="3.11")
def sources(session: nox.Session) -> None:
    """Tests engines that no package index has, at the checkouts in the folder $TRUSTRL_SOURCES.

    Not in CI. The folder holds slime, miles and nemo-rl, as far as you have them; the tests of a missing engine are
    skipped. The engines' pages name the commits that we ran.
    """
    folder = Path(session.env.get("TRUSTRL_SOURCES") or os.environ.get("TRUSTRL_SOURCES", "")).resolve()
    install_megatron(session)
    install_pinned(session, "sources")
    session.env["PYTHONPATH"] = os.pathsep.join(str(folder / name) for name in ("slime", "miles", "nemo-rl"))
    session.env["TORCHDYNAMO_DISABLE"] = "1"  # slime and miles compile their losses, which takes longer than the tests
    session.run("pytest", "-rs", *(f"tests/engines/{name}" for name in ("slime", "miles", "nemo_rl")), *session.posargs)


@nox.session(python="3.11")
def losses(session: nox.Session) -> None:
    """Tests regions in the loss code of tinker, Trinity-RFT, RLinf and AReaL, all in one environment."""
    install_engine(session, "losses")
    engines = ("tinker", "trinity", "rlinf", "areal")
    guides = [f"tests/docs/test_docs.py::test_every_block_runs[docs/engines/{name}.md]" for name in engines]
    folders = [f"tests/engines/{name}" for name in engines]
    session.run("pytest", "-n", "2", "--dist", "loadfile", *folders, *session.posargs)
    session.run("pytest", *guides)  # in a separate process: one of them registers, as the tests have
    older = other_release(session, "tinker", "0.36.0")  # its client sends by other methods than 0.38's
    session.run("pytest", "-n", "2", "tests/engines/tinker", env={"PYTHONPATH": older})


@nox.session(python="3.11")
def openrlhf(session: nox.Session) -> None:
    """Tests regions in OpenRLHF: its trainer, a Ray worker, and a run on Ray with vLLM and DeepSpeed on the CPU.

    Not in CI: it installs vLLM's environment, and DeepSpeed compiles its optimizer in the first run.
    """
    session.env["PYTHONPATH"] = install_openrlhf(session)
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/openrlhf.md]"
    session.run("pytest", "tests/engines/openrlhf", guide, *session.posargs)


def install_openrlhf(session: nox.Session) -> str:
    """Installs OpenRLHF in vLLM's environment. Returns the folder of the stubs with which it runs on a CPU."""
    install_engine(session, "trl-vllm")
    install_pinned(session, "openrlhf")
    cpu = {"DS_BUILD_OPS": "0", "DS_ACCELERATOR": "cpu"}
    session.install("--no-deps", "--no-build-isolation", "deepspeed==0.19.6", env=cpu)
    session.env.update({"DS_ACCELERATOR": "cpu", "TORCHDYNAMO_DISABLE": "1", "VLLM_PLUGINS": ""})
    return str(Path("tests/support/openrlhf_on_cpu").resolve())


@nox.session(python="3.11")
def prime_rl(session: nox.Session) -> None:
    """Tests regions in prime-rl's own trainer. Not in CI: TRUSTRL_PRIME_RL names a checkout of prime-rl."""
    checkout = os.environ.get("TRUSTRL_PRIME_RL")
    if not checkout:
        session.skip("TRUSTRL_PRIME_RL must be the path of a checkout of prime-rl, and it is not set.")
    install_engine(session, "trl")  # transformers and accelerate
    install_pinned(session, "prime-rl")
    sources = [str(Path(checkout).resolve() / folder) for folder in ("src", "packages/prime-rl-configs/src")]
    session.env.update({"PYTHONPATH": os.pathsep.join(sources), "TORCHDYNAMO_DISABLE": "1"})
    guide = "tests/docs/test_docs.py::test_every_block_runs[docs/engines/prime-rl.md]"
    session.run("pytest", "tests/engines/prime_rl", guide, *session.posargs)


@nox.session(python="3.11")
def axolotl(session: nox.Session) -> None:
    """Tests regions in axolotl: a run from a YAML file, its refused settings, and parity. Not in CI."""
    install_engine(session, "axolotl")
    session.env["AXOLOTL_DO_NOT_TRACK"] = "1"
    session.run("pytest", *(session.posargs or ("tests/engines/axolotl",)))


@nox.session(python="3.11")
def unsloth(session: nox.Session) -> None:
    """Tests that unsloth's own GRPO trainer is refused with a region. Not in CI. Takes axolotl's TRL."""
    install_engine(session, "axolotl")
    install_pinned(session, "unsloth")
    session.run("pytest", *(session.posargs or ("tests/engines/unsloth",)))


@nox.session(python="3.11")
def swift(session: nox.Session) -> None:
    """Tests regions in ms-swift: its own trainer, and `swift rlhf` from its command line. Not in CI."""
    install_engine(session, "swift")
    session.run("pytest", "-n", "2", "--dist", "loadfile", "tests/engines/swift", *session.posargs)


@nox.session(python="3.11")
def report(session: nox.Session) -> None:
    """Tests reports without torch, and their page in a real Chromium, which is installed if missing."""
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "browser"))
    install(session, "--no-deps", "-e", ".")
    need_chromium(session)
    session.run("pytest", "tests/tools/report", "tests/cli/test_report.py", "tests/cli/test_watch.py", *session.posargs)


def need_chromium(session: nox.Session) -> None:
    """Installs Debian's Chromium if none is found."""
    if shutil.which("chromium") is None:
        session.run("apt-get", "update", "--quiet=2", external=True)
        session.run("apt-get", "install", "--yes", "--quiet=2", "chromium", external=True)


@nox.session(python="3.11")
def docs(session: nox.Session) -> None:
    """Builds the documentation site strictly in build/site, without torch, and opens it in the same Chromium."""
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "docs", "browser"))
    install(session, "--no-deps", "-e", ".")
    need_chromium(session)
    session.run("mkdocs", "build", "--strict", "--site-dir", "build/site", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("pytest", "tests/site", *session.posargs)


@nox.session(python="3.11")
def docs_version(session: nox.Session) -> None:
    """Adds a version of the documentation to the branch gh-pages: `nox -s docs_version -- [--push] 0.2 latest`."""
    install_pinned(session, "docs", LOCKS)
    install(session, "--no-deps", "-e", ".")
    session.env.update({"NO_MKDOCS_2_WARNING": "1", "TRUSTRL_DOCS_VERSIONS": "mike"})
    session.run("mike", "deploy", "--update-aliases", *session.posargs)


@nox.session(python="3.11")
def build(session: nox.Session) -> None:
    """Builds both packages in dist/ and the SBOM in build/sbom, and checks them, as the release workflow does."""
    install_pinned(session, "build", LOCKS)
    shutil.rmtree("dist", ignore_errors=True)
    for source in (".", RIG):
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", source)
    session.run("twine", "check", "--strict", *map(str, sorted(Path("dist").iterdir())))
    session.run("python", "scripts/sbom.py", "--check", "dist", "build/sbom")


@nox.session(python="3.11")
def package(session: nox.Session) -> None:
    """Tests wheels and sdists as users get them: built, checked, installed without source, every extra resolved."""
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "package"))
    session.run("pytest", "tests/package", *session.posargs, env={"TRUSTRL_PACKAGE_TORCH": TORCH})


@nox.session(python="3.11")
def pins(session: nox.Session) -> None:
    """Resolves the wheel with every engine release and extra that the docs name; see scripts/pins.py."""
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "pins"))
    session.run("python", "scripts/pins.py", *session.posargs)


@nox.session(python="3.11")
def newest(session: nox.Session) -> None:
    """Tries the newest release of each engine over its pinned environment; see scripts/newest.py. Not in CI."""
    install(session, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "pins"))
    session.run("python", "scripts/newest.py", *session.posargs)


@nox.session(python="3.11")
def hashes(session: nox.Session) -> None:
    """Writes the hashes of every pinned package; see scripts/environment_hashes.py."""
    install(session, "packaging>=22")
    session.run("python", "scripts/environment_hashes.py", *session.posargs)


@nox.session(python="3.11")
def licenses(session: nox.Session) -> None:
    """Writes docs/reference/licenses.md from what pip resolves for each extra; see scripts/dependencies.py."""
    install(session, "packaging>=22")
    session.run("python", "scripts/dependencies.py", *session.posargs)


@nox.session(python="3.11")
def advisories(session: nox.Session) -> None:
    """Looks up known vulnerabilities of all pinned packages. Exit code 3: no database could be had, nothing checked."""
    install(session, "packaging>=22")
    session.run("python", "scripts/advisories.py", *session.posargs)


@nox.session(python=["3.11", "3.12", "3.13"])
@nox.parametrize("torch", ["2.10.0", "2.15.0"])
def torch_versions(session: nox.Session, torch: str) -> None:
    """Runs the core's tests on the oldest and the newest torch. Each may need 5 GB for CUDA packages."""
    install_torch(session, f"torch=={torch}")
    install(session, *CHECKOUT, *nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), "test"))
    session.env["OMP_NUM_THREADS"] = "1"
    session.run("pytest", "-n", "2", *session.posargs)


@nox.session(python="3.11")
def results(session: nox.Session) -> None:
    """Writes tables, verdicts and figures of all studies, or of those named, from the committed data. CI runs tests."""
    install_core(session, "test")
    for study in session.posargs or RESULTS:
        for command in RESULTS[study]:
            script, *what = command.split()
            session.run("python", f"studies/{study}/{script}", *what)


RESULTS = {
    "01-which-region-wins": ("answers.py", "clipping.py page"),
    "02-which-learns-most": ("world_table.py page", "second_study.py draw", "second_study.py page", "claims.py"),
    "03-which-tokens-masked": (
        "smollm2_masks.py draw", "smollm2_masks.py page", "smollm2_clipping.py draw", "smollm2_clipping.py page",
        "why.py draw",
    ),
    "04-why-mismatch": (
        "smollm2_mismatch.py draw", "smollm2_mismatch.py page", "smollm2_prefill.py page",
        "smollm2_same_tokens.py page", "smollm2_kept.py page", "moe_mismatch.py page",
    ),
    "05-which-statistic": ("proxies.py draw", "proxies.py page"),
    "06-fault-found": ("explained.py page", "found_faults.py page"),
    "07-less-variance": ("score_centering.py page",),
    "09-engines-learn": ("trl_learning.py draw", "trl_smollm2.py draw", "verl_learning.py draw"),
    "11-losses-conform": ("conformance.py page",),
}  # fmt: skip
"""Commands that write pages and figures from committed data, by study."""


@nox.session(python="3.11")
def vocabulary(session: nox.Session) -> None:
    """Compares the vocabulary pass with three bare products and other libraries' heads. Half an hour; not in CI."""
    install_torch(session)
    install(session, "--no-deps", "-r", "benchmarks/peers-requirements.txt")
    install(session, "--no-deps", "-e", ".")
    session.run("python", "benchmarks/vocabulary.py", *session.posargs)
    session.run("python", "benchmarks/vocabulary_figures.py")


@nox.session(python="3.11")
def fuzz(session: nox.Session) -> None:
    """Damages 2,100 inputs, then 20,000 behind repaired checksums, and fails on a traceback, a hang or another answer.

    Install tensorboard and wandb into the environment to compare with them as well.
    """
    install_core(session, "test")
    session.env.update({"OMP_NUM_THREADS": "1", "PYTHONPATH": "tests"})
    session.run(
        "python", "-m", "fuzz.harness", *(session.posargs or ("--cases", "2100", "--out", "docs/data/fuzz.json"))
    )
    if not session.posargs:
        session.run("python", "-m", "fuzz.repaired", "--cases", "20000", "--out", "docs/data/fuzz_repaired.json")
        session.run("pytest", "tests/runs/test_limits.py", "-m", "long")


@nox.session(python="3.11")
def mutation(session: nox.Session) -> None:
    """Runs mutation testing on a seeded sample in under ten minutes. Not in CI; see docs/mutation.md."""
    install_core(session, "mutation")
    session.run("python", "scripts/mutate.py", *session.posargs)


@nox.session(python="3.11")
def cost(session: nox.Session) -> None:
    """Measures the cost of a region relative to PPO-clip's plain loss."""
    install_core(session)
    session.run("python", "benchmarks/region_cost.py", *session.posargs)
