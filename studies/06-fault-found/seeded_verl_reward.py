"""Seeded faults in the reward function that verl calls: `seeded_verl.py` names this file."""

import json
import os
import random

from trustrl.world import verl_dataset

FAULT = json.loads(os.environ.get("SEEDED_FAULT", "{}"))
_random = random.Random(FAULT.get("seed", 0))


def reward(*args, **kwargs):
    """Returns the task's score, 0 for all, or NaN for a share of the completions."""
    score = verl_dataset.reward(*args, **kwargs)
    training = "train" in str(kwargs.get("extra_info", {}).get("split"))
    if training and FAULT.get("reward") == "constant":
        return 0.0
    if training and _random.random() < FAULT.get("nan_share", 0.0):
        return float("nan")
    return score
