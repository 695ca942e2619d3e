"""Trainer callback that keeps the region in the checkpoints of trainers that derive from transformers' `Trainer`."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from trustrl.config.axes import Region
from trustrl.engines.common.region_settings import warn_if_changed
from trustrl.regions.loading import config_to_dict

KEY = "trustrl_region"
"""The key of the region in `trainer_state.json`, under `stateful_callbacks`."""


class RegionState(TrainerCallback):
    """Stores the region in `trainer_state.json`, and warns on resume if the region has changed.

    The versions of rollouts are the trainer's own step numbers, so the region has no other state.

    This is not one of transformers' exportable states. transformers restores those from a checkpoint if asked to, so
    the checkpoint's region would be compared with itself. It also cannot save a state that the checkpoint did not have.
    """

    def __init__(self, region: Region) -> None:
        self.settings = config_to_dict(region)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares the region with the checkpoint's, if training resumes from one."""
        before = state.stateful_callbacks.get(KEY)
        state.stateful_callbacks[KEY] = self.settings
        warn_if_changed(before, self.settings, state.global_step)
