"""Damaged files: cut at many lengths, or with bytes changed. Each is read in part with a fault, or refused in a sentence."""

import random
import warnings

import pytest

from support.run_files import unpacked
from support.run_folders import run_folder
from trustrl.errors import ConfigError, RecordError, TrustRLWarning
from trustrl.runs.open_run import open_run

FILES = {
    "trainer state": ("trl-1.16.0", "trainer_state.json"),
    "completions": ("trl-1.16.0", "completions/completions_00001.parquet"),
    "events": ("trl-1.16.0", "runs/*/events*"),
    "file logger": ("verl-0.9.1", "metrics.jsonl"),
    "console log": ("verl-0.9.1", "console.log"),
    "dump": ("verl-0.9.1", "rollouts/1.jsonl"),
    "configuration": ("verl-0.9.1", "hydra/.hydra/config.yaml"),
    "wandb": ("wandb-0.31.0", "*/run-*.wandb"),
    "trackio": ("trackio-0.43.0", "tiny-project.db"),
    "mlflow": ("mlflow-3.17.2", "mlflow.db"),
    "mlflow file": ("mlflow-3.17.2", "mlruns/*/*/metrics/loss"),
}
CUTS, FLIPS = 24, 24


def cut(data, at):
    return data[: at * len(data) // CUTS]


def flipped(data, seed):
    """The data with one to eight random bytes changed."""
    draw = random.Random(seed)
    out = bytearray(data)
    for _ in range(draw.choice((1, 1, 2, 8))):
        out[draw.randrange(len(out))] ^= draw.randrange(1, 256)
    return bytes(out)


def read(path):
    """The run and its completions, or None if it is refused. Any other error fails the test."""
    try:
        run = open_run(path)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            found = list(run.completions())
    except (ConfigError, RecordError) as error:
        assert str(error).strip()
        return None
    assert all(issubclass(one.category, TrustRLWarning) for one in said)
    assert all(isinstance(row["step"], int) for row in run.rows)
    assert all(value is None or isinstance(value, (int, float)) for row in run.rows for value in row.values())
    assert all("accuracy" in one for one in run.evaluations)
    return run, found, [str(one.message) for one in said]


@pytest.mark.parametrize("spoil", [cut, flipped], ids=["cut", "flipped"])
@pytest.mark.parametrize("kind", FILES)
def test_a_damaged_file_is_read_in_part_or_refused(kind, spoil, tmp_path):
    name, pattern = FILES[kind]
    (file,) = unpacked(name, tmp_path).glob(pattern)
    data = file.read_bytes()
    if name.startswith("verl") and kind != "configuration":
        (tmp_path / "hydra/.hydra/config.yaml").unlink()  # slow to parse
    for at in range(CUTS if spoil is cut else FLIPS):
        file.write_bytes(spoil(data, at))
        if kind != "mlflow file":
            read(file)
        if at % 8 == 0:
            read(tmp_path / "mlruns" if kind == "mlflow file" else file.parent if kind == "mlflow" else tmp_path)


@pytest.mark.parametrize("kind", ["file logger", "events", "wandb", "dump"])
def test_a_cut_is_never_silent(kind, tmp_path):
    """A file that ends inside a record has a fault, and no row that the whole file does not have."""
    name, pattern = FILES[kind]
    (file,) = unpacked(name, tmp_path).glob(pattern)
    data = file.read_bytes()
    whole, everything, _ = read(file)
    cuts = [len(data) - 3, *(len(data) * at // 40 + 1 for at in range(1, 40))]
    partial = 0
    for at in cuts:
        file.write_bytes(data[:at])
        found = read(file)
        if found is None:
            continue
        run, completions, _ = found
        known = {row["step"]: row for row in whole.rows}
        for one in whole.evaluations:
            known[one["step"]] = {**one, **known.get(one["step"], {})}
        for row in run.rows:
            assert all(known[row["step"]][name] == value for name, value in row.items())
        assert all(one in everything for one in completions)
        lost = sum(map(len, run.rows)) < sum(map(len, whole.rows)) or len(completions) < len(everything)
        if lost and not data[:at].endswith(b"\n") and not _between_records(kind, data[:at], whole):
            assert run.faults, at
            partial += 1
    assert partial > 10


def _between_records(kind, data, whole):
    """True if an event file or W&B log happens to end where a record does: nothing tells it from a shorter one."""
    if kind == "events":
        at = 0
        while at < len(data):
            at += 16 + int.from_bytes(data[at : at + 8], "little")
        return at == len(data)
    if kind == "wandb":
        at = 7
        while at < len(data):
            at += 7 + int.from_bytes(data[at + 4 : at + 6], "little")
        return at == len(data)
    return False


@pytest.mark.parametrize("kind", ["events", "wandb"])
def test_a_changed_byte_is_caught_by_the_checksum(kind, tmp_path):
    name, pattern = FILES[kind]
    (file,) = unpacked(name, tmp_path).glob(pattern)
    data = file.read_bytes()
    for at in range(8, len(data), len(data) // 60):
        changed = bytearray(data)
        changed[at] ^= 0x55
        file.write_bytes(bytes(changed))
        found = read(file)
        assert found is None or found[0].faults, at


@pytest.mark.parametrize("name", ["recipe.toml", "metrics.jsonl", "evaluation.jsonl", "result.json"])
@pytest.mark.parametrize("spoil", [cut, flipped], ids=["cut", "flipped"])
def test_a_damaged_run_directory_is_read_in_part_or_refused(name, spoil, tmp_path):
    file = run_folder(tmp_path / "run") / name
    data = file.read_bytes()
    for at in range(CUTS):
        file.write_bytes(spoil(data, at))
        read(tmp_path / "run")
