"""Kernels that turn hidden states into log-probs without a [tokens, vocabulary] array. Depends on torch alone.

Call them through `trustrl.token_logprobs`. Shape suffixes: N tokens, D hidden size, V vocabulary, K given ids, C cells.
"""
