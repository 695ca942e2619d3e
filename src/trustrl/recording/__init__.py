"""Token records on disk: sampled tokens, the policy's log-probs at each update, and the region's decisions.

`Recording` holds the settings; engines take it as `recording=`. `read` loads files, `stream` reads them in pieces.
Reading and writing need pyarrow: `pip install "trustrl[records]"`. The settings load without torch; the other names are
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trustrl.recording.recording_settings import EntropySlope, Facts, NonFinite, QuantileAbove, Recording, Trigger
from trustrl.recording.schema import COLUMNS, VERSION

if TYPE_CHECKING:
    from trustrl.recording.record_reader import Piece, Records, read, stream
    from trustrl.recording.recorder import Recorder
    from trustrl.recording.token_rows import sequence_ids

_WITH_TORCH = {
    "Piece": "record_reader", "Records": "record_reader", "read": "record_reader", "stream": "record_reader",
    "Recorder": "recorder", "sequence_ids": "token_rows",
}  # fmt: skip

__all__ = [
    "COLUMNS", "VERSION", "EntropySlope", "Facts", "NonFinite", "Piece", "QuantileAbove", "Recorder", "Recording",
    "Records", "Trigger", "read", "sequence_ids", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
