"""Comparison of sampler and trainer log-probs on the same tokens, for `trustrl probe`.

sampling          completions with the log-probs that the sampler recorded
trainer_logprobs  the trainer's log-probs of the same tokens, as configured and under each common mistake
probe_report      the cause that best explains the recorded log-probs, quantiles and worst tokens, as text or JSON

The package itself has the fix for each cause, which other tools read without torch.
"""

EXACT = 1e-3
"""Mean |Δ log p| in nats below which two float32 implementations agree."""

WHAT_TO_DO = {
    "agreement": "No action needed.",
    "rounding": "Expected for a half-precision sampler. A region anchored on the sampler's log-probs accounts for it, "
    "and float32 in the sampler removes it.",
    "raw log-probs": "Make the sampler return processed log-probs (vLLM: logprobs_mode=processed_logprobs).",
    "temperature": "Use the same temperature in sampler and trainer, or divide the trainer's logits by the sampler's "
    "temperature.",
    "truncation": "Disable top-p, top-k, and min-p for training, or renormalize the trainer over the kept ids "
    "(trustrl.core.sampling.within_kept).",
    "routing": "The sampler's rounding sends some tokens to other experts. Replay the sampler's routing in the trainer "
    "(verl on Megatron: router_replay.mode=R3), or run the sampler in float32. A region anchored on the sampler's "
    "log-probs includes the gap of these tokens in its ratio.",
    "weights": "Sync the weights and probe again. Likely causes: stale weights, a tied output layer that was not "
    "synced, another checkpoint, adapters on one side, dropout.",
}
