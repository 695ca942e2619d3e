"""Requests for μ's top-K and kept ids in verl's form: keys of `extra_args` in, arrays in `extra_fields` out.

verl's own vLLM server and the one on a CPU share these functions.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from trustrl.engines.common.sampler_fields import KEPT, KEPT_COUNTS, KEPT_IDS, TOPK, TOPK_IDS, TOPK_LOGP
from trustrl.engines.vllm.decode_record import DecodedLogprobs, recording


def is_asked(extra_args: Mapping[str, Any] | None) -> bool:
    """Returns whether a request asks for more than the sampled token's log-prob."""
    return any((extra_args or {}).get(name) for name in (TOPK, KEPT))


def recording_parameters(extra_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the fields of `SamplingParams` that make vLLM record what a request asks for.

    Args:
        extra_args: The request's own `extra_args`. Keys for vLLM or other plugins are kept.
    """
    others = dict(extra_args or {})
    topk, max_kept = (int(others.pop(name, 0)) for name in (TOPK, KEPT))
    return recording(topk, max_kept=max_kept, more=others)


def recorded_fields(record: DecodedLogprobs) -> dict[str, np.ndarray]:
    """Returns the `extra_fields` of an answer, as copies that can be pickled; empty if no more ids were recorded."""
    ids, logp = record.table()
    fields = {TOPK_IDS: ids[:, 1:].copy(), TOPK_LOGP: logp[:, 1:].copy()} if ids.shape[1] > 1 else {}
    kept = record.kept()
    return fields if kept is None else {**fields, KEPT_IDS: kept.ids.copy(), KEPT_COUNTS: kept.counts}
