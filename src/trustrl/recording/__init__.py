"""Token records: sampled tokens, the policy's log-probs at each update, the region's decisions, rewards and texts.

`Recording` holds the settings; engines take it as `recording=`. `read` loads files, `stream` reads them in pieces.
Folders and files are local paths or addresses in an object store.
Reading and writing need pyarrow: `pip install "trustrl[records]"`. The settings load without torch; the other names are
imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trustrl.recording.recording_settings import EntropySlope, Facts, NonFinite, QuantileAbove, Recording, Trigger
from trustrl.recording.run_file import read_run
from trustrl.recording.schema import COLUMNS, SEQUENCE_COLUMNS, TEXT_COLUMNS, VERSION
from trustrl.recording.sequence_tables import SequenceRows, read_sequences, read_texts

if TYPE_CHECKING:
    from trustrl.recording.record_reader import Piece, Records, read, stream
    from trustrl.recording.recorder import Recorder
    from trustrl.recording.token_rows import sequence_ids

_WITH_TORCH = {
    "Piece": "record_reader", "Records": "record_reader", "read": "record_reader", "stream": "record_reader",
    "Recorder": "recorder", "sequence_ids": "token_rows",
}  # fmt: skip

__all__ = [
    "COLUMNS", "SEQUENCE_COLUMNS", "TEXT_COLUMNS", "VERSION", "EntropySlope", "Facts", "NonFinite", "Piece",
    "QuantileAbove", "Recorder", "Recording", "Records", "SequenceRows", "Trigger", "read", "read_run",
    "read_sequences", "read_texts", "sequence_ids", "stream",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
