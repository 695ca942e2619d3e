"""Recorded tokens are what the loss decided, and recording changes nothing."""

import json

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

import torch

import trustrl
from support import trl_world as world
from trustrl.engines.trl import TrustRegionGRPOTrainer
from trustrl.errors import ConfigError
from trustrl.recording import NonFinite, QuantileAbove, Recording, read

SCHEDULE = {
    "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 8,
    "learning_rate": 1e-2, "per_device_train_batch_size": 4, "logging_steps": 1,
}  # fmt: skip
ROLLOUTS, UPDATES_OF_EACH, SEQUENCES = 2, 2, 16


def trained(folder, region, recording):
    settings = world.settings(output_dir=str(folder), **SCHEDULE)
    given = {"region": region, "behavior": "trainer", "recording": recording, "metrics": "all"}
    trainer = world.trainer_of(TrustRegionGRPOTrainer, world.tiny_model(), settings, **given)
    trainer.train()
    return trainer


@pytest.mark.parametrize("name", ["dppo-binary-tv", "dppo-topk-tv"])
def test_records_of_real_steps_are_what_the_loss_decided(name, tmp_path, monkeypatch):
    region, seen = trustrl.preset(name), world.spy(monkeypatch)
    triggers = (QuantileAbove(of="divergence", quantile=1.0, level=0.01, at_most_every=5),)
    recording = Recording(folder=tmp_path / "records", sample=1.0, topk=True, ring_steps=3, triggers=triggers)
    trained(tmp_path, region, recording)
    found = read(tmp_path / "records")
    assert len(seen) == 16  # eight steps of two micro-batches
    on = [rollout.in_loss for _, _, rollout in seen]

    def joined(values):
        return torch.cat([x.detach()[mask] for x, mask in zip(values, on, strict=True)]).float()

    expected = {
        "policy_logp": [policy.logp for _, policy, _ in seen],
        "behavior_logp": [rollout.behavior_logp for _, _, rollout in seen],
        "token_id": [rollout.token_ids for _, _, rollout in seen],
        "advantage": [rollout.advantage for _, _, rollout in seen],
        "kept": [out.decision.keep for out, _, _ in seen],
        "weight": [out.decision.weight for out, _, _ in seen],
        "divergence_lower": [out.decision.divergence.lower for out, _, _ in seen],
        "divergence_upper": [out.decision.divergence.upper for out, _, _ in seen],
        "entropy": [policy.entropy for _, policy, _ in seen],
        "sampler_version": [rollout.version for _, _, rollout in seen],
        "step": [torch.full(mask.shape, at // 2) for at, mask in enumerate(on)],
    }
    if region.needs().topk:
        expected["topk_ids"] = [rollout.topk.ids for _, _, rollout in seen]
    for column, values in expected.items():
        assert torch.equal(found[column].float(), joined(values)), column
    assert 0 < (~found["kept"]).sum() < len(found["kept"])
    assert trustrl.config_from_dict(found.region) == region

    # A sequence has one name, at each of its updates and nowhere else.
    names = found["sequence"].unique()
    assert len(names) == ROLLOUTS * SEQUENCES
    for name in names:
        here = found["sequence"] == name
        assert len(found["step"][here].unique()) == UPDATES_OF_EACH
        assert len(found["sampler_version"][here].unique()) == 1
        tokens = [found["token_id"][here & (found["step"] == step)] for step in found["step"][here].unique()]
        assert torch.equal(*tokens)

    dumps = sorted((tmp_path / "records").glob("dump-*"))
    assert [dump.name for dump in dumps] == ["dump-00000001", "dump-00000006"]  # the first that moved, and 5 later
    about = json.loads((dumps[1] / "trigger.rank-0000.json").read_text())
    assert about["fired"][0]["found"]["value"] > 0.01
    last = read(dumps[1])
    assert last["step"].unique().tolist() == [4, 5, 6]
    assert torch.equal(last["policy_logp"], found["policy_logp"][(found["step"] >= 4) & (found["step"] <= 6)])


def test_recording_changes_no_bit_of_training(tmp_path):
    region = trustrl.preset("dppo-binary-tv")
    recording = Recording(folder=tmp_path / "records", sample=0.5, triggers=(NonFinite(),))
    on, off = (trained(tmp_path, region, given) for given in (recording, None))
    assert list((tmp_path / "records").glob("*.parquet"))
    before = dict(world.tiny_model().named_parameters())
    other = dict(on.model.named_parameters())
    for name, p in off.model.named_parameters():
        assert torch.equal(p, other[name]), name
    assert any(not torch.equal(p, before[name]) for name, p in off.model.named_parameters())
    ours, theirs = (
        [{k: x for k, x in entry.items() if k.startswith("trustrl/")} for entry in t.state.log_history]
        for t in (on, off)
    )
    assert ours == theirs


def test_evaluation_is_not_recorded(tmp_path):
    recording = Recording(folder=tmp_path / "records", sample=1.0)
    model = world.tiny_model()
    trainer = world.ours(trustrl.preset("dppo-binary-tv"), model, given={"recording": recording})
    inputs = world.batch(model)
    with torch.no_grad():
        world_loss = trainer.model.eval() and trainer._compute_loss(trainer.model, dict(inputs))
    assert world_loss.isfinite()
    assert [path.name for path in (tmp_path / "records").iterdir()] == ["run.json"]


def test_another_object_is_refused_before_the_model_is_loaded(tmp_path):
    with pytest.raises(ConfigError, match=r"recording must be a trustrl.recording.Recording, got 'records'"):
        world.ours(trustrl.preset("dppo-binary-tv"), given={"recording": "records"})
