"""Comparison of sampler and trainer log-probs on the same tokens, for `trustrl probe`.

sampling          completions with the log-probs that the sampler recorded
trainer_logprobs  the trainer's log-probs of the same tokens, as configured and under each common mistake
diagnosis         the cause that best explains the recorded log-probs
mismatch_fixes    the fix for each cause
probe_report      quantiles, worst tokens, and verdict as text or JSON
"""

from trustrl.tools.probe.mismatch_fixes import EXACT as EXACT, WHAT_TO_DO as WHAT_TO_DO
