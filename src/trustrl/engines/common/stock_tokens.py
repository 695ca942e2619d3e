"""Recorded tokens of a run with the trainer's own loss, and a region that observes them without any effect on training.

`run.json` of such a record has `region_role` "observed" if a region was named: its decisions are in the record, and
another loss trained. Without a region the columns of decisions are empty.
"""

import os
from dataclasses import replace

import torch
from torch import Tensor

from trustrl.config.axes import Region
from trustrl.config.terms import TokenWeights
from trustrl.core.diagnostics import Sums
from trustrl.core.policy_loss import LossOutput, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.engines.common.region_needs import more_than_sampled_tokens
from trustrl.errors import ConfigError
from trustrl.recording import Recorder, Recording
from trustrl.regions.presets import preset

FOLDER, SAMPLE, REGION = "TRUSTRL_RECORD", "TRUSTRL_RECORD_SAMPLE", "TRUSTRL_RECORD_REGION"
"""Environment variables that ask for a record: its folder or address, the share of sequences to write, and the preset
whose decisions are recorded."""


def observable(region: Region | str | None) -> Region | None:
    """Returns a region that can be observed: its settings, or a preset by name.

    Raises:
        ConfigError: If the region reads more than the sampled token, which a stock run does not compute.
        UnknownNameError: If no preset has this name.
    """
    if region is None:
        return None
    candidate = preset(region) if isinstance(region, str) else region
    if not isinstance(candidate, Region):  # pyright: ignore[reportUnnecessaryIsInstance]: callers may run unchecked
        raise ConfigError(f"region must be a trustrl region or the name of a preset, got {region!r}.")
    if more := more_than_sampled_tokens(candidate):
        raise ConfigError(
            f"region must read only the sampled token in a run with the trainer's own loss, got {candidate.kind}, "
            f"which reads {' and '.join(more)}. Train with the region, or choose one such as 'dppo-binary-tv-capped'."
        )
    return candidate


def default_sample(sequences: float | None) -> float:
    """Returns the default share of sequences to record: about 32 of a step on each rank, and at least 1%.

    Args:
        sequences: The number of sequences of a step on this rank, or None if it is unknown.

    Example:
        >>> default_sample(16), default_sample(64), default_sample(100_000), default_sample(None)
        (1.0, 0.5, 0.01, 0.01)
    """
    return min(1.0, max(0.01, 32 / sequences)) if sequences else 0.01


class StockTokens:
    """The tokens of each step, passed to the recorder, with the totals for its triggers.

    Each rank counts its own totals and fires alone: recording adds no collective to a stock run.
    """

    def __init__(self, recorder: Recorder, region: Region | None) -> None:
        self._recorder = recorder
        self._region = region
        self._sums: Sums | None = None

    @torch.no_grad()
    def add(
        self, policy: PolicyTokens, rollout: RolloutTokens, *, sequences: Tensor, step: int, update: int = 0
    ) -> None:
        """Adds one micro-batch.

        Raises:
            MissingDataError: If the run does not record the log-probs of the region's anchor.
        """
        out = None if self._region is None else _decided(policy, rollout, self._region)
        sums = _totals(policy, rollout) if out is None else out.sums
        self._sums = sums if self._sums is None else self._sums + sums
        self._recorder.add(out, policy, rollout, sequences=sequences, step=step, update=update)

    def end_step(self, step: int) -> None:
        """Ends a training step."""
        self._recorder.end_step(step, self._sums)
        self._sums = None


def _decided(policy: PolicyTokens, rollout: RolloutTokens, region: Region) -> LossOutput:
    """Returns the region's decision. The loss in the result has no meaning."""
    weights = TokenWeights(rollout.in_loss.float(), like=region.needs().reduction)
    return policy_loss(replace(policy, logp=policy.logp.detach()), rollout, region, reduction=weights)


def _totals(policy: PolicyTokens, rollout: RolloutTokens) -> Sums:
    """Returns what triggers read without a region: non-finite values, and the sum of the entropy."""
    on = rollout.in_loss
    advantage = rollout.advantage if rollout.advantage.ndim == on.ndim else rollout.advantage.unsqueeze(-1)
    values = {
        "policy": policy.logp, "behavior": rollout.behavior_logp, "proximal": rollout.proximal_logp,
        "advantage": advantage,
    }  # fmt: skip
    added = {f"fault/{name}": (~x.isfinite() & on).sum() for name, x in values.items() if x is not None}
    if policy.entropy is not None:
        known = policy.entropy.isfinite() & on
        zero = known.sum() * 0
        added |= {"entropy/kept": torch.where(known, policy.entropy, 0.0).sum(dtype=torch.float64)}
        added |= {"entropy/kept_measured": known.sum(), "entropy/masked": zero, "entropy/masked_measured": zero}
    return Sums(added, {})


def recording(sequences: float | None = None) -> Recording | None:
    """Returns the recording that the environment asks for, or None.

    Args:
        sequences: The number of sequences of a step on this rank, if it is known, for the default share.

    Raises:
        ConfigError: If a variable is invalid, or set without the folder.
    """
    folder, share = os.environ.get(FOLDER), os.environ.get(SAMPLE)
    if not folder:
        for name in (SAMPLE, REGION):
            if os.environ.get(name):
                raise ConfigError(f"{FOLDER} must be set with {name}, got nothing. Set it to the folder of the record.")
        return None
    if not share:
        return Recording(folder=folder, sample=default_sample(sequences))
    try:
        return Recording(folder=folder, sample=float(share))
    except (ValueError, ConfigError):
        raise ConfigError(f"{SAMPLE} must be a number in [0, 1], got {share!r}.") from None


def observed_region() -> Region | None:
    """Returns the region whose decisions are recorded, or None.

    Raises:
        ConfigError: If the region reads more than the sampled token.
        UnknownNameError: If no preset has this name.
    """
    return observable(os.environ.get(REGION) or None)
