"""Seeded faults in the reward function that verl calls: `seeded_verl.py` names this file."""

import json
import os
import random
import sys
from pathlib import Path

from trustrl.world import verl_dataset

sys.path.insert(0, str(Path(__file__).parent))  # verl loads this file by its path
from faulty_scores import faulty_score

FAULT = json.loads(os.environ.get("SEEDED_FAULT", "{}"))
_random = random.Random(FAULT.get("seed", 0))


def reward(*args, **kwargs):
    """Returns the task's score, 0 for all, or NaN for a share of the completions."""
    score = verl_dataset.reward(*args, **kwargs)
    training = "train" in str(kwargs.get("extra_info", {}).get("split"))
    if training and "counted" in FAULT:
        return third(score, kwargs.get("solution_str", args[1] if len(args) > 1 else ""))
    if training and FAULT.get("reward") == "constant":
        return 0.0
    if training and _random.random() < FAULT.get("nan_share", 0.0):
        return float("nan")
    return score


def third(score, text):
    """Returns the score of the third edition. A file counts the completions over all processes."""
    with open(FAULT["counted"], "ab") as counted:
        counted.write(b".")
        batch = (counted.tell() - 1) // FAULT["in_batch"]
    faulty = faulty_score(score, text, FAULT, batch, FAULT["batches"], _random)
    return float("nan") if faulty is None else faulty  # verl takes no None
