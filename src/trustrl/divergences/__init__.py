"""How far two policies are apart at a token, as an interval that holds the truth. No advantage, no threshold here."""

from trustrl.divergences.full import full_kl, full_tv
from trustrl.divergences.interval import Interval, point
from trustrl.divergences.sampled import binary_kl, binary_tv, k1, k2, k3, ratio_gap, symmetric_binary_kl
from trustrl.divergences.topk import topk_kl, topk_tv

__all__ = [
    "Interval",
    "binary_kl",
    "binary_tv",
    "full_kl",
    "full_tv",
    "k1",
    "k2",
    "k3",
    "point",
    "ratio_gap",
    "symmetric_binary_kl",
    "topk_kl",
    "topk_tv",
]
