"""From hidden states to log-probs without ever holding [tokens, vocabulary]. Depends on torch alone.

`trustrl.token_logprobs` is the way in. Shape suffixes: N tokens, D hidden size, V vocabulary, K given ids, C cells.
"""
