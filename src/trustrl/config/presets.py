"""Presets: every published region by name, with its published defaults."""

import math
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from trustrl.config.axes import Region, TrustRegion
from trustrl.config.loading import config_from_dict, config_to_dict, laid_over
from trustrl.config.regions import CISPO, DPPO, IPO, KPOP, M2PO, PPO, TROLL, MiniRL, PolicyGradient
from trustrl.config.score_centering import ScoreCentering
from trustrl.config.sequence_regions import CPPO, GMPO, GSPO, OPSM, TRM, VESPO
from trustrl.config.soft_regions import DRPO, SAPO, SPO
from trustrl.config.statistics import BinaryKL, BinaryTV, FullKL, FullTV, Ratio, SampledK2, TopKKL, TopKTV
from trustrl.config.terms import MIS, TIS, DivergenceGate, IcePop
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
    # The ablation of figure 5: masks only a token with A < 0 that has lost more than half of the probability mass.
    "dppo-minimal": lambda: DPPO(BinaryTV(max_decrease=0.5, max_increase=math.inf)),
    "troll": TROLL,
    "troll-gspo": lambda: TROLL(level="sequence"),
    "ppo": PPO,
    # The relaxation of DPPO's section 6, at the smallest α that it studies.
    "ppo-relaxed": lambda: PPO(relax_below=0.1),
    "dis": lambda: TrustRegion(Ratio(max_increase=5.0, max_decrease=0.3), direction="symmetric"),
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
    # TRL's `sequence_truncate` and `sequence_mask` with its bound.
    "tis-product": lambda: PPO(anchor="proximal", correction=TIS(max_ratio=3.0, level="sequence-product")),
    "mis-product": lambda: PPO(
        anchor="proximal", correction=MIS(min_ratio=0.0, max_ratio=3.0, level="sequence-product")
    ),
    "divergence-gate": lambda: PPO(anchor="proximal", correction=DivergenceGate()),
    "flash-reinforce": lambda: TrustRegion(BinaryKL(max_increase=3e-3), direction="symmetric", level="sequence"),
    "opsm": OPSM,
    "gmpo": GMPO,
    "vespo": VESPO,
    "m2po": M2PO,
    "minirl": MiniRL,
    "pg-is": PolicyGradient,
    "score-centering": ScoreCentering,
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
