"""The region in TRL's checkpoints: what a run was trained with is known when it is resumed."""

from typing import Any

from transformers.trainer_callback import TrainerCallback

from trustrl.config.axes import Region
from trustrl.config.loading import config_to_dict
from trustrl.engines.checkpoints import say_if_changed

KEY = "trustrl_region"
"""Where `trainer_state.json` holds the region, under `stateful_callbacks`."""


class RegionState(TrainerCallback):
    """Writes the region into `trainer_state.json` and compares it on resume.

    The versions of rollouts are TRL's own step numbers, so nothing else is kept.

    Not one of transformers' exportable states: those it restores from a checkpoint if asked to, so that the
    checkpoint's region would be compared with itself, and it cannot save one that the checkpoint did not have.
    """

    def __init__(self, region: Region) -> None:
        self.settings = config_to_dict(region)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compares with the checkpoint's, if there is one."""
        before = state.stateful_callbacks.get(KEY)
        state.stateful_callbacks[KEY] = self.settings
        say_if_changed(before, self.settings, state.global_step)
