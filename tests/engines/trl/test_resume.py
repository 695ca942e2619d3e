"""A run that is interrupted and resumed ends where it would have ended.

transformers restores weights, optimiser, schedule, random states and the place in the data. TRL keeps no rollout in a
checkpoint, so the end of a rollout is where a run can go on unchanged: here every fourth step.
"""

import json

import pytest

pytest.importorskip("trl")

import torch

import trustrl
from support import trl_world as world
from trustrl.engines.common.loss_seam import REGION_KEY as KEY
from trustrl.engines.trl import TrustRegionGRPOTrainer
from trustrl.errors import TrustRLWarning
from trustrl.regions.loading import config_to_dict

UPDATES_PER_ROLLOUT = 4
SCHEDULE = {
    "num_iterations": 2, "steps_per_generation": 2, "max_steps": 2 * UPDATES_PER_ROLLOUT, "learning_rate": 1e-2,
    "logging_steps": 1, "save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 4,
}  # fmt: skip
NAMES = ["dppo-binary-tv", "dppo-topk-tv", "dppo-full-kl"]
"""On TRL's head; with tensors of ours in the rollout; with a head remembered from the rollout."""


class Counting(TrustRegionGRPOTrainer):
    """Counts rollouts."""

    num_rollouts = 0

    def _generate_and_score_completions(self, inputs):
        self.num_rollouts += 1
        return super()._generate_and_score_completions(inputs)


def trainer_in(folder, name, **more):
    settings = world.settings(output_dir=str(folder), **SCHEDULE | more)
    given = {"region": trustrl.preset(name), "behavior": "trainer", "startup_checks": True, "metrics": "all"}
    return world.trainer_of(Counting, world.tiny_model(), settings, **given)


def resumed(checkpoint, folder, name, **more):
    """A fresh trainer, on other weights and another random state, after it has gone on from a checkpoint."""
    trainer = trainer_in(folder, name, **more)
    world.drift(trainer.model, 0.5)
    torch.manual_seed(99)
    trainer.train(resume_from_checkpoint=str(checkpoint))
    return trainer


def weights(trainer):
    return {name: p.detach() for name, p in trainer.model.named_parameters()}


def same_weights(a, b):
    return all(torch.equal(weights(a)[name], x) for name, x in weights(b).items())


def logged(trainer):
    """The region's metrics by step."""
    history = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {entry["step"]: {k: x for k, x in entry.items() if k.startswith("trustrl/")} for entry in history}


def staleness(metrics):
    """The updates between a step and its rollout, read from the names of what was logged."""
    start = "trustrl/masked_share_staleness_"
    (found,) = (key.removeprefix(start) for key in metrics if key.startswith(start))
    return 0 if found == "below_1" else int(found.removeprefix("from_"))


@pytest.fixture(
    scope="module", params=[pytest.param(name, marks=pytest.mark.xdist_group(f"resumed, {name}")) for name in NAMES]
)
def whole_run(request, tmp_path_factory):
    """(region's name, folder with its checkpoints, trainer) of a run that nobody interrupted."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = trainer_in(folder, request.param)
    trainer.train()
    assert trainer.num_rollouts == 2
    return request.param, folder, trainer


def test_a_run_resumed_between_rollouts_ends_with_the_same_weights_bit_for_bit(whole_run, tmp_path):
    name, folder, whole = whole_run
    again = resumed(folder / f"checkpoint-{UPDATES_PER_ROLLOUT}", tmp_path, name)
    assert again.state.global_step == SCHEDULE["max_steps"]
    assert again.num_rollouts == 1
    assert same_weights(again, whole)


def test_metrics_go_on_after_resuming_as_if_nothing_had_happened(whole_run, tmp_path):
    name, folder, whole = whole_run
    again = resumed(folder / f"checkpoint-{UPDATES_PER_ROLLOUT}", tmp_path, name)
    assert logged(again) == logged(whole)
    assert [staleness(metrics) for metrics in logged(again).values()] == [0, 1, 2, 3] * 2
    assert any(metrics["trustrl/masked_share"] > 0 for metrics in logged(again).values())


def test_a_run_resumed_within_a_rollout_starts_with_a_new_one(whole_run, tmp_path):
    """TRL's doing: the rollout is gone, so it samples again, and later rollouts are moved by as many steps."""
    name, folder, whole = whole_run
    again = resumed(folder / "checkpoint-2", tmp_path, name)
    assert again.num_rollouts == 2
    assert [staleness(metrics) for metrics in logged(again).values()] == [0, 1, 0, 1, 2, 3, 0, 1]
    assert logged(again)[3]["trustrl/ratio_max"] == pytest.approx(1.0, abs=1e-4), "anchored on the resumed weights"
    assert not same_weights(again, whole)


