"""Rows that describe the NeMo RL settings that do not work with a region. They load without torch and NeMo RL."""

from trustrl.engines.refusals.rows import (
    ON_TRAINER_ALONE,
    Refusal,
    no_ages,
    not_averaged_over_tokens,
    switch,
    whole_vocabulary,
)

LOSS, GENERATION = "loss_fn", "policy.generation"
_OWN = "It belongs to NeMo RL's own clip, which the region replaces. Set the region in loss_fn.trustrl_region."
_TRUNCATED = (
    "NeMo RL cuts π and π' to their own most probable ids. Those are not the ids that vLLM kept, which it does not "
    "record. TRL, verl and OpenRLHF do."
)

ROWS = (
    no_ages(f"{LOSS}.trustrl_region", "NeMo RL"),
    *(
        Refusal(f"{LOSS}.{name}", "0.2, the default,", _OWN, default=0.2)
        for name in ("ratio_clip_min", "ratio_clip_max")
    ),
    switch(f"{LOSS}.ratio_clip_c", _OWN, "null"),
    *(
        switch(f"{LOSS}.{name}", _OWN, "false")
        for name in ("disable_ppo_ratio", "use_cispo", "sequence_level_importance_ratios")
    ),
    switch(f"{LOSS}.force_on_policy_ratio", "NeMo RL would fill prev_logprobs with zeros.", "false"),
    switch(
        f"{LOSS}.truncated_importance_sampling_type",
        "Only NeMo RL's own clip applies it. The regions tis, icepop and mis correct for π'/μ.", "null",
    ),
    switch(
        f"{LOSS}.use_importance_sampling_correction",
        "Only NeMo RL's own clip applies it. Give the region a correction, or anchor it on the sampler.", "false",
        scope=ON_TRAINER_ALONE,
    ),
    not_averaged_over_tokens(f"{LOSS}.token_level_loss", "false"),
    whole_vocabulary(f"{GENERATION}.top_p", "top_p", "1.0", 1.0, _TRUNCATED),
    whole_vocabulary(f"{GENERATION}.top_k", "top_k", "null", why=_TRUNCATED),
)  # fmt: skip
"""Every row, in the order of the check."""
