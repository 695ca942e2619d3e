"""Every published region by name, with its published defaults."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.regions import (
    CISPO,
    CPPO,
    DPPO,
    DRPO,
    GSPO,
    IPO,
    KPOP,
    PPO,
    SAPO,
    SPO,
    TRM,
    TROLL,
    MiniRL,
    PolicyGradient,
)
from trustrl.config.statistics import BinaryKL, BinaryTV, FullKL, FullTV, SampledK2, TopKKL, TopKTV
from trustrl.config.terms import MIS, TIS, IcePop
from trustrl.errors import ConfigError
from trustrl.registry import Registry

PRESETS: Registry[Callable[[], Region]] = Registry("preset")

for _name, _make in {
    "dppo-binary-tv": lambda: DPPO(BinaryTV()),
    "dppo-binary-kl": lambda: DPPO(BinaryKL()),
    "dppo-topk-tv": lambda: DPPO(TopKTV()),
    "dppo-topk-kl": lambda: DPPO(TopKKL()),
    "dppo-full-tv": lambda: DPPO(FullTV()),
    "dppo-full-kl": lambda: DPPO(FullKL()),
    "troll": TROLL,
    "ppo": PPO,
    "gspo": GSPO,
    "cispo": CISPO,
    "sapo": SAPO,
    "spo": SPO,
    "drpo": DRPO,
    "cppo": CPPO,
    "ipo": IPO,
    "kpop": KPOP,
    "trm": TRM,
    "trm-full-kl": lambda: TRM(FullKL()),
    "trm-sampled": lambda: TRM(SampledK2()),
    # The three corrections multiply any region anchored on π'; PPO's mask is the usual companion.
    "tis": lambda: PPO(anchor="proximal", correction=TIS()),
    "icepop": lambda: PPO(anchor="proximal", correction=IcePop()),
    # MIS has no published bounds that hold at every level; these are ours, per token.
    "mis": lambda: PPO(anchor="proximal", correction=MIS(min_ratio=0.5, max_ratio=2.0, level="token")),
    "minirl": MiniRL,
    "pg-is": PolicyGradient,
}.items():
    PRESETS.register(_name)(_make)


def presets() -> list[str]:
    """The names `preset` knows, sorted."""
    return sorted(PRESETS)


def preset(name: str, **overrides: Any) -> Region:
    """The named region with its published defaults, any field overridden.

    Raises:
        UnknownNameError: no preset has this name; the message suggests the nearest.
        ConfigError: an override does not fit the region.

    Examples:
        >>> preset("dppo-binary-tv", max_ratio=5.0).max_ratio
        5.0
    """
    region: Any = PRESETS[name]()
    try:
        return replace(region, **overrides) if overrides else region
    except TypeError as error:
        raise ConfigError(
            f"preset {name!r} builds a {type(region).__name__}, which refused {sorted(overrides)}: {error}."
        ) from None
