"""Diagnosis of failed runs for `trustrl explain`: likely causes, ranked, with the numbers behind each.

evidence       the metrics that rules read, those that follow from others, and their arrangement by batch and update
recorded_gap   the sampler-trainer gap in recorded tokens, and the classes of tokens that carry it
signal_rules   rules for the training signal: non-finite values, cut completions, equal rewards, entropy; signs of harm
sampled_batches  facts about the completions of each step
completion_rules  rules on completions, their lengths, and a reward that held-out problems contradict
sampler_rules  rules for the gap between sampler and trainer, and for a replica that does not follow the trainer
step_rules     rules for how far updates move the policy
causes         a cause, its evidence, and its rank
changes        the setting to change for a cause, under the trainer's name of it
explanation    applies every rule, lists what the files could not show, and formats the result
"""

from trustrl.tools.explain.causes import Cause, Number
from trustrl.tools.explain.evidence import Evidence, Point, points
from trustrl.tools.explain.explanation import RANKING, Explanation, explain

__all__ = ["RANKING", "Cause", "Evidence", "Explanation", "Number", "Point", "explain", "points"]
