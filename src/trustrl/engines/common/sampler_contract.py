"""The contract between trainers and samplers: what a record can be asked for, and what an adapter of a sampler does.

A trainer says what its region reads as `Wanted`. The sampler's adapter turns it into the sampler's own request, and
the sampler's answer into a `SampledRecord`:

    adapter = VLLMAdapter.of(engine.vllm_config)         # or another sampler's
    request = adapter.request(Wanted(top_k=20), {"temperature": 0.7, "top_p": 0.9})
    answer = ...                                         # the trainer's own call, with this request
    record = adapter.record(answer, Wanted(top_k=20))

Between processes `Wanted` travels in `sampling_params["extra_args"]`, under the neutral names of `sampler_fields`:
`asking` writes them and `wanted_in` reads them. Only an adapter knows the sampler's own names. It chooses fields by the
names that the installed sampler's request has, not by the sampler's version.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from trustrl.config.sampling_parameters import is_truncated
from trustrl.engines.common.sampled_record import SampledRecord
from trustrl.engines.common.sampler_fields import KEPT, TOPK
from trustrl.errors import EngineError


class Wanted(NamedTuple):
    """Data to record at each token in addition to the sampled token's log-prob."""

    top_k: int = 0
    """The number of the sampler's most probable ids."""

    max_kept: int = 0
    """The largest number of ids that truncation may keep; 0 if tokens are drawn from the whole vocabulary."""

    experts: bool = False
    """True to record the experts that a mixture of experts used."""


class Request(NamedTuple):
    """A request in the sampler's own words."""

    sampling_params: dict[str, Any]
    """All of its sampling parameters, as the sampler takes them."""

    fields: dict[str, Any]
    """Its fields outside of the sampling parameters; empty if the sampler has none."""


class SamplerAdapter(Protocol):
    """One sampler's half of the contract."""

    def refusal(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> str | None:
        """Returns the reason why this sampler cannot record a request, with the fix; None if it can."""
        ...

    def request(self, wanted: Wanted, sampling_params: Mapping[str, Any]) -> Request:
        """Returns the sampler's own request. Parameters that do not concern the record are kept.

        Args:
            wanted: The data to record.
            sampling_params: The request's parameters under vLLM's names, without `extra_args` of trustrl's.

        Raises:
            EngineError: If the sampler cannot record it; says `refusal`.
        """
        ...

    def record(self, answer: Any, wanted: Wanted) -> SampledRecord:
        """Returns the record of one completion of a finished or aborted request.

        Raises:
            EngineError: If the answer lacks what was asked for.
        """
        ...


def require_recordable(adapter: SamplerAdapter, wanted: Wanted, sampling_params: Mapping[str, Any]) -> None:
    """Raises if a sampler cannot record a request."""
    reason = adapter.refusal(wanted, sampling_params)
    if reason:
        raise EngineError(reason)


def draws_from_a_part(sampling_params: Mapping[str, Any]) -> bool:
    """Returns whether a request draws tokens from a part of the vocabulary. Greedy sampling draws nothing."""
    return is_truncated(sampling_params.get) and sampling_params.get("temperature") != 0


def asking(wanted: Wanted, sampling_params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns sampling parameters that carry `Wanted` to the server in their `extra_args`.

    Kept ids are asked for only if the parameters truncate.
    """
    kept = wanted.max_kept if is_truncated(sampling_params.get) else 0
    numbers = {name: number for name, number in {TOPK: wanted.top_k, KEPT: kept}.items() if number}
    if not numbers:
        return dict(sampling_params)
    return {**sampling_params, "extra_args": {**(sampling_params.get("extra_args") or {}), **numbers}}


def wanted_in(extra_args: Mapping[str, Any] | None) -> tuple[Wanted, dict[str, Any]]:
    """Returns what a request's `extra_args` ask for, and its entries for the sampler and for other plugins."""
    others = dict(extra_args or {})
    top_k, max_kept = (int(others.pop(name, 0) or 0) for name in (TOPK, KEPT))
    return Wanted(top_k, max_kept), others
