"""What the engines' looks at a trainer's settings share."""

from typing import Any

from trustrl.errors import ConfigError

TRUNCATED = "μ would be renormalised over the kept words and π not: sample from the whole vocabulary."
PENALISED = "π knows nothing of the penalty that μ sampled with."


def refuse(setting: str, rule: str, got: Any, advice: str) -> None:
    """Raises the one form of error these looks have."""
    raise ConfigError(f"{setting} must be {rule} with a region, got {got!r}. {advice}")
