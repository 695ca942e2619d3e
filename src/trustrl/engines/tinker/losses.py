"""A region as a custom loss of tinker: traced for its service, or as a function in your own process.

Seam:     `ServiceClient.create_custom_loss(fn, input_ranks)`; `TrainingClient.forward_backward_custom(data, loss_fn)`
Switch:   `create_loss(service_client, region)`, or `loss_hook(region)` as `loss_fn`
Borrowed: the sum over data, which tinker applies to every loss
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from trustrl.config.axes import Region, reads_ages
from trustrl.config.terms import SequenceMeanTokenMean, TokenSum, TokenWeights
from trustrl.config.validators import one_of
from trustrl.core.clean import OnNonFinite, clean_tokens
from trustrl.core.decision import decide
from trustrl.core.diagnostics import rates
from trustrl.core.losses import policy_terms, reduce_terms
from trustrl.core.metrics import Choice, check_choice, chosen
from trustrl.core.records import PolicyTokens, RolloutTokens
from trustrl.core.sequences import Sequences
from trustrl.engines.common.sampled_loss import SampledLoss
from trustrl.engines.tinker.graph_recorder import recorded
from trustrl.errors import ConfigError, MissingDataError, RecordError

Average = Literal["token-sum", "sequence-mean"]
"""Loss of one datum: the sum over its tokens, as in tinker's own losses, or their mean. tinker adds up data."""

KEYS = {"behavior": "logprobs", "proximal": "proximal_logprobs"}
"""Keys of `loss_fn_inputs` that `loss_hook` reads. tinker's own losses also read μ under `logprobs`."""

TRACED_KEYS = {"behavior": "sampling_logprobs", "proximal": "proximal_logprobs"}
"""Keys that a traced loss reads: there, tinker calls the policy's own log-probs `logprobs`."""

_HOW = {
    "behavior": "Store the log-probs that `sample` returned, aligned with target_tokens.",
    "proximal": "Compute them with `forward` before the first update on the batch.",
}
SAMPLED = SampledLoss("tinker", {anchor: (f'loss_fn_inputs["{key}"]', _HOW[anchor]) for anchor, key in KEYS.items()})  # pyright: ignore[reportArgumentType]

LossHook = Callable[[Sequence[Any], Sequence[Tensor]], tuple[Tensor, dict[str, float]]]


