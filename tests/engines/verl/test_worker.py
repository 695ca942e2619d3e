"""A real verl training worker with our loss: model, FSDP2, micro-batches, ranks, and verl's own metrics."""

import pytest

pytest.importorskip("verl")

import torch

from support import verl_world as world
from support.verl_launch import on_ranks
from trustrl.engines.common.seam import version_of


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_worker_gets_the_same_gradient_from_ours(ranks, tmp_path):
    """Three micro-batches a rank, one of them without a token in the loss: names and numbers must still add up."""
    on_ranks("verl_worker.py", ranks, tmp_path / "found")
    found = torch.load(tmp_path / "found", weights_only=False)
    assert set(found) == set(world.MODES)
    for mode, (ours, theirs) in found.items():
        assert world.error(ours["gradient"], theirs["gradient"]) <= 1e-6, mode
        clipped = [float(torch.tensor(side["metrics"]["actor/pg_clipfrac"]).mean()) for side in (ours, theirs)]
        assert clipped[0] == pytest.approx(clipped[1], abs=1e-6), mode
        assert 0.05 < clipped[0] < 0.6, mode
        assert "trustrl/dropped_share" in ours["metrics"]


@pytest.mark.skipif(version_of("verl") < (0, 9, 1), reason="verl 0.9.0's workers need flash-attention")
def test_a_step_that_drops_most_tokens_raises_unless_that_is_allowed(tmp_path):
    said = on_ranks("verl_dropped.py", 1, tmp_path / "found")
    assert "RAISED 0.5: A step must drop at most 50% of its tokens, got " in said
    assert "log μ is NaN, infinite or above 0. Fix the cause, or raise policy_loss.max_dropped_share" in said
    assert "RAISED 1.0" not in said
    assert "tokens were dropped: log μ is NaN, infinite or above 0" in said.partition("WARNED 1.0")[2]
    refused = said.partition("RAISED NaN: ")[2]  # even where dropping is allowed
    assert refused.startswith(
        "The sampler must record a number as the log-prob of every token in the loss, got NaN at "
    )
    assert "speculative decoding in vLLM's CPU build" in refused
