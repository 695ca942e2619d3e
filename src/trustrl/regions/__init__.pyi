# Names of the regions for type checkers, which cannot list this folder. `python scripts/surface.py` writes them.

from collections.abc import Callable
from types import ModuleType
from typing import Any

GROUP: str
SHARED: tuple[str, ...]
OTHERS: dict[str, tuple[str, ...]]

def catalogue() -> tuple[ModuleType, ...]: ...
def installed() -> tuple[ModuleType, ...]: ...
def add_installed(add: Callable[[ModuleType], None]) -> None: ...
def classes(module: ModuleType) -> list[type[Region]]: ...
def losses(module: ModuleType) -> dict[str, Callable[..., Any]]: ...
def presets_of(module: ModuleType) -> dict[str, Callable[[], Region]]: ...

# fmt: off
__all__ = ["BinaryKL", "BinaryTV", "CISPO", "CPPO", "CleanTokens", "DPPO", "DRPO", "Decision", "DivergenceGate", "FullKL", "FullTV", "GMPO", "GSPO", "IPO", "IcePop", "Interval", "KPOP", "LogRatio", "M2PO", "MIS", "MiniRL", "Needs", "OPSM", "PPO", "PolicyGradient", "PrefixBudget", "Ratio", "Region", "SAPO", "SPO", "SampledK2", "SampledK3", "ScoreCentering", "SequenceRatio", "SymmetricBinaryKL", "TIS", "TRM", "TROLL", "TopKKL", "TopKTV", "TrustRegion", "VESPO", "cispo_loss", "dppo_kl_loss", "dppo_loss", "dppo_topk_loss", "drpo_loss", "gmpo_loss", "gspo_loss", "ipo_loss", "kpop_loss", "m2po_loss", "minirl_loss", "opsm_loss", "policy_gradient_loss", "ppo_loss", "register_region", "sapo_loss", "spo_loss", "trm_loss", "vespo_loss"]
from trustrl.config.axes import Needs as Needs, PrefixBudget as PrefixBudget, Region as Region
from trustrl.config.statistics import BinaryKL as BinaryKL, BinaryTV as BinaryTV, FullKL as FullKL, FullTV as FullTV, LogRatio as LogRatio, Ratio as Ratio, SampledK2 as SampledK2, SampledK3 as SampledK3, SequenceRatio as SequenceRatio, SymmetricBinaryKL as SymmetricBinaryKL, TopKKL as TopKKL, TopKTV as TopKTV
from trustrl.config.terms import MIS as MIS, TIS as TIS, DivergenceGate as DivergenceGate, IcePop as IcePop
from trustrl.core.clean import CleanTokens as CleanTokens
from trustrl.core.decision import Decision as Decision
from trustrl.core.divergences import Interval as Interval
from trustrl.regions.loading import register_region as register_region
from trustrl.regions.cispo import CISPO as CISPO, cispo_loss as cispo_loss
from trustrl.regions.cppo import CPPO as CPPO
from trustrl.regions.dppo import DPPO as DPPO, dppo_kl_loss as dppo_kl_loss, dppo_loss as dppo_loss, dppo_topk_loss as dppo_topk_loss
from trustrl.regions.drpo import DRPO as DRPO, drpo_loss as drpo_loss
from trustrl.regions.gmpo import GMPO as GMPO, gmpo_loss as gmpo_loss
from trustrl.regions.gspo import GSPO as GSPO, gspo_loss as gspo_loss
from trustrl.regions.ipo import IPO as IPO, ipo_loss as ipo_loss
from trustrl.regions.kpop import KPOP as KPOP, kpop_loss as kpop_loss
from trustrl.regions.m2po import M2PO as M2PO, m2po_loss as m2po_loss
from trustrl.regions.minirl import MiniRL as MiniRL, minirl_loss as minirl_loss
from trustrl.regions.opsm import OPSM as OPSM, opsm_loss as opsm_loss
from trustrl.regions.policy_gradient import PolicyGradient as PolicyGradient, policy_gradient_loss as policy_gradient_loss
from trustrl.regions.ppo import PPO as PPO, ppo_loss as ppo_loss
from trustrl.regions.sapo import SAPO as SAPO, sapo_loss as sapo_loss
from trustrl.regions.score_centering import ScoreCentering as ScoreCentering
from trustrl.regions.spo import SPO as SPO, spo_loss as spo_loss
from trustrl.regions.trm import TRM as TRM, trm_loss as trm_loss
from trustrl.regions.troll import TROLL as TROLL
from trustrl.regions.trust_region import TrustRegion as TrustRegion
from trustrl.regions.vespo import VESPO as VESPO, vespo_loss as vespo_loss
