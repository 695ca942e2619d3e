"""Limits on the memory and the time that reading files from outside may take.

A reader counts before it decodes: values × width, not bytes on disk. `TRUSTRL_READ_LIMITS=4` multiplies every limit of
this module by 4. No torch.
"""

import math
import os

from trustrl.errors import ConfigError, RecordError

VARIABLE = "TRUSTRL_READ_LIMITS"
"""Environment variable with the factor on all limits."""

DECODED = 1_000_000_000
"""Bytes of memory that the values of one file may take, and the metrics of one run."""


class OverLimit(RecordError):
    """File whose content would take more memory or time than allowed. The message names the limit and the variable."""


def factor() -> float:
    """Returns the factor on all limits.

    Raises:
        ConfigError: If the variable is set to anything but a positive number.
    """
    text = os.environ.get(VARIABLE) or "1"
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= 1e6:
        raise ConfigError(f"{VARIABLE} must be a number above 0 and up to 1,000,000, got {text!r:.80}.")
    return value


def check(needed: float, limit: float, what: str, unit: str = "bytes of memory") -> None:
    """Checks an amount against a limit.

    Args:
        needed: The amount, or a bound on it.
        limit: The limit, for a factor of 1.
        what: The thing that takes the amount, such as "its values".
        unit: The unit of the amount.

    Raises:
        OverLimit: If the amount is larger.

    Example:
        >>> check(5e9, DECODED, "its values")
        Traceback (most recent call last):
        ...
        trustrl.limits.OverLimit: its values may take 5,000,000,000 bytes of memory, and the limit is 1,000,000,000. \
Set TRUSTRL_READ_LIMITS=5 to read it all the same
    """
    allowed = limit * factor() if needed > min(limit, 1000) else limit
    if needed > allowed:
        raise OverLimit(
            f"{what} may take {int(needed):,} {unit}, and the limit is {int(allowed):,}. {advice(needed / limit)}"
        )


def advice(times: float) -> str:
    """Returns the phrase that says how to raise a limit to this many times its default."""
    return f"Set {VARIABLE}={math.ceil(times)} to read it all the same"


class Meter:
    """Sum of what the values of a file or a run take, checked against `DECODED` while it grows."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.taken = 0

    def add(self, num: int) -> None:
        """Adds bytes.

        Raises:
            OverLimit: If there are too many.
        """
        before, self.taken = self.taken, self.taken + num
        if before >> 20 != self.taken >> 20:  # the variable is read once for each MiB
            check(self.taken, DECODED, self.what)
