"""Rows that describe the OpenRLHF arguments that do not work with a region.

Imports neither torch nor OpenRLHF, so the documentation can list the rows anywhere.
"""

from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    EVERY,
    ON_SAMPLER,
    ON_TRAINER_ALONE,
    VOCABULARY,
    Refusal,
    at_most,
    average_per_sequence,
    no_exact,
    no_topk_of_sampler,
    not_asynchronous,
    switch,
    unfit,
    whole_vocabulary,
)

LEVEL, MODE = "--algo.advantage.is_correction_level", "--actor.loss_agg_mode"
REDUCTIONS = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
"""Maps OpenRLHF's `--actor.loss_agg_mode` to reductions."""

_BOUNDS = "It belongs to OpenRLHF's own loss. Set a region's bounds in --trustrl.region."
_CORRECTION = (
    "OpenRLHF's own loss applies it, and a region replaces that loss. Use a preset with a correction: tis, icepop, "
    "mis, divergence-gate."
)


_VOCABULARY = (
    no_exact("--trustrl.region"),
    no_topk_of_sampler(
        "--trustrl.region",
        'OpenRLHF asks vLLM for the sampled token\'s log-prob only. Set "anchor": "proximal" on the region.',
    ),
    unfit(
        "--trustrl.region", "without max_staleness",
        "OpenRLHF does not record which weights sampled a token. TRL and verl do.", EVERY,
        refused=lambda got, lookup, region: getattr(region, "max_staleness", None) is not None,
    ),
    at_most(
        "--ds.zero_stage", 2, "{region} reads the output layer's weight, of which ZeRO-3 holds a part on each rank.",
        scope=VOCABULARY,
    ),
    switch(
        "--ds.packing_samples",
        "It needs flash attention, which we could not run with {region}. Batches with padding work.", "left out",
        scope=VOCABULARY, words={"region": "such a region"},
    ),
    at_most("--ds.ring_attn_size", 1, "We could not run {region} on split sequences.", scope=VOCABULARY),
    at_most(
        "--ds.tensor_parallel_size", 1, "{region} reads the output layer's weight, which it splits.", scope=VOCABULARY
    ),
    switch(
        "--ds.deepcompile", "It compiles the model's forward pass, in which {region} reads the vocabulary.", "left out",
        scope=VOCABULARY,
    ),
    at_most("--data.max_images_per_prompt", 0, "{region} on images is not supported.", scope=VOCABULARY),
)  # fmt: skip

ROWS = (
    *_VOCABULARY,
    Refusal(
        setting=LEVEL, must_be="token", default="off", scope=ON_SAMPLER,
        refused=lambda level, lookup, region: level != "token",
        why="Only then does OpenRLHF ask vLLM for log-probs. The region replaces the loss that would apply the "
        "correction, so nothing is corrected twice.",
    ),
    Refusal(LEVEL, "off", _CORRECTION, "off", scope=ON_TRAINER_ALONE),
    Refusal("--actor.eps_clip", "left at 0.2", _BOUNDS, 0.2),
    Refusal(
        setting="--actor.eps_clip_low_high",
        must_be="left out",
        why=_BOUNDS,
        # OpenRLHF itself fills in an unset value with --actor.eps_clip.
        refused=lambda bounds, lookup, region: (
            bounds is not None and tuple(bounds) != (lookup("--actor.eps_clip", 0.2),) * 2
        ),
    ),
    Refusal("--actor.dual_clip", "left out", _BOUNDS),
    Refusal(
        setting="--actor.policy_loss_type", must_be="left at ppo", default="ppo",
        why="It belongs to OpenRLHF's own loss. Use --trustrl.region gspo.",
    ),
    Refusal("--algo.advantage.is_correction_mode", "left at mask", _CORRECTION, "mask"),
    Refusal("--algo.advantage.is_correction_gating", "left at ratio", _CORRECTION, "ratio"),
    Refusal(
        setting="--algo.advantage.is_correction_threshold", must_be="left at (0.5, 5.0)", default=(0.5, 5.0),
        refused=lambda bounds, lookup, region: tuple(bounds) != (0.5, 5.0), why=_CORRECTION,
    ),
    average_per_sequence(MODE, REDUCTIONS, "seq-mean-token-mean", "token-mean"),
    not_asynchronous("--train.async_enable", "left out", "OpenRLHF", '"anchor": "behavior"'),
    whole_vocabulary(
        "--rollout.top_p", "top_p", "1.0", 1.0,
        "μ would be renormalized over the kept tokens and π would not: OpenRLHF does not record the ids that vLLM "
        "keeps. TRL and verl do.",
    ),
)  # fmt: skip
"""Every row, in the order of the check."""
