"""What regions would have done to recorded tokens, and how far apart two policies are that should be one.

`Summary` counts, `summarised` adds counts over any number of files; the verbs `trustrl audit` and `trustrl calibrate`
turn them into numbers. Knows no engine: what it reads are the files of `trustrl.recording`.
"""

from trustrl.audit.mapreduce import summarised
from trustrl.audit.summary import Summary
from trustrl.audit.verdicts import Arm, arm

__all__ = ["Arm", "Summary", "arm", "summarised"]
