"""What must hold before the first step, whichever engine trains."""

from torch import Tensor

from trustrl.errors import EngineError

LARGEST_GAP = {"trainer": 0.02, "sampler": 0.15}
"""Mean |log π − log b| in nats that the same weights may differ by: one network run twice in bf16, or two
implementations of it (.04 is usual for a bf16 sampler)."""


def ratio_is_one(logp: Tensor, anchor_logp: Tensor, at: Tensor, recorded_by: str, switch: str) -> None:
    """Refuses an anchor that is not the policy's own distribution while the weights are still the rollout's.

    Args:
        logp: the policy's log-probs.
        anchor_logp: the anchor's.
        at: which tokens were sampled with these weights.
        recorded_by: `trainer` or `sampler`.
        switch: the setting that turns this check off.

    Raises:
        EngineError: they differ; names the usual causes.
    """
    same = at & anchor_logp.isfinite() & logp.detach().isfinite()
    if not same.any():
        return
    gap = (logp.detach() - anchor_logp)[same].abs()
    if not gap.mean() <= LARGEST_GAP[recorded_by]:
        raise EngineError(
            "The ratio π/b must be 1 before the first step, got a mean |log π − log b| of "
            f"{gap.mean().item():.3g} nats (largest {gap.max().item():.3g}) against the {recorded_by}'s log-probs at "
            "the same weights. Usual causes: weights that did not reach the sampler, a tied output layer that stayed "
            "behind, raw instead of processed log-probs, another temperature, truncated sampling, dropout. "
            f"{switch} trains all the same."
        )
