"""Checkpoint directories: which one is resumed from, which ones are set aside, and whom they belong to."""

import os
import stat

import pytest

from support.checkpoint_folders import OURS, checkpoint, flip, truncate
from trustrl.errors import ConfigError, EngineError
from trustrl.runner.checkpoints import (
    Survey,
    checkpoints_in,
    only_the_owner_writes,
    refuse_foreign,
    rotate,
    set_aside,
)
from trustrl.runner.manifests import fault_of, is_marked


def survey_of(folder):
    return Survey(checkpoints_in(folder, "checkpoint-"), is_marked, lambda one: fault_of(one, OURS))


def test_only_real_directories_with_digits_alone_are_checkpoints(tmp_path):
    for name in (
        "checkpoint-4",
        "checkpoint-12",
        "checkpoint-best",
        "checkpoint-8-best",
        "checkpoint-",
        "xcheckpoint-3",
    ):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-5").write_text("a file")
    (tmp_path / "checkpoint-6").symlink_to(tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-07").mkdir()
    (tmp_path / "checkpoint-٣").mkdir()
    assert list(checkpoints_in(tmp_path, "checkpoint-")) == [12, 4]
    assert checkpoints_in(tmp_path / "nowhere", "checkpoint-") == {}


def test_the_newest_whole_checkpoint_is_chosen_and_newer_ones_are_renamed_with_a_word(tmp_path):
    checkpoint(tmp_path, 4)
    whole = checkpoint(tmp_path, 8)
    flip(checkpoint(tmp_path, 12) / "optimizer.pt")
    checkpoint(tmp_path, 16, seal=None)
    (tmp_path / "set-aside-checkpoint-12").mkdir()
    (tmp_path / "checkpoint-best").mkdir()
    survey = survey_of(tmp_path)
    survey.refuse_if_none_is_left()
    assert (survey.step, survey.chosen) == (8, whole)
    said = []
    survey.set_aside(said.append)
    assert said == [
        "warning: checkpoint-16 is not used: it was not complete when the run stopped. It is now "
        "set-aside-checkpoint-16. Delete it if you do not need it.",
        "warning: checkpoint-12 is not used: optimizer.pt has changed since it was written. It is now "
        "set-aside-checkpoint-12.2. Delete it if you do not need it.",
    ]
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "checkpoint-4", "checkpoint-8", "checkpoint-best", "set-aside-checkpoint-12", "set-aside-checkpoint-12.2",
        "set-aside-checkpoint-16",
    ]  # fmt: skip


def test_a_run_killed_during_its_first_save_starts_again(tmp_path):
    checkpoint(tmp_path, 4, seal=None)
    survey = survey_of(tmp_path)
    survey.refuse_if_none_is_left()
    assert (survey.step, survey.chosen) == (0, None)


def test_damaged_checkpoints_with_no_whole_one_stop_the_run_before_anything_is_renamed(tmp_path):
    for step in (4, 8):
        truncate(checkpoint(tmp_path, step) / "model.safetensors")
    survey = survey_of(tmp_path)
    with pytest.raises(
        EngineError, match=r"(?s)No intact checkpoint.*checkpoint-8: model.*checkpoint-4: model.*Restore"
    ):
        survey.refuse_if_none_is_left()
    assert sorted(checkpoints_in(tmp_path, "checkpoint-")) == [4, 8]


def test_setting_aside_overwrites_nothing(tmp_path):
    (tmp_path / "set-aside-checkpoint-8").symlink_to(tmp_path / "nowhere")
    assert set_aside(checkpoint(tmp_path)).name == "set-aside-checkpoint-8.2"


def test_rotation_goes_by_step_and_spares_every_other_name(tmp_path):
    for step in (20, 4, 8, 12):  # in another order than their steps
        checkpoint(tmp_path, step)
    for name in ("checkpoint-best", "checkpoint-4-best"):
        (tmp_path / name).mkdir()
        os.utime(tmp_path / name, (0, 0))
    rotate(tmp_path, "checkpoint-", 2, protected=str(tmp_path / "checkpoint-4"))
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        "checkpoint-12", "checkpoint-20", "checkpoint-4", "checkpoint-4-best", "checkpoint-best",
    ]  # fmt: skip


@pytest.fixture
def owned(tmp_path):
    """(run, checkpoint) that only this user can write."""
    with only_the_owner_writes():
        made = checkpoint(tmp_path / "run" / "checkpoints")
    return tmp_path / "run", made


PLACES = [
    "run", "run/checkpoints", "run/checkpoints/checkpoint-8", "run/checkpoints/checkpoint-8/deeper",
    "run/checkpoints/checkpoint-8/optimizer.pt", "run/checkpoints/checkpoint-8/deeper/rng_state.pth",
    "run/checkpoints/latest.txt",
]  # fmt: skip


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("bit", "who"), [(stat.S_IWGRP, "its group"), (stat.S_IWOTH, "everybody")])
def test_a_place_that_others_can_write_makes_a_checkpoint_foreign(owned, tmp_path, place, bit, who):
    run, made = owned
    (run / "checkpoints" / "latest.txt").write_text("8")
    refuse_foreign(run, made)
    (tmp_path / place).chmod((tmp_path / place).stat().st_mode | bit)
    with pytest.raises(ConfigError, match=f"{place} is writable by {who}.*--trust-checkpoint"):
        refuse_foreign(run, made)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("place", PLACES[:-1])
def test_a_place_of_another_user_makes_a_checkpoint_foreign_to_root_as_well(owned, tmp_path, place):
    run, made = owned
    os.chown(tmp_path / place, 12345, -1)
    with pytest.raises(ConfigError, match=f"{place} belongs to the user with id 12345, but your id is 0"):
        refuse_foreign(run, made)


def test_a_link_in_a_checkpoint_makes_it_foreign(owned, tmp_path):
    run, made = owned
    (tmp_path / "elsewhere").write_bytes(b"")
    (made / "deeper" / "scheduler.pt").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"scheduler\.pt is a symbolic link"):
        refuse_foreign(run, made)


def test_checkpoints_may_be_a_link_to_another_disk_whose_target_is_checked(owned, tmp_path):
    run, made = owned
    disk = tmp_path / "disk"
    (run / "checkpoints").rename(disk)
    (run / "checkpoints").symlink_to(disk)
    refuse_foreign(run, made)
    disk.chmod(0o777)
    with pytest.raises(ConfigError, match=f"{disk} is writable by everybody"):
        refuse_foreign(run, made)


def test_files_of_a_run_are_not_writable_by_others_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        with only_the_owner_writes():
            (tmp_path / "within").touch()
        (tmp_path / "after").touch()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "within").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "after").stat().st_mode) == 0o666
