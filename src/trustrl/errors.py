"""Exceptions and warnings that trustrl raises.

Every exception derives from `TrustRLError`, and from the standard-library exception that a caller would expect, so
`except ValueError` keeps working.
Messages follow one form: *`<setting>` must be `<rule>`, got `<value>`. `<what to do>`.*
"""

__all__ = [
    "ConfigError", "DownloadError", "DuplicateNameError", "EngineError", "IncompatibleSamplingError",
    "MissingDataError", "MissingPackageError", "NonFiniteError", "RecordError", "TrustRLError", "TrustRLWarning",
    "UnknownNameError",
]  # fmt: skip


class TrustRLError(Exception):
    """Base class of all trustrl exceptions."""


class ConfigError(TrustRLError, ValueError):
    """Invalid setting, or two settings that contradict each other."""


class UnknownNameError(TrustRLError, KeyError):
    """Name that is not registered. The message lists the known names and suggests the nearest."""

    __str__ = Exception.__str__  # KeyError would quote the message


class DuplicateNameError(TrustRLError, ValueError):
    """Name that is already registered. Registries never overwrite."""


class RecordError(TrustRLError, ValueError):
    """Tensor of the wrong shape, dtype or device, or a file without readable records."""


class MissingDataError(RecordError):
    """Values that the region needs and the records lack, such as its anchor's log-probs."""


class IncompatibleSamplingError(TrustRLError, ValueError):
    """Ratio of two log-probs that come from differently processed distributions."""


class NonFiniteError(TrustRLError, ArithmeticError):
    """NaN, infinite or impossible value at a token in the loss, found by `check` or `on_nonfinite="raise"`."""


class EngineError(TrustRLError, RuntimeError):
    """Trainer or sampler that differs from what the adapter supports, or that failed."""


class MissingPackageError(TrustRLError, ImportError):
    """Package that an optional part of trustrl needs and that is not installed. The message names the extra."""


class DownloadError(TrustRLError, OSError):
    """File that could not be downloaded, or whose content is not the expected one."""


class TrustRLWarning(UserWarning):
    """Setting that is valid but probably unintended. The message shows the arithmetic."""
