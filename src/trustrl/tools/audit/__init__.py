"""Replay of regions on recorded tokens, for `trustrl audit`.

`TokenCounts` holds counts that add, and `count_records` adds them over any number of files. It reads the files of
`trustrl.recording` and does not depend on an engine. Other tools import from this package only, not from its modules.

region_replay  the verdict of a region on recorded tokens: replayed, or bounded
record_anchor  the policy that tokens are measured from
token_counts   counts of verdicts, which add over files
mapreduce      counting over many files, in processes or on Ray
audit_json     counts as named numbers, the object behind `--json`
audit_text     the same for the terminal
"""

from trustrl.tools.audit.audit_json import record_files, recorded_regions, share
from trustrl.tools.audit.audit_text import percent, table, wrapped
from trustrl.tools.audit.mapreduce import count_records
from trustrl.tools.audit.record_anchor import anchor_in, anchor_note, measured_from
from trustrl.tools.audit.region_replay import Arm, Replay, arm, recorded_arm
from trustrl.tools.audit.token_counts import TokenCounts, age

__all__ = [
    "Arm", "Replay", "TokenCounts", "age", "anchor_in", "anchor_note", "arm", "count_records", "measured_from",
    "percent", "record_files", "recorded_arm", "recorded_regions", "share", "table", "wrapped",
]  # fmt: skip
