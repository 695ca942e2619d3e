r"""Losses, projections and divergences as plain functions: tensors in, tensors out.

Every loss returns one term per token, exactly 0 where `in_loss` is False; the caller reduces. All of them share

    ℓ_t = −M_t · sg(w_t) · A_t · log π(a_t),   r = π(a_t)/b(a_t)

with the mask M and the weight w of their paper, and b the anchor: the policy that sampled (`behavior_logp`) or the
trainer's own log-probs before the first update (`proximal_logp`). Advantages are per token or per sequence. Faulty
tokens (NaN, infinite or positive log-probs) get the term 0; `trustrl.policy_loss` counts them and reports metrics.

These functions run the same code as `trustrl.policy_loss`. Use that one for reductions, penalties and metrics.

Example:
    >>> import torch, trustrl.functional as F
    >>> logp = torch.tensor([[-0.5, -1.0]], requires_grad=True)
    >>> behavior_logp, advantage = torch.tensor([[-0.5, -2.5]]), torch.tensor([1.0])
    >>> F.dppo_loss(logp, behavior_logp, advantage, torch.tensor([[True, True]])).mean().backward()
    >>> logp.grad  # the second token rose from 0.08 to 0.37 and would rise further: masked
    tensor([[-0.5000, -0.0000]])
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl import regions
from trustrl.config.axes import Needs
from trustrl.config.statistics import TopKTV
from trustrl.config.terms import MIS, TIS, Correction, IcePop
from trustrl.core.clean import clean_tokens
from trustrl.core.decision import correction_factor
from trustrl.core.divergences import Interval, binary_kl, binary_tv, k1, k2, k3, measure
from trustrl.core.projection import Projection, troll_project
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.regions import *  # noqa: F403  the losses are in the files of their regions
from trustrl.regions.base import needs_of
from trustrl.regions.dppo import leaving

__all__ = [
    "Interval", "Projection", "binary_kl", "binary_tv", "icepop_weight", "k1", "k2", "k3", "leaving", "mis_weight",
    "tis_weight", "topk_tv", "troll_project",
]  # fmt: skip
__all__ += [name for name in regions.__all__ if name.endswith("_loss")]

LogProbs = Float[Tensor, "*batch"]
Mask = Bool[Tensor, "*batch"]


def tis_weight(proximal_logp: LogProbs, behavior_logp: LogProbs, in_loss: Mask, *, max_ratio: float = 2.0) -> LogProbs:
    r"""Returns truncated importance sampling's factor, min(π'/μ, max_ratio).

    Multiply it onto a loss anchored on `proximal_logp`, for example `ppo_loss`.
    """
    return _mismatch(TIS(max_ratio=max_ratio), proximal_logp, behavior_logp, in_loss)


def icepop_weight(
    proximal_logp: LogProbs, behavior_logp: LogProbs, in_loss: Mask, *, min_ratio: float = 0.5, max_ratio: float = 5.0
) -> LogProbs:
    r"""Returns IcePop's factor: π'/μ inside [min_ratio, max_ratio], else 0. Use it as `tis_weight`."""
    return _mismatch(IcePop(min_ratio=min_ratio, max_ratio=max_ratio), proximal_logp, behavior_logp, in_loss)


def mis_weight(
    proximal_logp: LogProbs, behavior_logp: LogProbs, in_loss: Mask, *, min_ratio: float = 0.5, max_ratio: float = 2.0
) -> LogProbs:
    r"""Returns masked importance sampling's factor per token. Differs from `icepop_weight` in its bounds alone."""
    correction = MIS(min_ratio=min_ratio, max_ratio=max_ratio, level="token")
    return _mismatch(correction, proximal_logp, behavior_logp, in_loss)


def topk_tv(
    logp: LogProbs,
    anchor_logp: LogProbs,
    token_ids: Int[Tensor, "*batch"],
    topk_ids: Int[Tensor, "*batch k"],
    topk_logp: Float[Tensor, "*batch k"],
    anchor_topk_logp: Float[Tensor, "*batch k"],
) -> Interval:
    r"""Returns the total variation over the anchor's top K with its certified interval.

        ½(Σ_S |b−π| + |m−p|) ≤ TV ≤ ½(Σ_S |b−π| + m + p),   S = TopK(b, K) ∪ {a},   m, p the mass outside S

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 15 (the lower end).
    """
    everywhere = token_ids >= 0
    rollout = RolloutTokens(
        behavior_logp=anchor_logp,
        advantage=logp.detach(),
        in_loss=everywhere,
        token_ids=token_ids,
        topk=TopK(topk_ids, anchor_topk_logp, "behavior"),
    )
    needs = Needs(topk=topk_ids.shape[-1])
    tokens = clean_tokens(PolicyTokens(logp=logp, topk_logp=topk_logp), rollout, needs)
    interval = measure(tokens, TopKTV(k=topk_ids.shape[-1]))
    return Interval(*(end.reshape(logp.shape) for end in interval))


def _mismatch(correction: Correction, proximal_logp: Tensor, behavior_logp: Tensor, in_loss: Tensor) -> Tensor:
    rollout = RolloutTokens(
        behavior_logp=behavior_logp, proximal_logp=proximal_logp, advantage=proximal_logp.detach(), in_loss=in_loss
    )
    needs = needs_of(None, "proximal", correction)
    tokens = clean_tokens(PolicyTokens(logp=proximal_logp), rollout, needs)
    return correction_factor(tokens, correction).reshape(in_loss.shape).to(proximal_logp.dtype)
