"""Rollout records on disk: what was sampled, what the policy said about it at each update, and what the region decided.

`Recording` says what to keep; engines take it (`recording=`). `read` brings files back, `stream` in pieces. pyarrow is
needed when a file is written or read: `pip install "trustrl[records]"`.
"""

from trustrl.recording.reading import Records, read
from trustrl.recording.recorder import Recorder
from trustrl.recording.schema import COLUMNS, VERSION
from trustrl.recording.sequences import sequence_ids
from trustrl.recording.settings import Recording
from trustrl.recording.streaming import Piece, stream
from trustrl.recording.triggers import EntropySlope, Facts, NonFinite, QuantileAbove, Trigger

__all__ = [
    "COLUMNS", "VERSION", "EntropySlope", "Facts", "NonFinite", "Piece", "QuantileAbove", "Recorder", "Recording",
    "Records", "Trigger", "read", "sequence_ids", "stream",
]  # fmt: skip
