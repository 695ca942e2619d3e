"""A stock `GRPOTrainer` with `record(trainer)` trains bit for bit as without it, and the record agrees with TRL's log."""

import subprocess
import sys
import time
from uuid import uuid4

import pytest

pytest.importorskip("trl")
pytest.importorskip("pyarrow")

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import GRPOTrainer

import trustrl
from support import trl_world as world
from support.record_names import part_name
from support.rendezvous import own_environment, python_path
from trustrl import regions
from trustrl.engines.trl import TrustRegionGRPOTrainer, record
from trustrl.errors import ConfigError, TrustRLWarning
from trustrl.recording import Recorder, Recording, rank_writer, read, read_run, read_sequences, read_texts, uploads

UPDATES_PER_ROLLOUT = 4
SCHEDULE = {
    "num_iterations": 2, "steps_per_generation": 4, "gradient_accumulation_steps": 2, "max_steps": 8,
    "learning_rate": 1e-2, "per_device_train_batch_size": 4, "logging_steps": 1,
}  # fmt: skip
TIMES = ("step_time", "runtime", "per_second")


class EachStep(TrainerCallback):
    """Keeps gradients and weights of every step."""

    def __init__(self):
        self.gradients, self.weights = [], []

    def on_pre_optimizer_step(self, args, state, control, model=None, **_):
        self.gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})

    def on_step_end(self, args, state, control, model=None, **_):
        self.weights.append({name: p.detach().clone() for name, p in model.named_parameters()})


def trained(folder, recorded=None, cls=GRPOTrainer, **more):
    """A trainer after its run, with every step's gradients and weights; recorded if settings for that are given."""
    trainer = world.trainer_of(cls, world.tiny_model(), world.settings(output_dir=str(folder), **SCHEDULE | more))
    trainer.seen = EachStep()
    trainer.add_callback(trainer.seen)
    if recorded is not None:
        record(trainer, **recorded)
    trainer.train()
    return trainer


def same_training(a, b):
    """True if two runs agree in every bit of their gradients, weights, and logs."""
    pairs = [*zip(a.seen.gradients, b.seen.gradients, strict=True), *zip(a.seen.weights, b.seen.weights, strict=True)]
    tensors = all(torch.equal(one[name], other[name]) for one, other in pairs for name in one)
    return tensors and logged(a) == logged(b)


def logged(trainer):
    return [
        {key: value for key, value in entry.items() if not key.endswith(TIMES)} for entry in trainer.state.log_history
    ]


@pytest.fixture(scope="module")
def without(tmp_path_factory):
    trainer = trained(tmp_path_factory.mktemp("without"))
    assert len(trainer.seen.gradients) == len(trainer.seen.weights) == SCHEDULE["max_steps"]
    assert any(x.any() for x in trainer.seen.gradients[0].values())
    return trainer


OBSERVED = regions.PPO(regions.Ratio(max_decrease=0.2, max_increase=0.2), anchor="proximal")
"""TRL's own clip."""


@pytest.mark.parametrize(
    "settings", [{"sample": 1.0}, {}, {"sample": 1.0, "region": OBSERVED}], ids=["all", "sampled", "observed"]
)
def test_the_record_changes_no_bit_of_training(settings, without, tmp_path):
    assert same_training(trained(tmp_path, settings), without)


def test_the_comparison_would_see_one_random_number(without, tmp_path, monkeypatch):
    add = Recorder.add

    def noisy(self, *args, **kwargs):
        torch.rand(1)
        return add(self, *args, **kwargs)

    monkeypatch.setattr(Recorder, "add", noisy)
    assert not same_training(trained(tmp_path, {"sample": 1.0}), without)


