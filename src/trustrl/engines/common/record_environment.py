"""Environment variables that ask for a token record of a run with the trainer's own loss."""

import os

from trustrl.config.axes import Region
from trustrl.engines.common.stock_tokens import default_sample, observable
from trustrl.errors import ConfigError
from trustrl.recording import Recording

FOLDER, SAMPLE, REGION = "TRUSTRL_RECORD", "TRUSTRL_RECORD_SAMPLE", "TRUSTRL_RECORD_REGION"
"""Folder or address of the record; share of sequences to write; preset whose decisions are recorded."""


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
