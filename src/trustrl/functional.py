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

from trustrl.config.axes import Needs, Region
from trustrl.config.regions import CISPO, DPPO, IPO, KPOP, M2PO, PPO, MiniRL, PolicyGradient
from trustrl.config.sequence_regions import GMPO, GSPO, OPSM, TRM, VESPO
from trustrl.config.soft_regions import DRPO, SAPO, SPO
from trustrl.config.statistics import (
    BinaryKL,
    BinaryTV,
    LogRatio,
    Ratio,
    SampledK2,
    SequenceRatio,
    SymmetricBinaryKL,
    TopKTV,
)
from trustrl.config.terms import MIS, TIS, Correction, IcePop
from trustrl.core.clean import clean_tokens
from trustrl.core.divergences.interval import Interval
from trustrl.core.divergences.measure import measure
from trustrl.core.divergences.sampled import binary_kl, binary_tv, k1, k2, k3
from trustrl.core.losses import policy_terms
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK, differentiable_once
from trustrl.core.regions.decision import correction_factor
from trustrl.core.regions.dispatch import decide
from trustrl.core.regions.dppo import leaving
from trustrl.core.regions.troll import Projection, troll_project

__all__ = [
    "Interval", "Projection", "binary_kl", "binary_tv", "cispo_loss", "dppo_kl_loss", "dppo_loss", "dppo_topk_loss",
    "drpo_loss", "gmpo_loss", "gspo_loss", "icepop_weight", "ipo_loss", "k1", "k2", "k3", "kpop_loss", "leaving",
    "m2po_loss", "minirl_loss", "mis_weight", "opsm_loss", "policy_gradient_loss", "ppo_loss", "sapo_loss",
    "spo_loss", "tis_weight", "topk_tv", "trm_loss", "troll_project", "vespo_loss",
]  # fmt: skip

LogProbs = Float[Tensor, "*batch"]
Mask = Bool[Tensor, "*batch"]
Rows = Float[Tensor, "sequences tokens"]


def dppo_loss(
    logp: LogProbs,
    behavior_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    max_increase: float = 0.15,
    max_decrease: float = 0.15,
) -> LogProbs:
    r"""Returns DPPO's loss with the binary total variation.

        D = |π − μ|,   M = 0  iff  (A > 0, r > 1, D > max_increase)  or  (A < 0, r < 1, D > max_decrease),   w = r

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12-13.
    """
    region = DPPO(BinaryTV(max_increase=max_increase, max_decrease=max_decrease))
    return _loss(region, logp, behavior_logp, advantage, in_loss)


def dppo_kl_loss(
    logp: LogProbs,
    behavior_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    max_increase: float = 0.05,
    max_decrease: float = 0.05,
) -> LogProbs:
    r"""Returns DPPO's loss with the binary KL.

        D = μ log(μ/π) + (1−μ) log((1−μ)/(1−π)),   M and w as in `dppo_loss`

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12 and 14.
    """
    region = DPPO(BinaryKL(max_increase=max_increase, max_decrease=max_decrease))
    return _loss(region, logp, behavior_logp, advantage, in_loss)


def dppo_topk_loss(
    policy: PolicyTokens, rollout: RolloutTokens, *, max_increase: float = 0.15, max_decrease: float = 0.15
) -> LogProbs:
    r"""Returns DPPO's loss with the total variation over the sampler's top K.

        D = ½(Σ_S |μ−π| + |m−p|),   S = TopK(μ, K) ∪ {a},   m, p the mass outside S;   M and w as in `dppo_loss`

    Args:
        policy: `logp` and `topk_logp`, the policy's log-probs at the recorded ids.
        rollout: `behavior_logp`, `advantage`, `in_loss`, `token_ids` and `topk`, the sampler's top K.
        max_increase: Bound where r > 1.
        max_decrease: Bound where r < 1.

    Reference: Rethinking the Trust Region in LLM Reinforcement Learning, arXiv:2602.04879, eq. 12 and 15.
    """
    k = 1 if rollout.topk is None else rollout.topk.ids.shape[-1]
    return _terms(DPPO(TopKTV(k=k, max_increase=max_increase, max_decrease=max_decrease)), policy, rollout)


