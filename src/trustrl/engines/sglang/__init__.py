"""SGLang as a sampler: what its answers say about the distribution that tokens were drawn from."""

from trustrl.engines.sglang.sampler_adapter import SGLangAdapter as SGLangAdapter

__all__ = ["SGLangAdapter"]
