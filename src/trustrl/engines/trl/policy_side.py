"""The policy's side of a region in TRL: the request to its forward pass, and the record made from the answer."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from trustrl.config.axes import Needs
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.sampling import KeptSet
from trustrl.engines.common.loss_seam import Seen
from trustrl.engines.common.token_places import TokenPlaces
from trustrl.engines.common.vocabulary_read import (
    Wanted,
    at_completions,
    policy_fields,
    read_by_policy,
    sampled_logp,
)


def wanted_of(
    needs: Needs, inputs: dict[str, Any], where: TokenPlaces, **more: Any
) -> Callable[[Tensor], tuple[TokenPlaces, Wanted]]:
    """Returns the part of the vocabulary that the region reads, as a function of TRL's labels.

    Args:
        needs: The region's needs.
        inputs: TRL's inputs of one micro-batch, with the rollout's additions.
        where: The tokens in the loss.
        **more: Further fields of `Wanted`.
    """
    more["kept_ids"] = kept = inputs.get("trustrl_kept_ids")
    if kept is None and needs.topk:
        more |= {"gather_ids": where.of(inputs["trustrl_topk_ids"]), "top_k": needs.topk if needs.fills else 0}
    if needs.full:
        more |= {f"anchor_{name}": where.of(inputs[f"trustrl_{name}"]) for name in ("hidden", "logsumexp")}
    return lambda labels: (where, at_completions(labels, where, **more))


def policy_tokens(needs: Needs, seen: Seen, where: TokenPlaces, rollout: RolloutTokens, version: int) -> PolicyTokens:
    """Returns the policy's side of one micro-batch.

    Args:
        needs: The region's needs.
        seen: The captured forward pass.
        where: The tokens in the loss.
        rollout: The rollout's side of the same tokens.
        version: The version of the weights.
    """
    more: dict[str, Any] = {}
    logp, out = where.of(seen.logp), seen.output
    if out is not None and out.kept_ids is not None:
        kept, token_ids = KeptSet(out.kept_ids, out.kept_logp), rollout.token_ids
        assert token_ids is not None
        logp = sampled_logp(kept, token_ids)
        more = policy_fields(kept, needs, None if rollout.topk is None else rollout.topk.ids, token_ids)
    elif out is not None:
        logp, more = out.log_probs, read_by_policy(out, needs)
    entropy = None if seen.entropy is None else where.of(seen.entropy)
    return PolicyTokens(logp=logp, entropy=entropy, version=version, sampling=rollout.sampling, **more)