def test_resuming_a_finished_run_does_what_it_does_without_a_region(whole_run, tmp_path):
    """transformers makes one step too many, on a new rollout and at the learning rate its schedule ended with: 0 here."""
    name, folder, whole = whole_run
    last = SCHEDULE["max_steps"]
    without = world.stock(output_dir=str(tmp_path / "theirs"), **SCHEDULE)
    without.train()
    without.train(resume_from_checkpoint=str(tmp_path / "theirs" / f"checkpoint-{last}"))
    again = resumed(folder / f"checkpoint-{last}", tmp_path, name)
    assert again.state.global_step == without.state.global_step <= last + 1
    assert again.num_rollouts == again.state.global_step - last
    assert [staleness(metrics) for step, metrics in logged(again).items() if step > last] == [0] * again.num_rollouts
    assert same_weights(again, whole)


def test_a_finished_run_can_be_given_more_steps(whole_run, tmp_path):
    name, folder, _ = whole_run
    again = resumed(folder / f"checkpoint-{SCHEDULE['max_steps']}", tmp_path, name, max_steps=10)
    assert again.state.global_step == 10
    assert [staleness(metrics) for metrics in logged(again).values()][-2:] == [0, 1]


def saved_region(folder, step):
    return json.loads((folder / f"checkpoint-{step}" / "trainer_state.json").read_text())["stateful_callbacks"].get(KEY)


def test_every_checkpoint_says_which_region_it_was_trained_with(whole_run):
    name, folder, _ = whole_run
    assert saved_region(folder, 2) == saved_region(folder, 8) == config_to_dict(trustrl.preset(name))


@pytest.mark.parametrize("name", trustrl.presets())
def test_a_region_is_the_same_after_a_checkpoint_wrote_it_down(name):
    """Otherwise every resumed run of it would warn."""
    settings = config_to_dict(trustrl.preset(name))
    assert json.loads(json.dumps(settings)) == settings


@pytest.mark.parametrize("restored", [False, True], ids=["usual", "callbacks restored from the checkpoint"])
def test_resuming_with_another_region_warns_with_both_and_writes_down_the_new_one(tmp_path, restored):
    trainer_in(tmp_path / "before", "dppo-topk-tv", max_steps=4).train()
    trainer = trainer_in(tmp_path / "after", "ppo", restore_callback_states_from_checkpoint=restored)
    with pytest.warns(TrustRLWarning) as caught:
        trainer.train(resume_from_checkpoint=str(tmp_path / "before" / "checkpoint-4"))
    (warning,) = (w for w in caught if issubclass(w.category, TrustRLWarning))
    text = str(warning.message)
    assert text.startswith("The checkpoint at step 4 was trained with the region {")
    assert text.index('"kind": "topk-tv"') < text.index("training resumes with") < text.index('"kind": "ppo"')
    assert saved_region(tmp_path / "after", 8) == config_to_dict(trustrl.preset("ppo"))


def test_a_checkpoint_of_trls_own_trainer_can_be_resumed_with_a_region(tmp_path):
    world.stock(output_dir=str(tmp_path / "before"), **SCHEDULE | {"max_steps": 4}).train()
    again = resumed(tmp_path / "before" / "checkpoint-4", tmp_path / "after", "dppo-topk-tv")
    assert again.state.global_step == SCHEDULE["max_steps"]
    assert saved_region(tmp_path / "before", 4) is None
    assert saved_region(tmp_path / "after", 8) == config_to_dict(trustrl.preset("dppo-topk-tv"))
