"""The policy's side of a region in TRL: the request to its forward pass, and the record made from the answer."""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.records import FullDivergence, PolicyTokens, TopK
from trustrl.core.sampling import KeptSet, Sampling
from trustrl.engines.common.kept_policy import policy_fields, sampled_logp
from trustrl.engines.common.loss_seam import Seen
from trustrl.engines.common.vocabulary_read import Wanted, at_completions


def wanted_of(needs: Needs, inputs: dict[str, Any], **more: Any) -> Callable[[Tensor], Wanted]:
    """Returns the part of the vocabulary that the region reads, as a function of TRL's labels.

    Args:
        needs: The region's needs.
        inputs: TRL's inputs of one micro-batch, with the rollout's additions.
        **more: Further fields of `Wanted`.
    """
    kept = inputs.get("trustrl_kept_ids")
    return functools.partial(
        at_completions,
        length=inputs["completion_ids"].shape[1],
        gather_ids=inputs["trustrl_topk_ids"] if needs.topk and kept is None else None,
        top_k=needs.topk if needs.fills and kept is None else 0,
        kept_ids=kept,
        anchor_hidden=inputs.get("trustrl_hidden"),
        anchor_logsumexp=inputs.get("trustrl_logsumexp"),
        **more,
    )


def policy_tokens(needs: Needs, inputs: dict[str, Any], seen: Seen, sampling: Sampling, version: int) -> PolicyTokens:
    """Returns the policy's side of one micro-batch.

    Args:
        needs: The region's needs.
        inputs: TRL's inputs, with the rollout's additions.
        seen: The captured forward pass.
        sampling: The sampling settings behind the log-probs.
        version: The version of the weights.
    """
    more: dict[str, Any] = {}
    logp, out = seen.logp, seen.output
    if out is not None and out.kept_ids is not None:
        kept = KeptSet(out.kept_ids, out.kept_logp)
        logp = sampled_logp(kept, inputs["completion_ids"])
        more = policy_fields(kept, needs, inputs.get("trustrl_topk_ids"), inputs["completion_ids"])
    elif out is not None:
        if needs.topk:
            more = {"topk_logp": out.gathered_logp, "tail_logp": out.tail_logp}
        if out.topk_ids is not None:
            more["topk"] = TopK(out.topk_ids, out.topk_logp, of=needs.anchor)
        if needs.full:
            more["full_divergence"] = FullDivergence(tv=out.tv, kl=out.kl, of=needs.anchor)
    return PolicyTokens(logp=logp, entropy=seen.entropy, version=version, sampling=sampling, **more)
