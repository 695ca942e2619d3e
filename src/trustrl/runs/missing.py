"""Contents that a run's files lack, the question each would answer, and the setting that records it."""

from collections.abc import Mapping, Sequence
from typing import Any

from trustrl.runs.run import Missing

RECORD = "Record tokens: trustrl.engines.trl.record(trainer) in TRL, TRUSTRL_RECORD=FOLDER in verl."

_MISMATCH = ("trustrl/mismatch_abs_mean", "training/rollout_probs_diff_mean", "rollout_corr/kl", "rollout_corr/k3_kl")
_METRICS: tuple[tuple[str, tuple[str, ...], str, dict[str, str]], ...] = (
    (
        "sampler-trainer mismatch", _MISMATCH,
        "Do sampler and trainer disagree about the same tokens at the same weights?",
        {
            "trl": "Sample with vLLM: TRL then logs sampling/sampling_logp_difference.",
            "verl": "Set actor_rollout_ref.rollout.calculate_log_probs=True.",
        },
    ),
    (
        "entropy", ("entropy", "trustrl/entropy"), "Does the policy stop exploring?",
        {"verl": "Set actor_rollout_ref.actor.calculate_entropy=True."},
    ),
    (
        "share of clipped or masked tokens", ("clip_share", "trustrl/masked_share"),
        "Does the trust region act, and how often?", {},
    ),
    (
        "groups with identical rewards", ("frac_reward_zero_std",), "Which share of the groups has no gradient?",
        {"verl": "Set trainer.rollout_data_dir; the rewards of each group are in the dumps."},
    ),
)  # fmt: skip
_COMPLETIONS = {
    "trl": "Set log_completions=True.",
    "verl": "Set trainer.rollout_data_dir to a folder.",
}
_EVALUATIONS = {
    "trl": 'Pass an eval_dataset and set eval_strategy="steps".',
    "verl": "Set data.val_files and trainer.test_freq.",
}
_SETTINGS = {
    "trl": 'Set report_to="tensorboard", "wandb" or "trackio": TRL then stores its arguments with the metrics. '
    "training_args.bin contains them too, but it is a pickle, which trustrl does not load.",
    "verl": "Keep hydra's folder (.hydra/config.yaml) or the console log, which prints the configuration.",
}
_ELSEWHERE = "Log it in the trainer, or record tokens with trustrl."


def missing_from(
    engine: str | None, rows: Sequence[Mapping[str, Any]], settings: Mapping[str, Any], *, completions: bool,
    evaluated: bool, recorded: bool,
) -> tuple[Missing, ...]:  # fmt: skip
    """Returns a list of the missing contents, without those that the trainer cannot know."""
    names = {name for row in rows for name, value in row.items() if value is not None}
    engine = engine or ""
    missing = [
        Missing(what, would_tell, how.get(engine, _ELSEWHERE))
        for what, any_of, would_tell, how in _METRICS
        if names.isdisjoint(any_of)
    ]
    if not rows:
        missing = [Missing("metrics", "Did the reward rise, and was training stable?", "Keep the trainer's log.")]
    if not evaluated:
        how = _EVALUATIONS.get(engine, "Evaluate on held-out problems while training.")
        missing.append(Missing("evaluations", "Does the held-out accuracy follow the training reward?", how))
    if not completions:
        how = _COMPLETIONS.get(engine, "Store the rollouts in the trainer.")
        missing.append(Missing("completions", "Which texts got which rewards?", how))
    if settings.get("updates_per_batch") is None or settings.get("temperature") is None:
        how = _SETTINGS.get(engine, "Keep the trainer's configuration next to its metrics.")
        missing.append(Missing("settings", "Which learning rate, sampling and batches trained the run?", how))
    if not recorded:
        would = "Which tokens moved, which would another region mask, and where do sampler and trainer disagree?"
        missing.append(Missing("token records", would, RECORD))
    return tuple(missing)
