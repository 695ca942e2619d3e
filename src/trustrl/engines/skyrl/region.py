"""Which region a policy loss runs with: the preset in its name, and what SkyRL's own configuration says beside it."""

from dataclasses import dataclass
from typing import Any

from skyrl.train.config import AlgorithmConfig

from trustrl.config.axes import Region
from trustrl.engines.naming import Settings, region_named


@dataclass
class RegionAlgorithmConfig(AlgorithmConfig):
    """SkyRL's `trainer.algorithm` with room for a region's settings: `trainer.algorithm.region.max_ratio=5`.

    SkyRL's configuration is typed, so new keys need a new type; `python -m trustrl.engines.skyrl` uses this one.
    """

    region: dict[str, Any] | None = None
    """Settings as `trustrl.config_from_dict` reads them. Beside a preset's name: only what differs from the preset. One
    bound given sets both where the preset's two are equal."""

    on_nonfinite: str = "drop"
    """See `trustrl.policy_loss`."""


SETTINGS = Settings(
    name="trainer.algorithm.policy_loss_type",
    region="trainer.algorithm.region",
    how=f"Start SkyRL with `python -m {__package__}` and add trainer.algorithm.region.kind=...",
)


def region_of(policy_loss_type: str, algorithm: Any) -> Region:
    """The region that SkyRL's `trainer.algorithm` asks for.

    Args:
        policy_loss_type: `trustrl-<preset>`, or `trustrl` for a region described in full.
        algorithm: A `RegionAlgorithmConfig`, or SkyRL's own, which describes nothing beside the name.

    Raises:
        ConfigError: it is none of ours, or its settings do not fit the preset.
        UnknownNameError: a `kind` nobody registered.
    """
    return region_named(policy_loss_type, getattr(algorithm, "region", None), SETTINGS)
