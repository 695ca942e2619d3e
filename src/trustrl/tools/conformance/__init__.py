"""Conformance tests for policy losses: small batches with known answers, from plain arithmetic or from papers.

adapters          imports a loss by name and calls it with the signature of its framework
expectations      small batches of tokens, an expectation, its outcome, and the answer of a loss to one batch
batch_invariants  padding, masks, order, and micro-batches must not change the gradient
faults            extreme and impossible values
bounds            tokens that keep their gradient under PPO, DPPO, and policy gradient; thresholds and weight caps
corpus            runs every expectation on one loss
"""
