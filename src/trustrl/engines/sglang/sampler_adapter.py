"""SGLang's half of the sampler contract (see `trustrl.engines.common.sampler_contract`).

SGLang returns two kinds of log-probs. `output_token_logprobs` and `output_top_logprobs` are of the whole vocabulary,
after penalties and temperature. So they are μ unless top-p, top-k or min-p truncate. `output_token_sampling_logprobs`
are those of the ids that truncation kept, which SGLang returns with them in `output_token_sampling_mask`. The adapter
asks for the one that is μ, under the names that the installed SGLang's `GenerateReqInput` has.

The same answers come from `Engine`, from `/generate`, and from `TokenizerManager.generate_request`, which verl calls.
"""

import base64
import dataclasses
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal, Self

import numpy as np

from trustrl.config.validators import one_of
from trustrl.engines.common.kept_columns import KeptColumn, column_of
from trustrl.engines.common.sampled_record import UNKNOWN, SampledRecord, version_number
from trustrl.engines.common.sampler_contract import Request, Wanted, draws_from_a_part, require_recordable
from trustrl.errors import EngineError

MASK, SUPPORT, FLAT = "return_sampling_mask", "sampling_logprobs_mode", "return_flat_raw_output_top_logprobs"
"""Fields of `GenerateReqInput` that SGLang has had since 0.5.16, 0.5.21 and 0.5.22."""

FLAT_AS_BYTES = "return_flat_raw_top_logprobs_b64"

ORIGINAL_LOGPROB = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""The environment variable with which SGLang returns log-probs from before the temperature."""

Pause = Literal["abort", "retract", "in_place"]
"""The `mode` of SGLang's `pause_generation` before a weight update."""

