"""The same tokens through sampler and trainer: how far apart are they, and why?

samples     completions with the log-probs their sampler recorded
readings    what the trainer's network says about them, as set and under each usual mistake
diagnosis   which of these the record fits
report      quantiles, worst tokens and the verdict, as text or JSON
"""
