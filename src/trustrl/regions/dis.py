r"""DIS: a symmetric mask on the ratio.

    M = 0  iff  r < 1 − ε⁻ or r > 1 + ε⁺, whatever the sign of A,   w = r,   r = π/μ,   ℓ = −sg(M w) A log π

A token outside is masked on its way back too. `ppo` masks one side for each sign of A, `cispo` caps the weight where
DIS masks, and `icepop` has this rule for π'/μ. The bounds are distances from 1: the defaults keep r in [0.7, 6], so the
lower one acts first. They are SAO's for reasoning; for coding it has `max_decrease=0.8, max_increase=3.0`. GLM-5 gives
no numbers.

In other libraries:

- SAO's interval is open, GLM-5's summary and this one are closed.
- SkyRL's `rollout_is` has this rule and clips log r at ±20. slime has recipes with 0.3 and 5.0.

Reference: GLM-5: from Vibe Coding to Agentic Engineering, arXiv:2602.15763, section 4.1. SAO: Single-Rollout
Asynchronous Optimization for Agentic Reinforcement Learning, arXiv:2607.07508.
"""

from trustrl.config.statistics import Ratio
from trustrl.regions.trust_region import TrustRegion

PRESETS = {"dis": lambda: TrustRegion(Ratio(max_increase=5.0, max_decrease=0.3), direction="symmetric")}
