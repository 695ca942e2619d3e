"""Manifests of checkpoints: what damage they show, and whose they are."""

import json
import os
import pathlib
import pickle
import shutil

import pytest

from support.checkpoint_folders import OURS, checkpoint, flip, truncate
from trustrl.errors import ConfigError
from trustrl.runner.manifests import MANIFEST, Seal, fault_of, is_marked, write_manifest
from trustrl.runner.signing import Key

FILES = ["model.safetensors", "trainer_state.json", "optimizer.pt", "deeper/rng_state.pth"]
STRANGER = Seal(Key(bytes([1] * 32)), OURS.run)
OTHER_RUN = Seal(OURS.key, "b" * 32)


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "said"),
    [(os.unlink, "is missing"), (truncate, "bytes, but its manifest lists"), (flip, "has changed since")],
    ids=["missing", "cut off", "one bit flipped"],
)
@pytest.mark.parametrize("seal", [OURS, None], ids=["ours", "trusted"])
def test_a_damaged_file_of_a_checkpoint_with_a_manifest_is_named(tmp_path, name, damage, said, seal):
    made = checkpoint(tmp_path)
    assert fault_of(made, seal) is None
    damage(made / name)
    assert fault_of(made, seal).startswith(name)
    assert said in fault_of(made, seal)


@pytest.mark.parametrize("name", FILES)
def test_a_cut_off_file_is_found_without_a_manifest_too(tmp_path, name):
    made = checkpoint(tmp_path, seal=None)
    assert fault_of(made, None) is None
    (made / MANIFEST).touch()  # as trustrl 0.1.0 did
    assert fault_of(made, None) is None
    truncate(made / name)
    assert fault_of(made, None).startswith(name)


@pytest.mark.parametrize("marked", [True, False], ids=["TRL's mark", "no mark, as on verl"])
def test_a_checkpoint_of_release_0_1_0_is_refused_by_name_and_left_where_it_is(tmp_path, marked):
    made = checkpoint(tmp_path, seal=None)
    if marked:
        (made / MANIFEST).touch()
    with pytest.raises(ConfigError, match=r"no manifest, as trustrl 0\.1\.0 left it: .*checkpoint-8\..*--trust-check"):
        fault_of(made, OURS)
    assert is_marked(made) is marked
    assert made.is_dir()


ENTRY = '{"bytes": 1, "sha256": "0"}'


@pytest.mark.parametrize(
    "text",
    [
        "{", "[]", '{"version": 1}', '{"version": 1, "name": "checkpoint-8", "files": {"a": 1}}',
        '{"version": 2, "name": "checkpoint-8", "files": {}}', '{"version": 1, "name": 8, "files": {}}', "[" * 9999,
        '{"version": 1, "name": "checkpoint-8", "files": {"a": {"bytes": true, "sha256": "0"}}}',
        f'{{"version": 1, "name": "checkpoint-8", "files": {{"a": {ENTRY}}}, "hmac": 3}}',
        f'{{"version": 1, "name": "checkpoint-8", "files": {{"a": {ENTRY}}}, "more": 3}}', '{"a": ' * 9999,
    ],
)  # fmt: skip
@pytest.mark.parametrize("seal", [OURS, None], ids=["ours", "trusted"])
def test_a_damaged_manifest_is_a_fault(tmp_path, text, seal):
    made = checkpoint(tmp_path)
    (made / MANIFEST).write_text(text)
    assert "is damaged" in fault_of(made, seal)


def test_every_flipped_bit_of_a_manifest_is_noticed(tmp_path):
    made = checkpoint(tmp_path)
    whole = (made / MANIFEST).read_bytes()
    for at in range(len(whole)):
        (made / MANIFEST).write_bytes(whole[:at] + bytes([whole[at] ^ 1 << at % 7]) + whole[at + 1 :])
        if json_of(made) == json.loads(whole):
            continue  # white space
        try:
            assert fault_of(made, OURS) is not None, at
        except ConfigError as error:
            assert "signed" in str(error), at


def json_of(made):
    try:
        return json.loads((made / MANIFEST).read_bytes().decode())
    except ValueError:
        return None


def test_a_renamed_checkpoint_is_not_taken_for_another_step(tmp_path):
    moved = checkpoint(tmp_path, 8).rename(tmp_path / "checkpoint-100")
    assert fault_of(moved, OURS) == "its manifest belongs to 'checkpoint-8'"


def test_a_complete_checkpoint_of_another_installation_is_refused_with_both_keys_and_what_to_do(tmp_path):
    made = checkpoint(tmp_path, seal=STRANGER)
    assert fault_of(made, STRANGER) is None, "complete and consistent"
    with pytest.raises(ConfigError) as caught:
        fault_of(made, OURS)
    said = str(caught.value)
    for part in (STRANGER.key.name, OURS.key.name, str(made), "verl and DeepSpeed unpickle it", "TRUSTRL_KEY_FILE"):
        assert part in said
    assert said.endswith("add --trust-checkpoint.")
    assert fault_of(made, None) is None


def test_a_manifest_that_claims_our_key_without_having_it_is_a_fault(tmp_path):
    made = checkpoint(tmp_path, seal=STRANGER)
    written = json.loads((made / MANIFEST).read_text()) | {"key": OURS.key.name}
    (made / MANIFEST).write_text(json.dumps(written))
    assert fault_of(made, OURS) == f"its manifest, {MANIFEST}, has changed since it was signed"


