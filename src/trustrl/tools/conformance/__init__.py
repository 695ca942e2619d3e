"""Conformance tests for policy losses: small batches with known answers, from plain arithmetic or from papers.

adapters          imports a loss by name and calls it with the signature of its framework
trainer_adapters  the same for losses of trainer objects and of other frameworks
batches           small batches of tokens
expectations      an expectation, its outcome, and the answer of a loss to one batch
batch_invariants  padding, masks, order, and micro-batches must not change the gradient
faults            extreme and impossible values
truth_tables      which tokens keep their gradient under PPO, DPPO, and policy gradient
bounds            thresholds and weight caps, measured by bisection
corpus            runs every expectation on one loss
"""

from trustrl.tools.conformance import trainer_adapters as _  # noqa: F401, registers the adapters
