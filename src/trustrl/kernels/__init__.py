"""From hidden states to log-probs without ever holding [tokens, vocabulary]. Depends on torch alone.

Shape suffixes: N tokens, D hidden size, V vocabulary, K given ids.
"""

from trustrl.kernels.chunked import token_logprobs_chunked
from trustrl.kernels.outputs import TokenLogprobs
from trustrl.kernels.reference import token_logprobs_reference

__all__ = ["TokenLogprobs", "token_logprobs_chunked", "token_logprobs_reference"]