def ppo_loss(
    logp: LogProbs,
    anchor_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    max_increase: float = 0.28,
    max_decrease: float = 0.2,
) -> LogProbs:
    r"""Returns PPO's clipped loss, with its textbook value and gradient.

        ℓ = −min(r·A, clip(r, 1 − max_decrease, 1 + max_increase)·A)

    Reference: Proximal Policy Optimization Algorithms, arXiv:1707.06347, eq. 7.
    """
    region = PPO(Ratio(max_increase=max_increase, max_decrease=max_decrease), action="clip")
    return _loss(region, logp, anchor_logp, advantage, in_loss)


def gspo_loss(
    logp: Float[Tensor, "sequences tokens"],
    anchor_logp: Float[Tensor, "sequences tokens"],
    advantage: Float[Tensor, "..."],
    in_loss: Bool[Tensor, "sequences tokens"],
    *,
    max_increase: float = 4e-4,
    max_decrease: float = 3e-4,
) -> Float[Tensor, "sequences tokens"]:
    r"""Returns GSPO's loss; rows are sequences.

        s = exp(mean over the sequence of log r),   M by |s − 1| as in PPO,   w = s

    Average each sequence over its tokens, then over sequences: the paper's gradient is defined for that reduction.

    Reference: Group Sequence Policy Optimization, arXiv:2507.18071.
    """
    region = GSPO(SequenceRatio(max_increase=max_increase, max_decrease=max_decrease))
    return _loss(region, logp, anchor_logp, advantage, in_loss)


def gmpo_loss(
    logp: Rows, anchor_logp: Rows, advantage: Float[Tensor, "..."], in_loss: Mask, *, max_log_ratio: float = 0.4
) -> Rows:
    r"""Returns GMPO's loss: M by |log r| as in PPO, w = exp(mean of the clipped log r); rows are sequences.

    Average as for `gspo_loss`. Reference: Geometric-Mean Policy Optimization, arXiv:2507.20673.
    """
    return _loss(GMPO(LogRatio(max_increase=max_log_ratio)), logp, anchor_logp, advantage, in_loss)


def opsm_loss(
    logp: Rows, behavior_logp: Rows, advantage: Float[Tensor, "..."], in_loss: Mask, *, max_drift: float = 0.5
) -> Rows:
    r"""Returns PPO's loss without the sequences that have A < 0 and a mean log(μ/π) > max_drift; rows are sequences.

    Reference: DeepSeek-V3.2, arXiv:2512.02556, eq. 9.
    """
    return _loss(OPSM(max_drift), logp, behavior_logp, advantage, in_loss)


def vespo_loss(logp: Rows, anchor_logp: Rows, advantage: Float[Tensor, "..."], in_loss: Mask) -> Rows:
    r"""Returns VESPO's loss: M = 1, w = φ(product of r over the sequence); rows are sequences.

    Reference: VESPO, arXiv:2602.10693.
    """
    return _loss(VESPO(), logp, anchor_logp, advantage, in_loss)


def m2po_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask, *, bound: float = 0.04
) -> LogProbs:
    r"""Returns M2PO's loss: M = 0 on the largest outward log² r until the mean of the others is at most the bound.

    Reference: arXiv:2510.01161, algorithm 1.
    """
    return _loss(M2PO(bound), logp, anchor_logp, advantage, in_loss)


def cispo_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask, *, max_ratio: float = 5.0
) -> LogProbs:
    r"""Returns CISPO's loss: M = 1, w = min(r, max_ratio).

    Reference: MiniMax-M1, arXiv:2506.13585.
    """
    return _loss(CISPO(max_ratio=max_ratio), logp, anchor_logp, advantage, in_loss)


def policy_gradient_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask
) -> LogProbs:
    r"""Returns the importance-weighted policy gradient without a region: M = 1, w = r."""
    return _loss(PolicyGradient(), logp, anchor_logp, advantage, in_loss)


def sapo_loss(
    logp: LogProbs,
    anchor_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    temperature_positive: float = 1.0,
    temperature_negative: float = 1.05,
) -> LogProbs:
    r"""Returns SAPO's loss, ℓ = −(4/τ) σ(τ(r − 1)) A, with τ by the sign of A.

    Reference: Soft Adaptive Policy Optimization, arXiv:2511.20347.
    """
    region = SAPO(temperature_positive=temperature_positive, temperature_negative=temperature_negative)
    return _loss(region, logp, anchor_logp, advantage, in_loss)


