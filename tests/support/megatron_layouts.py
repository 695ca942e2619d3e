"""The layouts of verl's Megatron engine in which every kind of region is compared with a plain model."""

from typing import Any, NamedTuple


class Layout(NamedTuple):
    ranks: int
    settings: dict[str, Any]
    """Settings of tests/engines/verl_megatron/verl_megatron.py."""

    quick: bool = False
    """True for the layouts that CI runs."""


LAYOUTS = {
    "tensor parallel 2": Layout(2, {"tp": 2}, quick=True),
    "tensor parallel 2, no sequence parallel": Layout(2, {"tp": 2, "sequence_parallel": False}),
    "tensor parallel 2, padded sequences": Layout(2, {"tp": 2, "packed": False}),
    "tensor parallel 2, tied head": Layout(2, {"tp": 2, "tied": True}),
    "tensor parallel 2, recomputed activations": Layout(2, {"tp": 2, "recompute": True}),
    "tensor parallel 2, padded vocabulary": Layout(2, {"tp": 2, "pad_vocabulary": 48, "vocabulary": True}),
    "data parallel 2": Layout(2, {}),
    "pipeline parallel 2": Layout(2, {"pp": 2}, quick=True),
    "virtual pipeline 2 × 2": Layout(2, {"pp": 2, "vpp": 2, "layers": 4, "micro": 1}),
    "context parallel 2": Layout(2, {"cp": 2}, quick=True),
    "tensor 2 × pipeline 2": Layout(4, {"tp": 2, "pp": 2}),
    "tensor 2 × context 2": Layout(4, {"tp": 2, "cp": 2}),
    "experts, expert parallel 2": Layout(2, {"moe": True, "ep": 2}),
    "experts, tensor parallel 2": Layout(2, {"moe": True, "tp": 2}),
    "experts, tensor 2 × expert 2": Layout(4, {"moe": True, "tp": 2, "ep": 2, "etp": 1}),
    "experts, expert parallel 2, replay R2": Layout(2, {"moe": True, "ep": 2, "replay": "R2"}),
    "experts, expert parallel 2, replay R3": Layout(2, {"moe": True, "ep": 2, "replay": "R3"}, quick=True),
}

TOLERANCE = 5e-6
"""The largest ‖found − wanted‖ / ‖wanted‖ of a gradient over the parameters of all ranks, in float32."""

CONTROLS = {
    "hidden gradient not summed": Layout(2, {"tp": 2, "sequence_parallel": False, "unsummed": True}),
    "oracle routed natively under R3": Layout(2, {"moe": True, "ep": 2, "replay": "R3", "routed_natively": True}),
}
"""Layouts with something left out, which must exceed the tolerance by far."""
