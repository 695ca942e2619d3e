r"""FlashREINFORCE: drops a sequence by the mean binary KL of its sampled tokens.

    d(p, q) = p log(p/q) + (1 − p) log((1 − p)/(1 − q)),   p, q: probabilities of the sampled token
    M = 0 for the whole sequence  iff  mean_t d(μ, π) > δ,   w = π/μ,   ℓ = −sg(M w) A log π            (eq. 11)

The sign of A does not matter, and weights have no cap. OpenRLHF's gate of this name is `divergence-gate`, a correction.
It compares μ with π', the trainer's policy before the first update, so its decision stays the same over the updates of
a batch, and PPO's mask alone bounds them. With one update on a batch, as in the paper, both are the same.

Limits:

- A sequence must be whole in its call. For the paper's average use `trustrl.SequenceMeanTokenMean`.
- The recipe's advantage, the reward minus the batch's mean, is not part of the region. Neither is the appendix's choice
  of high-entropy tokens in failed answers.
- `trustrl/divergence_p99` is a quantile of each sequence's mean d, repeated on its tokens. d is not clamped.

In other libraries:

- δ is 3e-3 in TRL (experimental, after 1.16.0), 1e-3 on verl's documentation page, and 5e-3 in slime and miles. TRL,
  slime and miles clamp p and q to [1e-6, 1 − 1e-6], and TRL raises if π/μ overflows. We read files in an index of
  public code and did not check which branches hold them.

Reference: FlashREINFORCE (NVIDIA, September 2026). We did not have the PDF; the rule is that of TRL's, verl's and
OpenRLHF's code and documentation. δ is TRL's default and one of the paper's values, 1e-3, 3e-3 and 1e-2.
"""

from trustrl.config.statistics import BinaryKL
from trustrl.regions.trust_region import TrustRegion

PRESETS = {
    "flash-reinforce": lambda: TrustRegion(BinaryKL(max_increase=3e-3), direction="symmetric", level="sequence"),
}
