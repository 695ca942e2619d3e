"""Diagnosis of failed runs for `trustrl explain`: likely causes, ranked, with the numbers behind each.

evidence       the metrics of a run directory, arranged by batch and update
recorded_gap   the sampler-trainer gap in recorded tokens
signal_rules   rules for the training signal: non-finite values, equal rewards, entropy
sampler_rules  rules for the gap between sampler and trainer
step_rules     rules for how far updates move the policy
causes         a cause, its evidence, and its rank
explanation    applies every rule and formats the result
"""
