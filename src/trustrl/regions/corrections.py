r"""Corrections: a factor on the loss for π'/μ, the mismatch between trainer and sampler.

    k = sg(π'/μ),   ℓ = −sg(c M w) A log π,   M and w of a region that is anchored on π'
    TIS       c = min(k, C)
    IcePop    c = k if min_ratio ≤ k ≤ max_ratio, else 0
    MIS       c as IcePop, or with one k per sequence: exp(mean_t log k_t) or exp(Σ_t log k_t)
    gate      c = k if the mean over the sequence of D(μ‖π') is at most δ, else 0

Any region that is anchored on π' takes one: `DPPO(anchor="proximal", correction=TIS())`. The presets have PPO's mask on
π/π', the usual companion; if trainer and sampler agree they are `ppo`. With the anchor μ a correction is refused,
because π/μ contains π'/μ already.

The mean and the product are different corrections with similar names. At k = 1.01 on each of 200 tokens the mean is
1.01 and the product 7.3. The product is the unbiased weight of a sequence, and the longer the sequence, the more often
it leaves its bounds.

Limits:

- Both `behavior_logp` and `proximal_logp` are needed. A level over sequences needs them whole in a call.
- Tokens with the factor 0 count in `trustrl/correction_zero_share`; `trustrl/masked_share` is the region's own mask.
  Penalties still act on them.
- `trustrl/ratio_mean` is π/π' here. The distance of `trustrl/correction_mean` from `trustrl/mismatch_ratio_mean` is
  what the bounds removed.
- In regions with an objective (SAPO, SPO, DRPO, TROLL) the factor scales the value too, except for TROLL's α term.

In other libraries:

- TRL's default `sequence_mask` is `mis-product`, its `sequence_truncate` is `tis-product`, and gradients agree to 1e-6.
  TRL's optional lower bound truncates from below, which `TIS` cannot. TRL sets k to 1 where the sampler's log-prob is
  NaN, and SkyRL where it is missing. Here the first is dropped and counted, and the second is an error.
- OpenRLHF's level `seq` tests the geometric mean and gives each kept token its own k. `MIS(level="sequence-mean")`
  gives all of them the mean. Gradients of its gate agree with `divergence-gate` to 1e-6. Its `tv` is
  `DivergenceGate(divergence=BinaryTV(max_increase=0.05))`.

Reference: TIS: Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (blog post, 2025). IcePop: Small
Leak Can Sink a Great Ship (blog post, 2025), and arXiv:2510.18855. MIS: When Speed Kills Stability: Demystifying RL
Collapse from the Training-Inference Mismatch (blog post, 2025). The gate: OpenRLHF 0.11.2, after FlashREINFORCE.
"""

from trustrl.config.terms import MIS, TIS, DivergenceGate, IcePop
from trustrl.regions.ppo import PPO

PRESETS = {
    "tis": lambda: PPO(anchor="proximal", correction=TIS()),
    "icepop": lambda: PPO(anchor="proximal", correction=IcePop()),
    # MIS has no published bounds that hold at every level. These are our choice, per token.
    "mis": lambda: PPO(anchor="proximal", correction=MIS(min_ratio=0.5, max_ratio=2.0, level="token")),
    # TRL's `sequence_truncate` and `sequence_mask` with its bound.
    "tis-product": lambda: PPO(anchor="proximal", correction=TIS(max_ratio=3.0, level="sequence-product")),
    "mis-product": lambda: PPO(
        anchor="proximal", correction=MIS(min_ratio=0.0, max_ratio=3.0, level="sequence-product")
    ),
    "divergence-gate": lambda: PPO(anchor="proximal", correction=DivergenceGate()),
}
