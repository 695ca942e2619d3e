"""A TRL run that drops its tokens, or whose region cannot act, says so."""

import pytest

pytest.importorskip("trl")

import trustrl
from support import trl_world as world


def test_trls_defaults_with_its_own_sampling_are_said_to_leave_the_region_nothing_to_do():
    with pytest.warns(
        trustrl.errors.TrustRLWarning, match=r"dppo cannot act: .* every ratio is 1\. Set num_iterations"
    ):
        world.ours(trustrl.preset("dppo-binary-tv"))


@pytest.mark.parametrize("more", [{"num_iterations": 2}, {"steps_per_generation": 2}], ids=str)
def test_more_updates_per_rollout_give_the_region_something_to_do(more, recwarn):
    world.ours(trustrl.preset("dppo-binary-tv"), **more)
    assert not [one for one in recwarn if "cannot act" in str(one.message)]


def narrowed(model):
    """A micro-batch with 20 recorded ids where TROLL asks for 64."""
    inputs = world.batch(model)
    for name in ("trustrl_topk_ids", "trustrl_topk_logp"):
        inputs[name] = [x[:, :20] for x in inputs[name]]
    inputs.pop("trustrl_topk_tail_logp", None)
    return inputs


def test_a_step_that_trains_on_nothing_raises():
    model = world.tiny_model()
    trainer = world.ours(trustrl.preset("troll"), model)
    with (
        pytest.warns(trustrl.errors.TrustRLWarning, match="dropped most"),
        pytest.raises(
            trustrl.errors.NonFiniteError, match=r"at most 50% of its tokens, got .*%: fewer than k ids are recorded"
        ),
    ):
        trainer._compute_loss(trainer.model, narrowed(model))


def test_a_step_that_trains_on_nothing_warns_where_that_is_allowed():
    model = world.tiny_model()
    trainer = world.ours(trustrl.preset("troll"), model, given={"max_dropped_share": 1.0})
    with (
        pytest.warns(trustrl.errors.TrustRLWarning, match="The loss dropped most of its tokens"),
        pytest.warns(trustrl.errors.TrustRLWarning, match="tokens were dropped: fewer than k ids are recorded"),
    ):
        trainer._compute_loss(trainer.model, narrowed(model))


def test_a_real_run_whose_region_masks_nothing_says_so_after_its_first_batch():
    trainer = world.ours(trustrl.preset("dppo-binary-tv"), num_iterations=2, max_steps=3, learning_rate=1e-9)
    with pytest.warns(trustrl.errors.TrustRLWarning, match="dppo masked no token in the first batch of updates"):
        trainer.train()
