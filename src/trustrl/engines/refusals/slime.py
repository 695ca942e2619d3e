"""Rows that describe the arguments of slime, and of its fork miles, that do not work with a region.

Imports neither torch nor slime, so the documentation can list the rows anywhere.
"""

from trustrl.engines.refusals.rows import (
    Refusal,
    Scope,
    at_most,
    not_averaged_over_tokens,
    switch,
    whole_vocabulary,
)

_WHOLE_SEQUENCES = Scope("that decide on whole sequences (GSPO, TRM, MIS)", lambda needs: needs.sequences)
_OWN_LOSS = "It belongs to slime's own policy loss, which does not run. Set the region's bounds in trustrl_region."


ROWS = (
    Refusal(
        setting="--loss-type", must_be="custom_loss", default="policy_loss",
        refused=lambda value, lookup, region: value != "custom_loss",
        why="With another loss, slime never calls the region.",
    ),
    Refusal("--eps-clip", "0.2, slime's default,", _OWN_LOSS, 0.2),
    Refusal(
        setting="--eps-clip-high",
        must_be="unset",
        why=_OWN_LOSS,
        # slime itself fills an unset value with --eps-clip
        refused=lambda value, lookup, region: value not in (None, lookup("--eps-clip", 0.2)),
    ),
    Refusal("--eps-clip-c", "unset", _OWN_LOSS),
    switch(
        "--use-tis",
        "slime's own policy loss applies it, which does not run. A region anchored on the sampler already contains "
        "π'/μ; the presets tis, icepop and mis correct for it.",
        "off",
    ),
    switch("--use-opsm", "slime's own policy loss applies it, which does not run. Use the region opsm.", "off"),
    Refusal(
        setting="--advantage-estimator", must_be="an estimator of advantages alone", default="grpo",
        refused=lambda value, lookup, region: value in ("gspo", "cispo"),
        why="gspo and cispo are GRPO's advantages with a loss that does not run. Use grpo, and the region gspo or "
        "cispo.",
    ),
    switch("--use-unbiased-kl", "It would multiply the KL term by a ratio that the region does not bound.", "off"),
    switch("--custom-pg-loss-reducer-function-path", "slime's own policy loss calls it, which does not run.", "unset"),
    whole_vocabulary("--rollout-top-p", "top_p", "1.0", 1.0),
    whole_vocabulary("--rollout-top-k", "top_k", "-1", -1),
    not_averaged_over_tokens("--calculate-per-token-loss", "off"),
    at_most(
        "--context-parallel-size", 1,
        "{region} decides on whole sequences, and context parallelism passes a rank only parts of them.",
        scope=_WHOLE_SEQUENCES,
    ),
)  # fmt: skip
"""Every row, in the order of the check."""
