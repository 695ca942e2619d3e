"""verl's replay buffer, looked into more often: verl looks every two seconds, and a small model needs one."""

from typing import Any

from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

SECONDS = 0.05


class QuickReplayBuffer(ReplayBuffer):
    """For `trainer.v1.sampler.custom_sampler`; what it samples is verl's own choice."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"poll_interval": SECONDS, **kwargs})
