"""Presets: every published region by name, with its published defaults."""

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from trustrl.config.axes import Region
from trustrl.config.loading import config_from_dict, config_to_dict, laid_over
from trustrl.config.regions import CISPO, DPPO, IPO, KPOP, PPO, TROLL, MiniRL, PolicyGradient
from trustrl.config.sequence_regions import CPPO, GSPO, TRM
from trustrl.config.soft_regions import DRPO, SAPO, SPO
from trustrl.config.statistics import BinaryKL, BinaryTV, FullKL, FullTV, SampledK2, TopKKL, TopKTV
from trustrl.config.terms import MIS, TIS, IcePop
from trustrl.registry import Registry

PRESETS: Registry[Callable[[], Region]] = Registry("preset")

for _name, _make in {
    "dppo-binary-tv": lambda: DPPO(BinaryTV()),
    "dppo-binary-kl": lambda: DPPO(BinaryKL()),
    "dppo-topk-tv": lambda: DPPO(TopKTV()),
    "dppo-topk-kl": lambda: DPPO(TopKKL()),
    "dppo-full-tv": lambda: DPPO(FullTV()),
    "dppo-full-kl": lambda: DPPO(FullKL()),
    # The ablation of the paper's figure 4: the mask uses π', the weight stays π/μ.
    "dppo-decoupled": lambda: DPPO(BinaryTV(), anchor="proximal", correction=TIS(max_ratio=math.inf)),
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
    # The three corrections apply to any region anchored on π'. PPO's mask is the usual choice.
    "tis": lambda: PPO(anchor="proximal", correction=TIS()),
    "icepop": lambda: PPO(anchor="proximal", correction=IcePop()),
    # MIS has no published bounds that hold at every level. These are our choice, per token.
    "mis": lambda: PPO(anchor="proximal", correction=MIS(min_ratio=0.5, max_ratio=2.0, level="token")),
    "minirl": MiniRL,
    "pg-is": PolicyGradient,
}.items():
    PRESETS.register(_name)(_make)


ALIASES = {"dppo": "dppo-binary-tv"}
"""Short names that `preset` accepts too."""


def presets() -> list[str]:
    """Returns the sorted names of all presets, without aliases."""
    return sorted(PRESETS)


def preset(name: str, **overrides: Any) -> Region:
    """Returns the named region with its published defaults and any overrides.

    Overrides follow the same rule in recipes and in engine configurations: see `override`.

    Raises:
        UnknownNameError: If there is no such preset. The message suggests the nearest name.
        ConfigError: If an override does not fit the region.

    Examples:
        >>> preset("dppo-binary-tv", max_increase=0.2).divergence.bounds
        (0.2, 0.2)
        >>> preset("dppo-binary-tv", divergence={"max_increase": 0.2}, max_ratio=5.0).max_ratio
        5.0
    """
    return override(PRESETS[ALIASES.get(name, name)](), overrides)


def override(region: Region, settings: Mapping[str, Any]) -> Region:
    """Returns the region with some settings replaced.

    A nested mapping changes only the settings that it names. A settings object or a mapping of another `kind` replaces
    the whole object. A setting of a nested object may be given by its own name if only one of them has it:
    `max_increase` is `divergence.max_increase` in DPPO. If both bounds were equal, one given bound sets both.

    Raises:
        ConfigError: If a setting does not exist or its value does not fit.
    """
    if not settings:
        return region
    given = {name: config_to_dict(value) if is_dataclass(value) else value for name, value in settings.items()}
    return config_from_dict(laid_over(config_to_dict(region), given))