def spo_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask, *, width: float = 0.2
) -> LogProbs:
    r"""Returns SPO's loss, ℓ = −(r A − |A| (r − 1)² / (2·width)).

    Reference: Simple Policy Optimization, arXiv:2401.16025.
    """
    return _loss(SPO(width=width), logp, anchor_logp, advantage, in_loss)


def drpo_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask, *, width: float = 0.2
) -> LogProbs:
    r"""Returns DRPO's loss, ℓ = −(r A − |A| (r − 1)(π − b) / (2·width)).

    Reference: arXiv:2606.09821.
    """
    return _loss(DRPO(width=width), logp, anchor_logp, advantage, in_loss)


def ipo_loss(
    logp: LogProbs,
    anchor_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    max_gap: float = 0.3,
    log_ratio_penalty: float = 0.0,
) -> LogProbs:
    r"""Returns prime-rl's IPO loss: M = 0 iff |π − b| > max_gap, w = r, plus log_ratio_penalty · log² r."""
    region = IPO(BinaryTV(max_increase=max_gap), log_ratio_penalty=log_ratio_penalty)
    return _loss(region, logp, anchor_logp, advantage, in_loss)


def kpop_loss(
    logp: LogProbs, anchor_logp: LogProbs, advantage: Float[Tensor, "..."], in_loss: Mask, *, max_kl: float = 2.0
) -> LogProbs:
    r"""Returns KPop's loss: M = 0 iff max(KL_bin(b‖π), KL_bin(π‖b)) > max_kl, w = r."""
    return _loss(KPOP(SymmetricBinaryKL(max_increase=max_kl)), logp, anchor_logp, advantage, in_loss)


def trm_loss(
    logp: Float[Tensor, "sequences tokens"],
    anchor_logp: Float[Tensor, "sequences tokens"],
    advantage: Float[Tensor, "..."],
    in_loss: Bool[Tensor, "sequences tokens"],
    *,
    max_k2: float = 0.05,
) -> Float[Tensor, "sequences tokens"]:
    r"""Returns the loss of trust-region masking on the sampled tokens; rows are sequences.

        M = 0 for the whole sequence iff max over its tokens of ½ log² r > max_k2,   w = r

    Reference: Trust Region Masking, arXiv:2512.23075.
    """
    return _loss(TRM(SampledK2(max_increase=max_k2)), logp, anchor_logp, advantage, in_loss)


def minirl_loss(
    logp: LogProbs,
    behavior_logp: LogProbs,
    proximal_logp: LogProbs,
    advantage: Float[Tensor, "..."],
    in_loss: Mask,
    *,
    max_increase: float = 0.28,
    max_decrease: float = 0.2,
) -> LogProbs:
    r"""Returns MiniRL's loss: PPO's mask on π/π', weight w = π/μ.

    Reference: Stabilizing Reinforcement Learning with LLMs, arXiv:2512.01374.
    """
    rollout = RolloutTokens(
        behavior_logp=behavior_logp, proximal_logp=proximal_logp, advantage=advantage, in_loss=in_loss
    )
    region = MiniRL(Ratio(max_increase=max_increase, max_decrease=max_decrease))
    return _terms(region, PolicyTokens(logp=logp), rollout)


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


def _loss(region: Region, logp: Tensor, anchor_logp: Tensor, advantage: Tensor, in_loss: Tensor) -> Tensor:
    rollout = RolloutTokens(behavior_logp=anchor_logp, advantage=advantage, in_loss=in_loss)
    return _terms(region, PolicyTokens(logp=logp), rollout)


def _terms(region: Region, policy: PolicyTokens, rollout: RolloutTokens) -> Tensor:
    tokens = clean_tokens(differentiable_once(policy), rollout, region.needs())
    return policy_terms(decide(tokens, region), tokens).value.reshape(rollout.in_loss.shape)


def _mismatch(correction: Correction, proximal_logp: Tensor, behavior_logp: Tensor, in_loss: Tensor) -> Tensor:
    rollout = RolloutTokens(
        behavior_logp=behavior_logp, proximal_logp=proximal_logp, advantage=proximal_logp.detach(), in_loss=in_loss
    )
    needs = PPO(anchor="proximal", correction=correction).needs()
    tokens = clean_tokens(PolicyTokens(logp=proximal_logp), rollout, needs)
    return correction_factor(tokens, correction).reshape(in_loss.shape).to(proximal_logp.dtype)
