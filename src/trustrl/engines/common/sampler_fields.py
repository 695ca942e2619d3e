"""Names under which samplers are asked for more than log μ, and return it with the tokens that they sample."""

TOPK = "trustrl_topk"
"""The key of `sampling_params["extra_args"]` that asks for the K most probable ids at each sampled token."""

TOPK_IDS, TOPK_LOGP = "trustrl_topk_ids", "trustrl_topk_logp"
"""The answer in `extra_fields`: (T, K) int32 ids and float32 log-probs, under the distribution that was drawn from."""

KEPT = "trustrl_kept"
"""The key of `extra_args` that asks for the ids that truncation kept. Its value is the largest number to record."""

MAX_KEPT = 4096
"""The default of that number."""

REPLICA = "trustrl_replica"
"""The key of `extra_fields` with the name of the server that sampled a sequence."""

KEPT_IDS, KEPT_COUNTS = "trustrl_kept_ids", "trustrl_kept_counts"
"""The answer in `extra_fields`: (n,) int32 ids, one token after the other, and the (T,) int32 number at each token."""

UNRECORDED = "trustrl_unrecorded"
"""The key of `extra_fields` with the reason why a server answered a request without what it was asked for."""
