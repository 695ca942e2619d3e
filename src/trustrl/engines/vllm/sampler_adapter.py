"""vLLM's half of the sampler contract (see `trustrl.engines.common.sampler_contract`).

Sampled ids, log μ and the top-K come from vLLM's own processed log-probs, kept as arrays by `decode_record`. Kept ids
come from there too: vLLM's `return_sampling_mask` is an argument of the engine, for all requests, that its Model Runner
V2 alone reads. Versions are vLLM's `weight_versions`, where they are numbers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Self

import numpy as np

from trustrl.config.sampling_parameters import PROCESSED, shaping
from trustrl.engines.common.kept_columns import KeptColumn
from trustrl.engines.common.sampled_record import UNKNOWN, SampledRecord, version_number
from trustrl.engines.common.sampler_contract import Request, Wanted, draws_from_a_part, require_recordable
from trustrl.engines.vllm.decode_record import DecodedLogprobs, install, recording
from trustrl.engines.vllm.options import on_cpu
from trustrl.errors import EngineError

_FIELDS = frozenset({"logprobs", "extra_args"})


@dataclass(frozen=True, kw_only=True)
class VLLMAdapter:
    """Contract of one vLLM engine, from its settings."""

    vocabulary: int
    logprobs_mode: str = PROCESSED
    max_logprobs: int = -1
    """The largest K that the engine allows; −1 for no limit."""

    speculates: bool = False
    """True for speculative decoding."""

    is_cpu: bool = False
    sampling_fields: frozenset[str] = _FIELDS
    """Names of the fields of `SamplingParams`."""

    @classmethod
    def of(cls, vllm_config: Any) -> Self:
        """Returns the adapter of an engine, and installs the recorder in this process.

        Args:
            vllm_config: `llm.llm_engine.vllm_config`, or `AsyncLLM.vllm_config`.

        Raises:
            EngineError: If the installed vLLM creates log-probs in a way that the recorder does not support.
        """
        install()
        model = vllm_config.model_config
        return cls(
            vocabulary=model.get_vocab_size(),
            logprobs_mode=model.logprobs_mode,
            max_logprobs=model.max_logprobs,
            speculates=vllm_config.speculative_config is not None,
            is_cpu=on_cpu(),
            sampling_fields=frozenset(import_module("vllm").SamplingParams.__struct_fields__),
        )

    def refusal(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> str | None:
        """Returns the reason why vLLM cannot record a request, with the fix; None if it can."""
        missing = _FIELDS - self.sampling_fields
        if missing:
            return (
                f"vLLM's SamplingParams must have the fields {sorted(_FIELDS)}, and {sorted(missing)} are missing. "
                "Install a vllm version listed in trustrl's documentation."
            )
        changed = draws_from_a_part(sampling_params) or bool(shaping(sampling_params.get))
        if self.logprobs_mode != PROCESSED and (changed or self.logprobs_mode != "raw_logprobs"):
            return (
                f"logprobs_mode must be {PROCESSED!r} to record μ, got {self.logprobs_mode!r}. Other modes return "
                "log-probs before temperature, penalties and truncation, or no log-probs. Start vLLM with "
                f"logprobs_mode={PROCESSED}."
            )
        if self.speculates and self.is_cpu:
            return (
                "speculative_config must be None on a CPU, got one. vLLM's rejection sampler reads uninitialized "
                "temperatures there, and its log-probs are NaN. Start vLLM without speculative decoding."
            )
        columns = self._parameters(wanted, {})["logprobs"]
        if self.max_logprobs != -1 and columns > self.max_logprobs:
            return (
                f"max_logprobs must be {columns} or more to record {wanted.top_k} ids and at most {wanted.max_kept} "
                f"kept ids, got {self.max_logprobs}. Start vLLM with max_logprobs={columns}."
            )
        return None

    def request(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> Request:
        """Returns the request in vLLM's words: all of it is `SamplingParams`.

        Raises:
            EngineError: If vLLM cannot record it.
        """
        require_recordable(self, wanted, sampling_params)
        own = dict(sampling_params)
        return Request({**own, **self._parameters(wanted, own.pop("extra_args", None) or {})}, {})

    def record(self, answer: Any, wanted: Wanted) -> SampledRecord:
        """Returns the record of one completion.

        Args:
            answer: vLLM's `CompletionOutput`.
            wanted: The data that its request asked for.

        Returns:
            The record, as copies that can be pickled.

        Raises:
            EngineError: If the recorder did not see the request, or if the routed experts are missing.
        """
        logprobs = answer.logprobs
        if not isinstance(logprobs, DecodedLogprobs):
            raise EngineError(
                "vLLM must return the log-probs of a recorded request as DecodedLogprobs, got "
                f"{type(logprobs).__name__}. Call trustrl.engines.vllm.decode_record.install() in this process, and "
                "send the parameters of VLLMAdapter.request."
            )
        ids, logp = logprobs.table()
        kept, routing = logprobs.kept(), None
        if wanted.experts:
            from trustrl.engines.vllm.routed_experts import at_tokens

            routing = at_tokens(answer)
        return SampledRecord(
            tokens=ids[:, 0].copy(), logp=logp[:, 0].copy(), topk_ids=ids[:, 1:].copy(), topk_logp=logp[:, 1:].copy(),
            kept=kept and KeptColumn(kept.ids.copy(), kept.counts).narrow(), version=_versions(answer, len(ids)),
            experts=routing, is_complete=answer.finish_reason not in (None, "abort"),
        )  # fmt: skip

    def _parameters(self, wanted: Wanted, more: Mapping[str, Any]) -> dict[str, Any]:
        # Requests ask for one id more than may be kept, and the vocabulary must have it.
        max_kept = min(wanted.max_kept, self.vocabulary - 1)
        return recording(min(wanted.top_k, self.vocabulary), max_kept=max_kept, more=more)


def _versions(completion: Any, length: int) -> np.ndarray | None:
    """Returns the version at each token from vLLM's spans, whose names are text; None before the last output."""
    spans = getattr(completion, "weight_versions", None)
    if spans is None:
        return None
    versions = np.full(length, UNKNOWN, np.int32)
    for span in spans:
        versions[span.start : span.end] = version_number(span.version)
    return versions
