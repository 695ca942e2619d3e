"""The region beside a trainer's checkpoints: what a run was trained with is known when it is resumed.

Regions hold nothing else between steps, so a resumed run goes on as it would have. A region that changed in between is
legal and said aloud.
"""

import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trustrl.errors import TrustRLWarning

FILE = "trustrl_region.json"


def say_if_changed(before: Mapping[str, Any] | None, now: Mapping[str, Any], step: Any) -> None:
    """Warns when a checkpoint was trained with other settings of the region."""
    if before is not None and before != now:
        warnings.warn(
            f"The checkpoint at step {step} was trained with the region {json.dumps(before)}; it goes on with "
            f"{json.dumps(now)}.",
            TrustRLWarning,
            stacklevel=3,
        )


def write(folder: Path, settings: Mapping[str, Any]) -> None:
    """Writes the region's settings into a checkpoint's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(settings, indent=1) + "\n")


def read(folder: Path) -> dict[str, Any] | None:
    """The settings a checkpoint was trained with, if they were written."""
    file = folder / FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
