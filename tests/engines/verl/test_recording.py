"""Recorded tokens of a real verl worker are what the loss decided, and recording changes nothing."""

import pytest

pytest.importorskip("verl")
pytest.importorskip("pyarrow")

import torch
from verl.workers.engine_workers import TrainingWorker

from support import regions_oracle as oracle, verl_world as world
from support.verl_launch import on_ranks
from trustrl import preset
from trustrl.engines.common.seam import version_of
from trustrl.engines.verl import RegionWorker, check_settings
from trustrl.engines.verl.verl_config import recording_of
from trustrl.errors import ConfigError
from trustrl.recording import QuantileAbove, Recording, read

RANKS = 2


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")
def test_each_rank_writes_what_its_loss_decided_and_gradients_stay_as_they_are(tmp_path):
    model = oracle.tiny_model(tmp_path)
    on_ranks("verl_recording.py", RANKS, model, tmp_path)
    every = read(tmp_path / "records")
    assert trained_steps(every) == [3, 4]  # the worker's first two were not recorded
    names = []
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"found-{rank}", weights_only=False)
        for off, on in zip(found["off"]["gradients"], found["on"]["gradients"], strict=True):
            assert torch.equal(off, on)
            assert off.norm() > 0
        here = every["rank"] == rank
        seen = found["on"]["seen"]
        assert len(seen["kept"]) == here.sum() > 0
        for name, expected in seen.items():
            assert torch.equal(every[name][here], expected.to(every[name].dtype)), name
        assert 0 < every["kept"][here].sum() < here.sum()
        for step in (3, 4):
            now = here & (every["step"] == step)
            names.append(set(every["sequence"][now].tolist()))
            for name in names[-1]:  # once an epoch, in whatever update
                assert (every["update"][now & (every["sequence"] == name)].unique() // 3).tolist() == [0, 1]
    assert len(set.union(*names)) == sum(map(len, names))
    (dump,) = (tmp_path / "records").glob("dump-*")  # the trigger rests at the second step
    assert trained_steps(read(dump)) == [3]
    assert sorted(path.name for path in dump.glob("*.json")) == ["trigger.rank-0000.json", "trigger.rank-0001.json"]


def trained_steps(records):
    return records["step"].unique().tolist()


@pytest.mark.parametrize(
    ("folder", "done"),
    [
        pytest.param("checkpoints/global_step_12/actor", 12, id="as verl names them"),
        pytest.param(
            "global_step_3-again/checkpoints/global_step_120/actor", 120, id="in a folder with a name like it"
        ),
        pytest.param("weights/actor", 0, id="weights of nobody's run"),
        pytest.param(None, 0, id="a run that begins"),
    ],
)
def test_a_resumed_worker_counts_on_from_its_checkpoint(folder, done, monkeypatch, tmp_path):
    """verl tells its workers no step. The loading itself is verl's, and left out."""
    worker = object.__new__(RegionWorker)
    worker._rank, worker._region = 0, preset("dppo-binary-tv")
    monkeypatch.setattr(TrainingWorker, "load_checkpoint", lambda self, local_path: None)
    worker.load_checkpoint(folder and str(tmp_path / folder))
    assert worker._num_steps == done


def test_settings_are_looked_at_before_the_start():
    policy_loss = {"loss_mode": "trustrl-dppo-binary-tv", "recording": {"folder": "records", "smaple": 1.0}}
    rollout = {"calculate_log_probs": True}
    with pytest.raises(ConfigError, match=r"recording has no setting 'smaple'. Did you mean 'sample'"):
        check_settings({"actor_rollout_ref": {"actor": {"policy_loss": policy_loss}, "rollout": rollout}})


def test_settings_come_from_verls_command_line():
    from omegaconf import OmegaConf

    given = OmegaConf.from_dotlist(
        ["recording.folder=records", "recording.triggers=[{kind: quantile-above, of: divergence, level: 0.3}]"]
    )
    triggers = (QuantileAbove(of="divergence", level=0.3),)
    assert recording_of(given) == Recording(folder="records", triggers=triggers)
    assert recording_of(OmegaConf.create({})) is None


def test_recording_outside_our_workers_is_refused():
    settings = {"recording": {"folder": "records"}}
    config = world.actor("trustrl-dppo-binary-tv", policy_loss=settings)
    b = world.batch()
    loss = world.get_policy_loss_fn("trustrl-dppo-binary-tv")
    with pytest.raises(ConfigError, match=r"policy_loss.recording must be null outside trustrl's workers"):
        loss(b.old_log_prob, b.log_prob, b.advantages, b.response_mask, config=config)
