"""Kept ids of truncated sampling, taken where vLLM samples: 4 bytes per kept id, and no reserved columns.

A request for kept ids asks vLLM for the log-probs of `max_kept` + 1 ids, whose −inf shows which were removed. That is
8 (max_kept + 2) bytes per token and a sort of so many ids, and it works in every vLLM. With this module in the engine's
process, the sampler computes only the K columns that the request reads, and appends the kept ids to its row of ids:
the row is then longer than its log-probs, by which `decode_record` knows it.

Runs where vLLM's V1 runner samples on a CPU in this process. On a GPU the number of kept ids is known only after a wait
for the device, so the columns stay.

Seams: `GPUModelRunner._sample(logits, spec_decode_metadata)`, `Sampler.gather_logprobs(logprobs, num_logprobs,
token_ids)`, `LogprobsTensors.tolists` and `LogprobsLists.slice_request`. Imports vLLM.
"""

import functools
from contextvars import ContextVar
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor
from vllm.v1.outputs import LogprobsLists, LogprobsTensors  # pyright: ignore[reportMissingImports]
from vllm.v1.sample.sampler import Sampler  # pyright: ignore[reportMissingImports]
from vllm.v1.worker.gpu_model_runner import GPUModelRunner  # pyright: ignore[reportMissingImports]

from trustrl.engines.common import seam
from trustrl.engines.common.sampler_fields import KEPT, TOPK


class Plan(NamedTuple):
    """Columns that the requests of one step read."""

    limits: np.ndarray
    """(B,): the largest number of kept ids of each request; 0 if it asks for none."""

    width: int
    """The largest number of most probable ids that a request reads."""


_PLAN: ContextVar[Plan | None] = ContextVar("trustrl_kept_plan", default=None)


def install() -> None:
    """Makes vLLM's sampler append kept ids, in this process. Later calls have no effect.

    Raises:
        EngineError: If the installed vLLM samples with other functions than this module supports.
    """
    sample, gather = GPUModelRunner._sample, Sampler.gather_logprobs
    if hasattr(sample, "plans"):
        return
    seam.require_parameters(GPUModelRunner, "_sample", ("self", "logits", "spec_decode_metadata"))
    seam.require_parameters(Sampler, "gather_logprobs", ("logprobs", "num_logprobs", "token_ids"))
    seam.require_parameters(LogprobsLists, "slice_request", ("self", "req_idx", "num_positions"))

    @functools.wraps(sample)
    def planned(self: Any, logits: Any, spec_decode_metadata: Any) -> Any:
        plan = None
        if spec_decode_metadata is None and logits is not None and logits.device.type == "cpu":
            plan = plan_of(self.input_batch, self.requests)
        before = _PLAN.set(plan)
        try:
            return sample(self, logits, spec_decode_metadata)
        finally:
            _PLAN.reset(before)

    @functools.wraps(gather)
    def gathered(logprobs: Any, num_logprobs: int, token_ids: Any) -> Any:
        plan = _PLAN.get()
        if plan is None:
            return gather(logprobs, num_logprobs, token_ids)
        return _Tensors.of(gather(logprobs, plan.width, token_ids), *kept_of(logprobs, plan.limits))

    planned.plans = True  # pyright: ignore[reportAttributeAccessIssue]
    GPUModelRunner._sample, Sampler.gather_logprobs = planned, staticmethod(gathered)


def plan_of(batch: Any, requests: Any) -> Plan | None:
    """Returns the plan of the step's requests; None if none of them asks for kept ids.

    Args:
        batch: vLLM's `InputBatch`.
        requests: The runner's request states, by id.
    """
    limits, width = np.zeros(batch.num_reqs, np.int64), 0
    for row, name in enumerate(batch.req_ids):
        asked = requests[name].sampling_params.extra_args
        limit = asked.get(KEPT) if asked else None
        columns = asked[TOPK] if limit else batch.num_logprobs.get(name, 0)
        limits[row], width = limit or 0, max(width, columns)
    return Plan(limits, width) if limits.any() else None


def kept_of(logprobs: Tensor, limits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the ids with a probability above 0 at each row, one row after the other, and their number.

    Rows have at most one id more than their limit, which shows that there are others, and none if the limit is 0.
    """
    rows, ids = (part.numpy() for part in (logprobs > -np.inf).nonzero(as_tuple=True))
    counts = np.bincount(rows, minlength=len(limits))
    allowed = np.minimum(counts, np.where(limits > 0, limits + 1, 0))
    if not np.array_equal(counts, allowed):
        place = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
        ids = ids[place < allowed[rows]]
    return ids.astype(np.int32), allowed


# Subclasses with an attribute instead of one more field: vLLM unpacks both tuples by position on their way to the
# scheduler, and calls `tolists` and `slice_request` there.


class _Tensors(LogprobsTensors):
    """Columns of a step, with the kept ids behind them."""

    kept: tuple[np.ndarray, np.ndarray]

    @classmethod
    def of(cls, columns: Any, ids: np.ndarray, counts: np.ndarray) -> Any:
        made = cls(*columns)
        made.kept = ids, counts
        return made

    def tolists(self, cu_num_generated_tokens: Any = None) -> Any:
        return _Lists.of(super().tolists(cu_num_generated_tokens), *self.kept)


class _Lists(LogprobsLists):
    """The same on the host. The scheduler takes each request's part from it."""

    ids: np.ndarray
    """All rows of ids, each followed by its kept ids."""

    ends: list[int]

    @classmethod
    def of(cls, lists: Any, kept: np.ndarray, counts: np.ndarray) -> Any:
        made = cls(*lists)
        columns = lists.logprob_token_ids
        width = columns.shape[1]
        ends = np.concatenate([[0], np.cumsum(width + counts)])
        made.ids, made.ends = np.empty(ends[-1], np.int32), ends.tolist()
        own = ends[:-1, None] + np.arange(width)
        rest = np.ones(len(made.ids), bool)
        rest[own] = False
        made.ids[own], made.ids[rest] = columns, kept
        return made

    def slice_request(self, req_idx: int, num_positions: int) -> Any:
        part = super().slice_request(req_idx, num_positions)
        if num_positions != 1:  # a request whose prompt is not finished
            return part
        return part._replace(logprob_token_ids=self.ids[self.ends[req_idx] : self.ends[req_idx + 1]][None])