def test_the_comparison_would_see_a_changed_loss(without, tmp_path):
    class Scaled(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return super()._compute_loss(model, inputs) * (1 + 2**-20)

    assert not same_training(trained(tmp_path, {"sample": 1.0}, cls=Scaled), without)


def test_columns_of_decisions_are_absent_without_a_region(tmp_path):
    trained(tmp_path, {"sample": 1.0})
    found = read(tmp_path / "records")
    assert not {"kept", "weight", "divergence_lower", "divergence_upper"} & set(found)
    assert {"policy_logp", "proximal_logp", "entropy", "advantage", "token_id", "sampler_version", "turn"} <= set(found)
    assert "behavior_logp" not in found, "transformers records none"


def means(values, records):
    """A column's mean at each step as TRL averages it: over the tokens of a micro-batch, then over micro-batches."""
    found = []
    for step in range(SCHEDULE["max_steps"]):
        here = records["step"] == step
        sequences = records["sequence"][here]
        order = list(dict.fromkeys(sequences.tolist()))
        size = SCHEDULE["per_device_train_batch_size"]
        assert len(order) == size * SCHEDULE["gradient_accumulation_steps"]
        parts = [torch.isin(sequences, torch.tensor(order[at : at + size])) for at in range(0, len(order), size)]
        found.append(sum(values[here][part].double().mean().item() for part in parts) / len(parts))
    return found


def test_tokens_are_those_of_trls_own_log(tmp_path):
    trainer = trained(tmp_path, {"sample": 1.0, "region": OBSERVED})
    found, history = read(tmp_path / "records"), logged(trainer)[: SCHEDULE["max_steps"]]
    assert means(found["entropy"], found) == pytest.approx([row["entropy"] for row in history], abs=1e-5)
    # The decisions of TRL's own clip.
    masked = means(~found["kept"], found)
    assert masked == pytest.approx([row["clip_ratio/region_mean"] for row in history], abs=1e-6)
    assert max(masked) > 0.1
    # One rollout for four updates.
    assert found["sampler_version"].tolist() == (found["step"] - found["step"] % UPDATES_PER_ROLLOUT).tolist()


class Grows(GRPOTrainer):
    """Trains on tokens that its rollout still left out."""

    CUT = 3

    def _generate_and_score_completions(self, inputs):
        rollout = super()._generate_and_score_completions(inputs)
        mask = rollout["completion_mask"] = torch.ones_like(rollout["completion_mask"])
        mask[:, -self.CUT :] = 0
        return rollout

    def _prepare_inputs(self, generation_batch):
        inputs = super()._prepare_inputs(generation_batch)
        return inputs | {"completion_mask": torch.ones_like(inputs["completion_mask"])}


def test_tokens_that_join_the_mask_later_are_recorded_as_they_are_trained(tmp_path):
    trained(tmp_path, {"sample": 1.0}, cls=Grows)
    recorded = read(tmp_path / "records")
    lengths = recorded["sequence"].unique(return_counts=True)[1].tolist()
    assert set(lengths) == {world.COMPLETION * SCHEDULE["num_iterations"]}


def test_evaluation_is_not_recorded(tmp_path):
    trainer = world.stock(output_dir=str(tmp_path))
    record(trainer, sample=1.0)
    with torch.no_grad():
        trainer.model.eval()
        inputs = trainer._generate_and_score_completions([{"prompt": "1+2="}] * 2)
        assert trainer._compute_loss(trainer.model, inputs).isfinite()
    assert not list((tmp_path / "records").glob("*.parquet"))


def test_a_run_that_is_resumed_records_what_it_would_have(tmp_path):
    class Stop(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_training_stop = state.global_step == 6

    saved = {"save_strategy": "steps", "save_steps": UPDATES_PER_ROLLOUT}
    whole = trained(tmp_path / "whole", {"sample": 1.0}, **saved)

    def new():
        settings = world.settings(output_dir=str(tmp_path / "cut"), **SCHEDULE | saved)
        trainer = world.trainer_of(GRPOTrainer, world.tiny_model(), settings)
        record(trainer, sample=1.0)
        return trainer

    cut = new()
    cut.add_callback(Stop())
    cut.train()
    assert read(tmp_path / "cut" / "records")["step"].max() == 5
    again = new()
    again.train(resume_from_checkpoint=True)
    expected, found = (read(tmp_path / name / "records") for name in ("whole", "cut"))
    assert set(found) == set(expected)
    for name in expected:
        assert torch.equal(found[name], expected[name]), name
    assert again.state.global_step == whole.state.global_step == 8


def test_a_sampler_that_records_log_probs_is_in_the_record(tmp_path):
    tokenizer = world.tokenizer()

    def rollout_func(prompts, trainer):
        g = torch.Generator().manual_seed(trainer.state.global_step)
        ids = [torch.randint(4, 120, (5,), generator=g).tolist() for _ in prompts]
        logps = [(-torch.rand(5, generator=g) - 1).tolist() for _ in prompts]
        return {"prompt_ids": [tokenizer(x)["input_ids"] for x in prompts], "completion_ids": ids, "logprobs": logps}

    settings = world.settings(output_dir=str(tmp_path), max_steps=1)
    trainer = world.trainer_of(GRPOTrainer, world.tiny_model(), settings, rollout_func=rollout_func)
    record(trainer, sample=1.0, region="dppo-binary-tv")
    trainer.train()
    found = read(tmp_path / "records")
    g = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randint(4, 120, (5,), generator=g) for _ in range(6)])
    logps = torch.stack([-torch.rand(5, generator=g) - 1 for _ in range(6)])
    recorded = {tuple(x) for x in zip(found["token_id"].tolist(), found["behavior_logp"].tolist(), strict=True)}
    assert recorded == set(zip(ids.flatten().tolist(), logps.flatten().tolist(), strict=True))
    assert {"kept", "weight", "divergence_lower"} <= set(found)
    assert 0 < (~found["kept"]).sum() < len(found["kept"])


