"""Rows that describe the SkyRL settings that do not work with a region.

Imports neither torch nor SkyRL at load time, so the documentation can list the rows anywhere.
"""

from typing import Any

from trustrl.config.axes import Region
from trustrl.config.sampling_parameters import describes_the_draw, logprobs_kind
from trustrl.config.terms import FixedLength, SequenceMeanTokenMean, TokenMean
from trustrl.engines.refusals.rows import (
    ON_SAMPLER,
    VOCABULARY,
    Given,
    Refusal,
    Scope,
    average_per_sequence,
    no_ages,
    no_exact,
    no_topk_of_sampler,
    not_asynchronous,
    plain_sampling,
    switch,
)

ALGORITHM, SAMPLING = "trainer.algorithm", "generator.sampling_params"
ENGINE = "generator.inference_engine.engine_init_kwargs"

REDUCTIONS = {
    "token_mean": TokenMean,
    "sequence_mean": SequenceMeanTokenMean,
    "seq_mean_token_sum_norm": FixedLength,
}
"""Maps SkyRL's `loss_reduction`s to reductions. SkyRL's trainer divides the advantages accordingly."""

WORKER = Scope(
    "Top-K, TROLL, and with their own penalty (IPO)",
    lambda needs: VOCABULARY.holds(needs) or needs.penalty is not None,
)
"""The regions that run in trustrl's subclasses of SkyRL's trainer and policy worker."""


def _default(name: str, lookup: Given) -> Any:
    """Returns SkyRL's own default."""
    return getattr(type(lookup(ALGORITHM, None))(), name)


def _corrected(correction: Any, lookup: Given, region: Region) -> bool:
    from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled

    return lookup(f"{ALGORITHM}.use_tis", False) or off_policy_correction_enabled(correction)


ALGORITHM_ROWS = (
    no_exact(f"{ALGORITHM}.policy_loss_type"),
    no_topk_of_sampler(
        f"{ALGORITHM}.policy_loss_type",
        "SkyRL keeps only the sampled token's log-prob of the sampler's answer. Set region.anchor=proximal.",
    ),
    no_ages(f"{ALGORITHM}.policy_loss_type", "SkyRL"),
    Refusal(
        setting=f"{ALGORITHM}.off_policy_correction", must_be="off", refused=_corrected,
        why="Only SkyRL's own losses apply it. A region anchored on the sampler already contains π'/μ; one with "
        "anchor=proximal takes region.correction.",
    ),
    average_per_sequence(f"{ALGORITHM}.loss_reduction", REDUCTIONS, "sequence_mean"),
    *(
        Refusal(
            setting=f"{ALGORITHM}.{name}", must_be="left at {default}",
            facts=lambda lookup, region, name=name: {"default": _default(name, lookup)},
            words={"default": "SkyRL's default"},
            refused=lambda value, lookup, region, name=name: value != _default(name, lookup),
            why=f"It belongs to SkyRL's own losses. Set a region's bounds in {ALGORITHM}.region.",
        )
        for name in ("eps_clip_low", "eps_clip_high", "clip_ratio_c", "sapo", "cispo", "dppo", "clip_cov", "kl_cov")
    ),
)  # fmt: skip
"""Rows about `trainer.algorithm`, the only settings that SkyRL passes to a loss. Losses check these rows again."""

_KEPT = (
    "μ would be renormalized over the kept tokens and π would not: SkyRL's server answers with the sampled token's "
    "log-prob alone. TRL, verl and OpenRLHF record the ids that vLLM keeps."
)

SAMPLING_ROWS = (
    Refusal(
        setting=f"{SAMPLING}.logprobs", must_be="1", scope=ON_SAMPLER,
        refused=lambda logprobs, lookup, region: logprobs is None,
        why="Without it the sampler does not record log-probs.",
    ),
    Refusal(
        setting=f"{ENGINE}.logprobs_mode", must_be="processed_logprobs", default="raw_logprobs", scope=ON_SAMPLER,
        facts=lambda lookup, region: {"temperature": f"temperature {lookup(f'{SAMPLING}.temperature', 1.0):g}"},
        words={"temperature": "a temperature other than 1"},
        refused=lambda mode, lookup, region: (
            not describes_the_draw(
                logprobs_kind(mode), temperature=lookup(f"{SAMPLING}.temperature", 1.0), truncated=False
            )
        ),
        why="At {temperature}, vLLM's raw log-probs are not those of the distribution that it samples from.",
    ),
    not_asynchronous("trainer.fully_async.enabled", "False", "SkyRL", "anchor=behavior"),
    Refusal(
        setting=f"{ALGORITHM}.temperature", must_be=f"{SAMPLING}.temperature ({{temperature}})",
        facts=lambda lookup, region: {"temperature": f"{lookup(f'{SAMPLING}.temperature', 1.0):g}"},
        words={"temperature": "or unset"},
        refused=lambda trained, lookup, region: (
            trained is not None and trained != lookup(f"{SAMPLING}.temperature", 1.0)
        ),
        why="π and μ would be computed at different temperatures.",
    ),
    *plain_sampling(SAMPLING, _KEPT),
)  # fmt: skip
"""Rows about the sampler and the trainer around the loss."""

WORKER_ROWS = (
    Refusal(
        setting="trainer.strategy", must_be="fsdp", default="fsdp", scope=WORKER,
        why="The adapter does not extend SkyRL's Megatron worker.",
    ),
    Refusal(
        setting="trainer.policy.sequence_parallel_size", must_be="1", default=1, scope=VOCABULARY,
        why="We could not run regions on split sequences.",
    ),
    switch(
        "generator.step_wise_trajectories",
        "SkyRL pads each mini-batch of steps on its own, so the rows of π' would not fit the sequences.",
        scope=VOCABULARY,
    ),
)  # fmt: skip
"""Rows about the trainer and the worker that trustrl extends."""

ROWS = (*ALGORITHM_ROWS, *WORKER_ROWS, *SAMPLING_ROWS)
"""Every row, in the order of the check."""
