"""Every error trustrl raises on purpose, under one root.

Each class also inherits the standard-library error a caller would expect, so `except ValueError` keeps working.
Messages follow one form: *`<setting>` must be `<rule>`, got `<value>`. `<what to do>`.*
"""


class TrustRLError(Exception):
    """Root of every error raised on purpose by trustrl."""


class ConfigError(TrustRLError, ValueError):
    """A setting is out of range, or two settings contradict each other."""


class UnknownNameError(TrustRLError, KeyError):
    """A name is in no registry; the message lists the known ones and the nearest."""

    __str__ = Exception.__str__  # KeyError would show the message in quotes


class DuplicateNameError(TrustRLError, ValueError):
    """A name is registered already; registries never overwrite."""


class RecordError(TrustRLError, ValueError):
    """A tensor has the wrong shape, dtype or device, or a file holds no records that can be read."""


class MissingDataError(RecordError):
    """The region needs something the records do not carry, such as its anchor's log-probs."""


class IncompatibleSamplingError(TrustRLError, ValueError):
    """The two sides of a ratio were taken from differently processed distributions."""


class NonFiniteError(TrustRLError, ArithmeticError):
    """A value at a token in the loss is NaN, infinite or impossible: `check`, or `on_nonfinite="raise"`, found it."""


class EngineError(TrustRLError, RuntimeError):
    """A trainer or sampler is not what our adapter was written for, or did not do what it was asked."""


class MissingPackageError(TrustRLError, ImportError):
    """A package that an optional part of trustrl needs is not installed; the message names the extra."""


class DownloadError(TrustRLError, OSError):
    """A file could not be fetched, or is not the one that was meant."""


class TrustRLWarning(UserWarning):
    """A setting is legal but probably not what was meant; the message does the arithmetic."""