def traceable_loss(region: Region, *, average: Average = "token-sum") -> Callable[..., Any]:
    """Returns a loss that `ServiceClient.create_custom_loss` can trace.

    Its parameters are `logprobs`, `sampling_logprobs` and `proximal_logprobs` as far as the region reads them,
    `advantages` and `mask`: each of rank 1, in `loss_fn_inputs` of every datum. It returns the loss of one datum and
    the counts of its tokens in the loss, masked tokens and dropped tokens. The region's arithmetic is that of
    `trustrl.policy_loss`, recorded once as a graph.

    Args:
        region: A region that reads sampled tokens.
        average: Loss of one datum. Regions defined per sequence (GSPO) require "sequence-mean".

    Raises:
        ConfigError: If the region reads more than sampled tokens, or cannot be written as one graph.
    """
    _check(region, average)
    anchors = sorted(region.needs().anchors)
    names = ("logprobs", *(TRACED_KEYS[anchor] for anchor in anchors), "advantages", "mask")

    def of_one_datum(inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        return _loss_of_datum(region, average, inputs)

    graph = recorded(of_one_datum, names, region.kind)

    # tinker reads the names of the parameters, and torch.fx their number.
    def behavior(logprobs: Any, sampling_logprobs: Any, advantages: Any, mask: Any) -> Any:
        return graph.forward(logprobs, sampling_logprobs, advantages, mask)

    def proximal(logprobs: Any, proximal_logprobs: Any, advantages: Any, mask: Any) -> Any:
        return graph.forward(logprobs, proximal_logprobs, advantages, mask)

    def both(logprobs: Any, sampling_logprobs: Any, proximal_logprobs: Any, advantages: Any, mask: Any) -> Any:
        return graph.forward(logprobs, sampling_logprobs, proximal_logprobs, advantages, mask)

    loss = both if len(anchors) == 2 else {"behavior": behavior, "proximal": proximal}[anchors[0]]
    loss.__name__ = f"trustrl_{region.kind}".replace("-", "_")
    return loss


def input_ranks(loss: Callable[..., Any]) -> dict[str, int]:
    """Returns the second argument of `create_custom_loss` for a traceable loss: rank 1 for every parameter."""
    return dict.fromkeys(inspect.signature(loss).parameters, 1)


def create_loss(service_client: Any, region: Region, *, average: Average = "token-sum") -> Any:
    """Creates the region's loss with a `tinker.ServiceClient`. Returns tinker's future of a `LossHandle`.

    Raises:
        ConfigError: If the region reads more than sampled tokens, or cannot be written as one graph.
    """
    loss = traceable_loss(region, average=average)
    return service_client.create_custom_loss(loss, input_ranks(loss))


def traced_data(data: Sequence[Any]) -> list[Any]:
    """Returns tinker's data with μ under `sampling_logprobs`, where a traced loss finds it.

    Raises:
        MissingDataError: If a datum has no `logprobs`.
    """
    moved: list[Any] = []
    for i, datum in enumerate(data):
        inputs = dict(datum.loss_fn_inputs)
        if KEYS["behavior"] not in inputs:
            raise MissingDataError(f'data[{i}].loss_fn_inputs["logprobs"] must be given, got None. {_HOW["behavior"]}')
        inputs[TRACED_KEYS["behavior"]] = inputs.pop(KEYS["behavior"])
        moved.append(replace(datum, loss_fn_inputs=inputs))
    return moved


def loss_hook(
    region: Region,
    *,
    average: Average = "token-sum",
    metrics: Choice = "core",
    on_nonfinite: OnNonFinite = "drop",
) -> LossHook:
    """Returns the region as the `loss_fn` of `TrainingClient.forward_backward_custom`.

    Each datum needs, aligned with `target_tokens`: `advantages`, `mask` (1 on sampled tokens, 0 on the prompt), and the
    region's anchors, `logprobs` for the sampler's and `proximal_logprobs` for the trainer's before the first update.

    Args:
        region: A region that reads sampled tokens.
        average: Loss of one datum. Regions defined per sequence (GSPO) require "sequence-mean".
        metrics: The metrics to return: "core" for a few, "all" for every one.
        on_nonfinite: See `trustrl.policy_loss`.

    Raises:
        ConfigError: If the region reads more than sampled tokens, or `average` does not fit it.
    """
    _check(region, average)
    check_choice(metrics)

    def loss_fn(data: Sequence[Any], logprobs_list: Sequence[Tensor]) -> tuple[Tensor, dict[str, float]]:
        rows = [_row(i, *pair) for i, pair in enumerate(zip(data, logprobs_list, strict=True))]
        inputs = {key: torch.cat([row[key] for row in rows]) for key in ("policy", "advantages", "mask")}
        in_loss = inputs["mask"] != 0
        lengths = torch.tensor([len(row["policy"]) for row in rows])
        ids = torch.arange(len(rows)).repeat_interleave(lengths)
        rollout = RolloutTokens(
            behavior_logp=_anchor(rows, "behavior"),
            proximal_logp=_anchor(rows, "proximal"),
            advantage=inputs["advantages"],
            in_loss=in_loss,
            sequence_ids=ids,
        )
        # tinker adds up the data, so an average over tokens must be in the weights.
        weights = torch.ones_like(inputs["policy"])
        if average == "sequence-mean":
            counts = torch.zeros(len(rows)).index_add(0, ids, in_loss.float()).clamp(min=1)
            weights = 1 / counts[ids]
        reduction = TokenWeights(weights.detach(), like=_reduction(average))
        out = SAMPLED(inputs["policy"], rollout, region, reduction, on_nonfinite)
        return out.loss, chosen(rates(out.sums), metrics)

    return loss_fn


def _loss_of_datum(region: Region, average: Average, inputs: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    in_loss = inputs["mask"] != 0
    rollout = RolloutTokens(
        behavior_logp=inputs.get(TRACED_KEYS["behavior"]),
        proximal_logp=inputs.get(TRACED_KEYS["proximal"]),
        advantage=inputs["advantages"],
        in_loss=in_loss,
    )
    # A datum is one sequence, so tokens need no ids.
    needs = replace(region.needs(), sequences=False)
    tokens = clean_tokens(PolicyTokens(logp=inputs["logprobs"]), rollout, needs)
    tokens = replace(tokens, sequences=Sequences(torch.zeros_like(in_loss, dtype=torch.long), 1, None))
    decision = decide(tokens, region)
    term, overflow = policy_terms(decision, tokens)
    reduction = TokenSum() if average == "token-sum" else SequenceMeanTokenMean(num_sequences=1)
    counts = {
        "tokens": in_loss,
        "masked_tokens": tokens.usable & ~decision.keep,
        "dropped_tokens": (in_loss & ~tokens.usable) | overflow,
    }
    metrics = {f"custom/trustrl/{name}:sum": flags.to(torch.float32).sum() for name, flags in counts.items()}
    return reduce_terms(term, tokens, reduction), metrics


def _check(region: Region, average: Average) -> None:
    SAMPLED.check(region)
    one_of("average", average, ("token-sum", "sequence-mean"))
    if reads_ages(region):
        raise ConfigError(
            f"{region.kind}.max_staleness must be None in tinker, got {region.max_staleness}. tinker does not pass the "  # pyright: ignore[reportAttributeAccessIssue]
            "version of the weights behind a token to a loss."
        )
    wanted = region.needs().reduction
    if wanted is not None and _reduction(average) is not wanted:
        raise ConfigError(
            f"average must be 'sequence-mean' with {region.kind}, got {average!r}. The region's gradient is defined "
            "for that average."
        )


def _reduction(average: Average) -> type:
    return TokenSum if average == "token-sum" else SequenceMeanTokenMean


def _row(i: int, datum: Any, logprobs: Tensor) -> dict[str, Tensor]:
    """Returns the tensors of one datum by name, each as long as its log-probs."""
    if logprobs.ndim != 1:
        raise RecordError(
            f"data[{i}] must have one target token at each position, got log-probs of shape {tuple(logprobs.shape)}. "
            "Regions here read sampled tokens only."
        )
    row = {"policy": logprobs}
    for key in ("advantages", "mask", *KEYS.values()):
        values = datum.loss_fn_inputs.get(key)
        if values is None and key in KEYS.values():
            continue  # only some regions read it
        if values is None:
            raise MissingDataError(
                f'data[{i}].loss_fn_inputs["{key}"] must be given, got None. Give one number for each target token; '
                "mask is 1 on sampled tokens and 0 elsewhere."
            )
        row[key] = values.to_torch()
        if row[key].shape != logprobs.shape:
            raise RecordError(
                f'data[{i}].loss_fn_inputs["{key}"] must have shape {tuple(logprobs.shape)}, as target_tokens, got '
                f"{tuple(row[key].shape)}."
            )
    return row


def _anchor(rows: Sequence[Mapping[str, Tensor]], anchor: str) -> Tensor | None:
    """Returns one anchor's log-probs, or None if a datum lacks them."""
    key = KEYS[anchor]
    return torch.cat([row[key] for row in rows]) if all(key in row for row in rows) else None
