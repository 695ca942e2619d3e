"""Rollout records on disk: what was sampled, what the policy said about it at each update, and what the region decided.

`Recording` says what to keep; engines take it (`recording=`). `read` brings files back, `stream` in pieces. pyarrow is
needed when a file is written or read: `pip install "trustrl[records]"`. Settings load without torch; the rest is loaded
when first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trustrl.recording.schema import COLUMNS, VERSION
from trustrl.recording.settings import Recording
from trustrl.recording.triggers import EntropySlope, Facts, NonFinite, QuantileAbove, Trigger

if TYPE_CHECKING:
    from trustrl.recording.reading import Records, read
    from trustrl.recording.recorder import Recorder
    from trustrl.recording.sequences import sequence_ids
    from trustrl.recording.streaming import Piece, stream

_WITH_TORCH = {
    "Records": "reading", "read": "reading", "Recorder": "recorder", "sequence_ids": "sequences", "Piece": "streaming",
    "stream": "streaming",
}  # fmt: skip

__all__ = [
    "COLUMNS", "VERSION", "EntropySlope", "Facts", "NonFinite", "Piece", "QuantileAbove", "Recorder", "Recording",
    "Records", "Trigger", "read", "sequence_ids", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