def test_a_consistent_manifest_without_a_signature_is_refused(tmp_path):
    made = checkpoint(tmp_path)
    written = json.loads((made / MANIFEST).read_text())
    for name in ("hmac", "key"):
        del written[name]
    (made / MANIFEST).write_text(json.dumps(written))
    with pytest.raises(ConfigError, match="an unsigned manifest"):
        fault_of(made, OURS)
    assert fault_of(made, None) is None


def test_a_file_that_was_changed_with_its_entry_in_the_manifest_is_noticed(tmp_path):
    made, other = checkpoint(tmp_path), checkpoint(tmp_path / "other", seal=None)
    flip(other / "optimizer.pt")
    write_manifest(other, STRANGER)
    shutil.copy(other / "optimizer.pt", made / "optimizer.pt")
    written, forged = (json.loads((one / MANIFEST).read_text()) for one in (made, other))
    written["files"]["optimizer.pt"] = forged["files"]["optimizer.pt"]
    (made / MANIFEST).write_text(json.dumps(written))
    assert fault_of(made, None) is None, "sizes and hashes agree"
    assert "has changed since it was signed" in fault_of(made, OURS)


def test_a_checkpoint_of_another_run_of_the_same_user_is_refused(tmp_path):
    made = checkpoint(tmp_path, seal=OTHER_RUN)
    with pytest.raises(ConfigError, match=r"that you wrote in another run: .*--trust-checkpoint"):
        fault_of(made, OURS)
    assert fault_of(made, None) is None


@pytest.mark.parametrize("name", ["notes.txt", "deeper/pytorch_model.bin", "scaler.pt", "trustrl_complete.pt"])
def test_a_file_that_the_manifest_does_not_list_is_refused_by_name(tmp_path, name):
    made = checkpoint(tmp_path)
    executed = tmp_path / "executed"
    (made / name).write_bytes(pickle.dumps(Planted(executed)))
    with pytest.raises(ConfigError, match=f"{name}, which its manifest does not list.*Move that file away"):
        fault_of(made, OURS)
    assert fault_of(made, None) is None
    assert not executed.exists()
    pickle.loads((made / name).read_bytes())
    assert executed.exists(), "the file would have been executed"


class Planted:
    """Writes a file when it is unpickled."""

    def __init__(self, file):
        self.file = file

    def __reduce__(self):
        return pathlib.Path.touch, (self.file,)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/tmp", target_is_directory=True)])
def test_neither_a_fifo_nor_a_linked_directory_hides_from_the_manifest(tmp_path, make):
    made = checkpoint(tmp_path)
    make(made / "deeper" / "extra")
    with pytest.raises(ConfigError, match="deeper/extra, which its manifest does not list"):
        fault_of(made, OURS)


def test_a_fifo_in_the_place_of_a_file_or_of_the_manifest_does_not_block(tmp_path):
    made = checkpoint(tmp_path)
    (made / "optimizer.pt").unlink()
    os.mkfifo(made / "optimizer.pt")
    assert fault_of(made, OURS) == "optimizer.pt is missing"
    (made / MANIFEST).unlink()
    os.mkfifo(made / MANIFEST)
    assert fault_of(made, OURS) == f"{MANIFEST} cannot be read: not a regular file"


def test_names_of_files_do_not_reach_the_terminal_as_they_are(tmp_path):
    made = checkpoint(tmp_path)
    (made / "\x1b[2J").touch()
    with pytest.raises(ConfigError) as caught:
        fault_of(made, OURS)
    assert "\x1b" not in str(caught.value)
    assert r"'\x1b[2J', which its manifest does not list" in str(caught.value)


def test_what_a_killed_write_of_the_manifest_leaves_behind_is_not_a_foreign_file(tmp_path):
    made = checkpoint(tmp_path)
    (made / f".{MANIFEST}.123").write_text("{")
    assert fault_of(made, OURS) is None


def test_the_signature_is_hmac_sha256_of_canonical_json(tmp_path):
    """Written out by hand, so that a later version cannot change it without noticing."""
    import hashlib
    import hmac

    made = checkpoint(tmp_path)
    written = json.loads((made / MANIFEST).read_text())
    signature = written.pop("hmac")
    assert written.keys() == {"version", "name", "run", "key", "files", "run_files"}
    assert (
        written["files"]["optimizer.pt"]["sha256"] == hashlib.sha256((made / "optimizer.pt").read_bytes()).hexdigest()
    )
    text = b"trustrl checkpoint manifest\n" + json.dumps(written, sort_keys=True, separators=(",", ":")).encode()
    assert signature == hmac.new(bytes(32), text, "sha256").hexdigest()


def test_a_manifest_is_replaced_only_after_files_and_folders_have_reached_the_disk(tmp_path, monkeypatch):
    made, done = checkpoint(tmp_path, seal=None), []
    monkeypatch.setattr(os, "fsync", lambda handle: done.append(os.readlink(f"/proc/self/fd/{handle}")))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda *both: (done.append("replace"), replace(*both)))
    write_manifest(made, OURS)
    at = done.index("replace")
    before, after = {pathlib.Path(one) for one in done[:at]}, {pathlib.Path(one) for one in done[at + 1 :]}
    assert {made / name for name in FILES} | {made, made / "deeper"} <= before
    assert any(one.name.startswith(f".{MANIFEST}") for one in before)
    assert after == {made, tmp_path}
