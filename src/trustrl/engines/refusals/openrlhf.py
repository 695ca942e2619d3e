"""Rows that describe the OpenRLHF arguments that do not work with a region.

Imports neither torch nor OpenRLHF, so the documentation can list the rows anywhere.
"""

from dataclasses import replace
from typing import Any

from trustrl.config.axes import Region, reads_ages
from trustrl.config.terms import SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    AGES,
    ON_SAMPLER,
    ON_TRAINER_ALONE,
    VOCABULARY,
    VOCABULARY_OR_TRUNCATED,
    Given,
    Refusal,
    Scope,
    at_most,
    average_per_sequence,
    no_exact,
    not_asynchronous,
    switch,
)

LEVEL, MODE = "--algo.advantage.is_correction_level", "--actor.loss_agg_mode"
RECORDED = Scope("anchored on the sampler, with max_staleness, and all with truncated sampling", lambda needs: True)

REDUCTIONS = {"token-mean": TokenMean, "seq-mean-token-mean": SequenceMeanTokenMean}
"""Maps OpenRLHF's `--actor.loss_agg_mode` to reductions."""

_BOUNDS = "It belongs to OpenRLHF's own loss. Set a region's bounds in --trustrl.region."
_CORRECTION = (
    "OpenRLHF's own loss applies it, and a region replaces that loss. Use a preset with a correction: tis, icepop, "
    "mis, divergence-gate."
)


def truncated(lookup: Given) -> bool:
    """Returns whether tokens are drawn from a part of the vocabulary. OpenRLHF passes vLLM top_p alone."""
    return lookup("--rollout.top_p", 1.0) < 1.0


def _records_sampler(lookup: Given, region: Region) -> bool:
    """Returns whether the run reads what vLLM recorded of each token."""
    return ON_SAMPLER.holds(region.needs()) or truncated(lookup) or reads_ages(region)


def _where_vocabulary_is_read(row: Refusal) -> Refusal:
    """Returns a row for regions that read more than the sampled token, or their log-probs inside the kept ids."""
    inner = row.refused
    assert inner is not None

    def refused(got: Any, lookup: Given, region: Region) -> bool:
        return inner(got, lookup, region) and (VOCABULARY.holds(region.needs()) or truncated(lookup))

    return replace(row, refused=refused, scope=VOCABULARY_OR_TRUNCATED)


_VOCABULARY = (
    no_exact("--trustrl.region"),
    *map(
        _where_vocabulary_is_read,
        (
            at_most(
                "--ds.zero_stage", 2,
                "{region} reads the output layer's weight, of which ZeRO-3 holds a part on each rank.",
            ),
            switch(
                "--ds.packing_samples",
                "It needs flash attention, which we could not run with {region}. Batches with padding work.",
                "left out", words={"region": "such a region"},
            ),
            at_most("--ds.ring_attn_size", 1, "We could not run {region} on split sequences."),
            at_most("--ds.tensor_parallel_size", 1, "{region} reads the output layer's weight, which it splits."),
            switch(
                "--ds.deepcompile", "It compiles the model's forward pass, in which {region} reads the vocabulary.",
                "left out",
            ),
            at_most("--data.max_images_per_prompt", 0, "{region} on images is not supported."),
        ),
    ),
    Refusal(
        "--data.max_images_per_prompt", "0",
        "Versions travel where OpenRLHF puts images. Leave max_staleness out.", 0,
        refused=lambda got, lookup, region: got > 0 and reads_ages(region), scope=AGES,
    ),
)  # fmt: skip

ROWS = (
    *_VOCABULARY,
    Refusal(
        setting=LEVEL, must_be="token", default="off", scope=RECORDED,
        refused=lambda level, lookup, region: level != "token" and _records_sampler(lookup, region),
        why="Only then does OpenRLHF ask vLLM for log-probs. The region replaces the loss that would apply the "
        "correction, so nothing is corrected twice.",
    ),
    Refusal(
        LEVEL, "off", _CORRECTION, "off", scope=ON_TRAINER_ALONE,
        refused=lambda level, lookup, region: level != "off" and not _records_sampler(lookup, region),
    ),
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
)  # fmt: skip
"""Every row, in the order of the check."""
