"""A region in TRL's trainer adds no wait to a micro-batch, and one to a step."""

import pytest

pytest.importorskip("trl")

import trustrl
from support import trl_world as world
from support.device_counts import counted
from support.trl_parity import CLIP

ENGINE = {
    ("trl/trainer/grpo_trainer.py", "global_masked_mean"),  # the entropy and three clipped shares, `.item()` each
    ("trl/trainer/grpo_trainer.py", "_compute_loss"),  # two more, and the policy loss if there is an entropy bonus
    ("trl/trainer/utils.py", "nanmin"), ("trl/trainer/utils.py", "nanmax"),  # conditions inside those
    ("transformers/masking_utils.py", "_ignore_causal_mask_sdpa"),  # whether a mask is needed
}  # fmt: skip
"""Where TRL and transformers wait in a micro-batch, whatever the loss."""

MOST_ADDED_KERNELS = {"dppo-binary-tv": 453, "dppo-topk-tv": 770, "troll": 2438}
"""Kernels of forward and backward pass beyond those of TRL's own loss. Lower them with the core's."""

VOCABULARY = ("trustrl/kernels/", "trustrl/core/token_logprobs.py")
"""Counted by tests/contracts/test_device_counts.py."""


def counts_of(trainer, inputs, *, ends_step, backward=True):
    trainer.accelerator.gradient_state._set_sync_gradients(ends_step)
    trainer.model.train()
    with counted("trl", "transformers", "accelerate") as counts:
        loss = trainer._compute_loss(trainer.model, dict(inputs))
        if backward:
            loss.backward()
    return counts


def ours(counter):
    """By function, of lines of trustrl."""
    return {
        place.function: number
        for place, number in counter.items()
        if place.file.startswith("trustrl/") and not place.file.startswith(VOCABULARY)
    }


def trainer_and_inputs(name, **more):
    model = world.tiny_model()
    region = trustrl.preset(name, **{"k": world.TOP} if name == "troll" else {})
    return world.ours(region, model, given={"metrics": "core"}, **more), world.batch(model)


@pytest.mark.parametrize("name", MOST_ADDED_KERNELS)
def test_a_micro_batch_waits_only_where_trl_does(name):
    trainer, inputs = trainer_and_inputs(name)
    counts = counts_of(trainer, inputs, ends_step=False)
    assert ours(counts.waits) == {}
    assert ours(counts.copies) == {}
    theirs = [place for place in counts.waits if not place.file.startswith("trustrl/")]
    assert {(place.file, place.function) for place in theirs} <= ENGINE
    stock = counts_of(world.stock(world.tiny_model()), inputs, ends_step=False)
    assert sum(counts.waits[place] for place in theirs) <= sum(stock.waits.values())
    added = sum(counts.kernels.values()) - sum(stock.kernels.values())
    assert added <= MOST_ADDED_KERNELS[name]


@pytest.mark.parametrize("name", ["dppo-topk-tv", "troll"])
def test_the_vocabulary_adds_no_wait(name):
    trainer, inputs = trainer_and_inputs(name)
    counts = counts_of(trainer, inputs, ends_step=False)
    assert not [str(place) for place in (*counts.waits, *counts.copies) if place.file.startswith(VOCABULARY)]


@pytest.mark.parametrize("name", MOST_ADDED_KERNELS)
def test_the_end_of_a_step_waits_once(name):
    trainer, inputs = trainer_and_inputs(name, gradient_accumulation_steps=2)
    assert ours(counts_of(trainer, inputs, ends_step=False).waits) == {}
    assert ours(counts_of(trainer, inputs, ends_step=True).waits) == {"on_host": 1}


def test_the_logged_policy_loss_is_corrected_once_a_step():
    """With an entropy bonus TRL logs it in every micro-batch; both trainers log the same."""
    bonus = {"entropy_coef": 1e-3, "gradient_accumulation_steps": 2, "steps_per_generation": 2}
    trainers = world.ours(CLIP, world.tiny_model(), **bonus), world.stock(world.tiny_model(), **bonus)
    batches = [world.batch(world.tiny_model(), seed=seed, steps_per_generation=2) for seed in (0, 1)]
    logged, waits = [], []
    for trainer in trainers:
        for at, inputs in enumerate(batches):
            waits.append(ours(counts_of(trainer, inputs, ends_step=at == 1).waits))
        logged.append(trainer._metrics["train"]["policy_loss"])
    assert waits[:2] == [{}, {"correct": 1, "on_host": 1}]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5, abs=1e-6)
    assert abs(logged[1][0] - logged[1][1]) > 1e-3
