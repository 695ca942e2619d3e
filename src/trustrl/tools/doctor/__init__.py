"""Machine checks for `trustrl doctor`: versions, open ports, insecure settings, threads, and disk.

None of the checks imports torch or an engine. Each returns findings.

package_versions  installed versions compared with the requirements that packages declare
ports             listening sockets of Ray and vLLM that the network can reach
environment       insecure environment variables, secrets, and thread counts
storage           the model cache: writable, size, free space
examination       runs every check and formats the result as text or JSON
"""

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "note"]
"""error: it will break a run, or others can abuse it. warning: it might. note: worth knowing."""

LEVELS: tuple[Level, ...] = ("error", "warning", "note")


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem on this machine: what it is, why it matters, and how to fix it."""

    level: Level
    what: str
    why: str
    do: str
