"""Divergences between two policies at a token, as intervals that contain the exact value."""

from trustrl.core.divergences.full import full_kl, full_tv
from trustrl.core.divergences.interval import Interval, point, tv_limit
from trustrl.core.divergences.sampled import binary_kl, binary_tv, k1, k2, k3, ratio_gap, symmetric_binary_kl
from trustrl.core.divergences.topk import topk_kl, topk_tv

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
    "tv_limit",
]
