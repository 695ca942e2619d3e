"""Reward functions that judge completions in child processes, which a time limit can end.

A verifier may hang on what a model writes, or take all memory. In the trainer's process nothing could stop it: alarms
work in the main thread only, and threads cannot be killed. Here every function runs in a child with limits on time and
memory. A completion that breaks a limit gets 0, and the first ones warn.
"""

from trustrl.world.rewards.judges import Judges, judges_of
from trustrl.world.rewards.reward_function import RewardFunction

__all__ = ["Judges", "RewardFunction", "judges_of"]
