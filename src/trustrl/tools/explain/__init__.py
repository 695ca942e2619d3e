"""Diagnosis of failed runs for `trustrl explain`: likely causes, ranked, with the numbers behind each.

metric_sources  the metrics that rules read, and those that follow from others
evidence        the metrics of a run, arranged by batch and update
recorded_gap    the sampler-trainer gap in recorded tokens, and the classes of tokens that carry it
harm            signs that a run was harmed
signal_rules    rules for the training signal: non-finite values, cut completions, equal rewards, entropy
replica_rules   rule for a replica of the sampler that does not follow the trainer
sampler_rules   rules for the gap between sampler and trainer
step_rules      rules for how far updates move the policy
unchecked       what the files could not show
causes          a cause, its evidence, and its rank
explanation     applies every rule and formats the result
"""