REFUSED = {
    "a trainer with a region": (
        lambda folder: (world.ours(trustrl.preset("dppo-binary-tv")), {}), "must be a stock GRPOTrainer",
    ),
    "no trainer": (lambda folder: (object(), {}), "must be a TRL GRPOTrainer, got object"),
    "a region on the vocabulary": (
        lambda folder: (world.stock(output_dir=folder), {"region": "dppo-topk-tv"}), "only the sampled token",
    ),
    "a region on log-probs that nobody records": (
        lambda folder: (world.stock(output_dir=folder), {"region": "dppo-binary-tv"}), "when transformers generates",
    ),
    "a region under top-p": (
        lambda folder: (world.stock(output_dir=folder, top_p=0.9), {"region": OBSERVED}), "with top_p",
    ),
    "a setting that does not exist": (
        lambda folder: (world.stock(output_dir=folder), {"smaple": 1.0}), "Did you mean 'sample'",
    ),
    "an object instead of a region": (
        lambda folder: (world.stock(output_dir=folder), {"region": 3}), "region or the name of a preset, got 3",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    make, message = REFUSED[name]
    trainer, settings = make(str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        record(trainer, **settings)


def test_a_second_record_is_refused(tmp_path):
    trainer = world.stock(output_dir=str(tmp_path))
    record(trainer)
    with pytest.raises(ConfigError, match="already"):
        record(trainer)


def test_a_loss_that_bypasses_trls_is_trained_and_said(tmp_path):
    class Other(GRPOTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return next(model.parameters()).sum()

    with pytest.warns(TrustRLWarning, match="recorded no token in the first step"):
        trained(tmp_path, {}, cls=Other)


def sequences(folder):
    """Rows of the sequence table with their texts, by id."""
    texts = {row["sequence"]: row for row in read_texts(folder).to_pylist()}
    rows = read_sequences(folder).to_pylist()
    return {row["sequence"]: row | texts[row["sequence"]] | {"rewards": dict(row["rewards"])} for row in rows}


def test_sequences_are_those_of_trls_own_log(tmp_path):
    def half(completions, **_):
        return [len(x) / 2 if len(x) > 6 else None for x in completions]

    data = Dataset.from_dict({"prompt": [f"{a}+{b}=" for a in range(4) for b in range(4)], "task_id": range(16)})
    trainer = GRPOTrainer(
        model=world.tiny_model(), reward_funcs=[world.reward, half], train_dataset=data,
        processing_class=world.tokenizer(),
        args=world.settings(output_dir=str(tmp_path), reward_weights=[1.0, 0.5], max_steps=2, logging_steps=1),
    )  # fmt: skip
    record(trainer)
    trainer.train()
    found, history = sequences(tmp_path / "records"), trainer.state.log_history
    tokens = read(tmp_path / "records")
    assert set(found) == set(tokens["sequence"].tolist())
    for step in range(2):
        rows = [row for row in found.values() if row["step"] == step]
        row = history[step]
        assert len(rows) == 6, "all, because there are few"

        def mean(name, rows=rows):
            known = [x[name] for x in rows if x[name] is not None]
            return sum(known) / len(known)

        assert mean("reward") == pytest.approx(row["reward"])
        for name in ("reward", "half"):
            known = [x["rewards"][name] for x in rows if x["rewards"][name] is not None]
            assert sum(known) / len(known) == pytest.approx(row[f"rewards/{name}/mean"])
        assert mean("completion_tokens") == pytest.approx(row["completions/mean_length"])
        stopped = [x for x in rows if x["stop_reason"] == "stop"]
        assert 1 - len(stopped) / len(rows) == pytest.approx(row["completions/clipped_ratio"])
        # Two completions of each prompt are a group, and its advantages add up to 0.
        assert len({x["group"] for x in rows}) == 3
        for group in {x["group"] for x in rows}:
            members = [x for x in rows if x["group"] == group]
            assert len({x["prompt"] for x in members}) == len({x["task_id"] for x in members}) == 1
            assert sum(x["advantage"] for x in members) == pytest.approx(0, abs=1e-6)
    for row in found.values():
        a, b = divmod(int(row["task_id"]), 4)
        assert row["prompt"] == f"{a}+{b}="
        assert row["prompt_tokens"] == 4
        here = tokens["sequence"] == row["sequence"]
        assert here.sum() == row["completion_tokens"]
        ids = tokens["token_id"][here].tolist()
        assert row["completion"] == world.tokenizer().decode(ids, skip_special_tokens=True)
        assert tokens["advantage"][here].unique().tolist() == [row["advantage"]]
        assert row["reward"] == pytest.approx(
            sum(w * x for w, x in zip((1, 0.5), row["rewards"].values(), strict=True) if x is not None)
        )
    assert {row["stop_reason"] for row in found.values()} == {"stop", "length"}
    assert {row["rewards"]["half"] is None for row in found.values()} == {True, False}


def test_run_json_describes_the_run(tmp_path):
    trained(tmp_path, {})
    found = read_run(tmp_path / "records")
    assert found["engine"]["name"] == "trl"
    assert found["engine"]["settings"]["updates_per_batch"] == UPDATES_PER_ROLLOUT
    assert found["engine"]["settings"]["loss"] == "dapo"
    assert found["sampling"]["temperature"] == 1.0
    assert found["dtypes"] == {"trainer": "float32", "sampler": "float32"}
    assert found["region"] is found["region_role"] is None


def test_run_json_says_that_a_region_only_observed(tmp_path):
    record(world.stock(output_dir=str(tmp_path)), region=OBSERVED)
    found = read_run(tmp_path / "records")
    assert trustrl.config_from_dict(found["region"]) == OBSERVED
    assert found["region_role"] == "observed"


def test_a_trainer_with_a_region_records_its_sequences_too(tmp_path):
    recording = Recording(folder=tmp_path / "records", sample=1.0)
    average = {"loss_type": "grpo"}  # which adds up to 1 at every step
    settings = world.settings(output_dir=str(tmp_path), **SCHEDULE | average)
    given = {"region": trustrl.preset("dppo-binary-tv"), "behavior": "trainer", "recording": recording}
    world.trainer_of(TrustRegionGRPOTrainer, world.tiny_model(), settings, **given).train()
    trained(tmp_path / "stock", {"sample": 1.0}, **average)

    def first_rollout(folder):
        return [row for row in sequences(folder / "records").values() if row["step"] == 0]

    found = first_rollout(tmp_path)
    assert len(found) == SCHEDULE["per_device_train_batch_size"] * SCHEDULE["steps_per_generation"]
    assert found == first_rollout(tmp_path / "stock"), "the same rollout, before any update"
    assert read_run(tmp_path / "records")["region_role"] is None


@pytest.mark.parametrize("has_region", [False, True], ids=["stock", "with a region"])
def test_training_ends_when_a_slow_store_has_the_record(has_region, tmp_path, monkeypatch):
    pytest.importorskip("fsspec")

    def slow(*arguments, upload=uploads.upload):
        time.sleep(0.3)
        upload(*arguments)

    monkeypatch.setattr(uploads, "upload", slow)
    recording = {"folder": f"memory://{uuid4().hex}/records", "sample": 1.0, "spool": str(tmp_path / "spool")}
    schedule = SCHEDULE | {"max_steps": 2, "loss_type": "grpo"}
    if has_region:
        region = {"region": trustrl.preset("dppo-binary-tv"), "behavior": "trainer"}
        settings = world.settings(output_dir=str(tmp_path), **schedule)
        more = region | {"recording": Recording(**recording)}
        world.trainer_of(TrustRegionGRPOTrainer, world.tiny_model(), settings, **more).train()
    else:
        trained(tmp_path, recording, **schedule)
    assert set(read(recording["folder"])["step"].tolist()) == {0, 1}


@pytest.mark.parametrize("saves", ["steps", "epoch"])
@pytest.mark.parametrize("has_region", [False, True], ids=["stock", "with a region"])
def test_the_record_is_on_the_disk_before_a_checkpoint_exists(has_region, saves, tmp_path, monkeypatch):
    synced = {}

    def noted(path):
        if path.name.startswith("step-"):
            synced[path.name] = sorted(x.name for x in tmp_path.glob("checkpoint-*"))

    monkeypatch.setattr(rank_writer, "sync", noted)
    more = {"num_iterations": 1, "steps_per_generation": 2, "save_strategy": saves, "save_steps": 2}
    schedule = SCHEDULE | more | {"max_steps": 4, "loss_type": "grpo"}
    recording = {"folder": tmp_path / "records", "sample": 1.0}
    if has_region:
        region = {
            "region": trustrl.preset("dppo-binary-tv"),
            "behavior": "trainer",
            "recording": Recording(**recording),
        }
        settings = world.settings(output_dir=str(tmp_path), **schedule)
        world.trainer_of(TrustRegionGRPOTrainer, world.tiny_model(), settings, **region).train()
    else:
        trained(tmp_path, recording, **schedule)
    saved = sorted(int(x.name.removeprefix("checkpoint-")) for x in tmp_path.glob("checkpoint-*"))
    assert saved == [2, 4] if saves == "steps" else saved
    for step in range(saved[-1]):
        before = [checkpoint for checkpoint in saved if checkpoint <= step]
        assert synced[part_name(step, 0)] == [f"checkpoint-{checkpoint}" for checkpoint in before]


def test_nan_in_a_stock_run_dumps_the_last_steps(tmp_path):
    class Broken(GRPOTrainer):
        def _get_per_token_logps_and_entropies(self, *args, **kwargs):
            logp, *more = super()._get_per_token_logps_and_entropies(*args, **kwargs)
            return (logp * float("nan") if self.state.global_step == 2 else logp, *more)

    trained(tmp_path, {}, cls=Broken, max_steps=3)
    (dump,) = (tmp_path / "records").glob("dump-*")
    assert dump.name == "dump-00000002"
    assert read(dump)["policy_logp"][read(dump)["step"] == 2].isnan().all()


def test_a_script_is_recorded_without_editing_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"from support import trl_world as world\nworld.stock(output_dir={str(tmp_path)!r}, max_steps=1).train()\n"
    )
    command = [sys.executable, "-m", "trustrl.engines.trl", script]
    environment = own_environment(PYTHONPATH=python_path(), TRUSTRL_RECORD=str(tmp_path / "elsewhere"))
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(read_sequences(tmp_path / "elsewhere")) == 6