_SGLANG_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Maps vLLM's names of sampling parameters to SGLang's. The others are the same in both."""

_NOT_PARAMETERS = ("logprobs", "detokenize", "extra_args")
"""Sampling parameters of vLLM that say what to return. SGLang has other fields for that, and raises on these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SGLangAdapter:
    """Contract of one SGLang server, from its settings."""

    vocabulary: int
    request_fields: frozenset[str]
    """Names of the fields of `GenerateReqInput`."""

    mask_limit: int
    """The server's `sampling_mask_max_tokens`: the largest top_k of a request whose kept ids are returned."""

    fault: str | None = None
    """The reason why this server's log-probs are not μ, whatever the request."""

    pause: Pause = "in_place"
    """The mode in which weight updates interrupt requests. "in_place" also covers updates that do not pause, or do not
    flush the cache."""

    step_tokens: int = 1
    """The largest number of tokens that one step of the server can draw for a request."""

    def __post_init__(self) -> None:
        one_of("pause", self.pause, ("abort", "retract", "in_place"))

    @classmethod
    def of(cls, server_args: Any, vocabulary: int, *, pause: Pause = "in_place") -> Self:
        """Returns the adapter of a server. Call it in the process that started the server, or in one like it.

        Args:
            server_args: SGLang's `ServerArgs`, for example `engine.tokenizer_manager.server_args`.
            vocabulary: The size of the vocabulary.
            pause: The mode of `pause_generation` before weight updates. With "abort" and "retract", the update must
                also flush the cache.
        """
        request = import_module("sglang.srt.managers.io_struct").GenerateReqInput
        struct_fields = getattr(request, "__struct_fields__", None)
        names = struct_fields or [field.name for field in dataclasses.fields(request)]
        return cls(
            vocabulary=vocabulary,
            request_fields=frozenset(names),
            mask_limit=getattr(server_args, "sampling_mask_max_tokens", 0),
            fault=_fault(server_args),
            pause=pause,
            step_tokens=getattr(server_args, "speculative_num_draft_tokens", None) or 1,
        )

    def refusal(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> str | None:
        """Returns the reason why SGLang cannot record a request, with the fix; None if it can."""
        if self.fault is not None:
            return self.fault
        if wanted.experts:
            return (
                "experts must be False with SGLang, got True. trustrl does not read the routed experts that SGLang "
                "returns. Record a sampler on vLLM, or leave the experts out."
            )
        if not draws_from_a_part(sampling_params):
            return None
        needed = [MASK, SUPPORT] if wanted.top_k else [MASK]
        missing = [name for name in needed if name not in self.request_fields]
        if missing:
            return (
                f"SGLang's requests must have the field {missing[0]} for truncated sampling, and it is missing. Its "
                "other log-probs are those of the whole vocabulary, which tokens are not drawn from. Install SGLang "
                "0.5.21 or newer, or sample without top_p, top_k and min_p."
            )
        top_k = self._largest_kept(sampling_params)
        if top_k > self.mask_limit:
            got = sampling_params.get("top_k")
            return (
                f"top_k must be from 1 to {self.mask_limit:,} for a request with top_p, top_k or min_p, got {got}. "
                "SGLang returns the kept ids of no other request. Set top_k to the largest number of ids that a token "
                "may keep, or start SGLang with a larger sampling_mask_max_tokens."
            )
        return None

    def request(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> Request:
        """Returns the request in SGLang's words. `Request.fields` are arguments of `GenerateReqInput`.

        Raises:
            EngineError: If SGLang cannot record it.
        """
        require_recordable(self, wanted, sampling_params)
        params = {
            _SGLANG_NAMES.get(name, name): value
            for name, value in sampling_params.items()
            if name not in _NOT_PARAMETERS
        }
        fields: dict[str, Any] = {"return_logprob": True}
        if draws_from_a_part(params):
            # SGLang returns kept ids of requests with a top_k only. The vocabulary's size keeps every id.
            params["top_k"] = self._largest_kept(params)
            fields[MASK] = True
            if wanted.top_k:
                fields[SUPPORT] = "support"
        elif wanted.top_k:
            fields["top_logprobs_num"] = min(wanted.top_k, self.vocabulary)
            if FLAT in self.request_fields:  # arrays: a third of the bytes of nested lists
                fields |= {FLAT: True, FLAT_AS_BYTES: True}
        return Request(params, fields)

    def record(self, answer: Mapping[str, Any], wanted: Wanted) -> SampledRecord:
        """Returns the record of one completion.

        Args:
            answer: A completion as SGLang returns it, with `output_ids` and `meta_info`.
            wanted: The data that its request asked for.

        Raises:
            EngineError: If SGLang refused the request, or if the answer lacks what was asked for.
        """
        meta, tokens = answer["meta_info"], np.array(answer["output_ids"], np.int32).reshape(-1)
        reason = meta.get("finish_reason") or {}
        if reason.get("type") == "abort" and reason.get("status_code") is not None:
            raise EngineError(f"SGLang must answer a recorded request, and it refused: {reason.get('message')}")
        # SGLang returns one more than the tokens if none were asked for.
        own = (meta.get("output_token_logprobs") or [])[: len(tokens)]
        if [row[1] for row in own] != tokens.tolist():
            raise EngineError(
                f"SGLang must return the log-prob of each of {len(tokens)} sampled tokens, got {len(own)} log-probs of "
                "other tokens. Send the fields of SGLangAdapter.request."
            )
        k = min(wanted.top_k, self.vocabulary)
        if "output_token_sampling_mask" in meta:
            logp, ids, topk, kept = _truncated_columns(meta, tokens, k)
        else:
            logp = np.array([row[0] for row in own], np.float32)
            ids, topk = _topk(meta, k, len(tokens))
            kept = None
        return SampledRecord(
            tokens=tokens, logp=logp, topk_ids=ids, topk_logp=topk, kept=kept if wanted.max_kept else None,
            version=self._versions(meta, len(tokens)), is_complete=reason.get("type") not in (None, "abort"),
        )  # fmt: skip

    def _largest_kept(self, sampling_params: Mapping[str, Any]) -> int:
        """Returns the largest number of ids that a truncated request may keep."""
        top_k = sampling_params.get("top_k") or -1
        return self.vocabulary if top_k < 0 else min(top_k, self.vocabulary)

    def _versions(self, meta: Mapping[str, Any], length: int) -> np.ndarray | None:
        """Returns the version at each token.

        SGLang draws a step before it has read the last one. So the first step of a span may be that of the old weights
        if requests ran on while the weights changed.
        """
        spans = meta.get("weight_versions")
        if spans is None:
            last = meta.get("weight_version")
            # The version at the end of the answer, which is that of all tokens only if an update ends every answer.
            return None if last is None or self.pause != "abort" else np.full(length, version_number(last), np.int32)
        versions = np.full(length, UNKNOWN, np.int32)
        for span in spans:
            versions[span["start"] : span["end"]] = version_number(span["version"])
        if self.pause == "in_place":
            for _, span in pairwise(spans):
                versions[span["start"] : span["start"] + self.step_tokens] = UNKNOWN
        return versions


def _fault(server_args: Any) -> str | None:
    """Returns the reason why a server's log-probs are not those of the distribution it draws from."""
    if os.environ.get(ORIGINAL_LOGPROB, "").lower() in ("true", "1"):
        return (
            f"{ORIGINAL_LOGPROB} must be unset, got {os.environ[ORIGINAL_LOGPROB]}. SGLang then returns log-probs from "
            "before the temperature, which are not μ. Unset it where SGLang is started."
        )
    target = getattr(server_args, "rl_on_policy_target", None)
    if target is not None:
        return (
            f"rl_on_policy_target must be None, got {target!r}. SGLang then rounds its log-probs to bf16, which has "
            "three digits. Start SGLang without it; enable_deterministic_inference keeps float32."
        )
    if getattr(server_args, "enable_watermark", False):
        return (
            "enable_watermark must be False, got True. SGLang returns log-probs from before the watermark, which are "
            "not μ. Start SGLang without it."
        )
    return None


def _truncated_columns(
    meta: Mapping[str, Any], tokens: np.ndarray, k: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray, KeptColumn]:
    """Returns log μ, the top-K and the kept ids of a truncated answer."""
    rows, values = meta["output_token_sampling_mask"], meta["output_token_sampling_logprobs"]
    if not k:  # a log-prob of the sampled token alone
        logp = np.array([value if np.ndim(value) == 0 else value[0] for value in values], np.float32)
        empty = np.empty((len(tokens), 0))
        return logp, empty.astype(np.int32), empty.astype(np.float32), column_of(rows).narrow()
    logp = np.array(
        [value[row.index(token)] for row, value, token in zip(rows, values, tokens.tolist(), strict=True)], np.float32
    )
    ids, topk = np.full((len(rows), k), UNKNOWN, np.int32), np.full((len(rows), k), -np.inf, np.float32)
    for t, (row, value) in enumerate(zip(rows, values, strict=True)):
        count = min(k, len(row))  # SGLang sorts them by probability
        ids[t, :count], topk[t, :count] = row[:count], value[:count]
    return logp, ids, topk, column_of(rows).narrow()


def _topk(meta: Mapping[str, Any], k: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the K most probable ids and their log-probs, from arrays or from nested lists."""
    if not k or not length:
        return np.empty((length, k), np.int32), np.empty((length, k), np.float32)
    if "output_top_logprobs_shape" in meta:
        shape = meta["output_top_logprobs_shape"]
        return _array(meta, "idx", np.int32, shape)[:length, :k], _array(meta, "val", np.float32, shape)[:length, :k]
    rows: Sequence[Any] = (meta.get("output_top_logprobs") or [])[:length]
    if len(rows) != length or any(row is None or len(row) < k for row in rows):
        raise EngineError(
            f"SGLang must return {k} ids at each of {length} tokens, got fewer. Send the fields of "
            "SGLangAdapter.request."
        )
    pairs = np.array([[entry[:2] for entry in row[:k]] for row in rows], np.float64)
    return pairs[..., 1].astype(np.int32), pairs[..., 0].astype(np.float32)


def _array(meta: Mapping[str, Any], name: str, dtype: Any, shape: Sequence[int]) -> np.ndarray:
    """Returns one of the two arrays of the top-K."""
    field = f"output_top_logprobs_{name}_flat"
    if f"{field}_b64" in meta:
        flat = np.frombuffer(base64.b64decode(meta[f"{field}_b64"]), meta[f"{field}_b64_dtype"])
    else:
        flat = np.asarray(meta[field])
    return flat.astype(dtype).reshape(shape)
