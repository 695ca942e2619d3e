"""Loss of token-wise regions from hidden states, with gradients computed block by block in the forward pass.

`token_logprobs` keeps the products of D tokens (the hidden size) and recomputes those of all others in its backward
pass. A region that decides token by token does not need the other tokens first: loss and gradients of a block of at
most D tokens are computed while its products exist. That takes three products at any number of tokens, and no [N, V].
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from trustrl.config.axes import Needs, Region
from trustrl.config.terms import EntropyBonus, Penalty, Reduction, TokenWeights
from trustrl.core.clean import OnNonFinite
from trustrl.core.policy_loss import LossOutput, needs_of_call, policy_loss
from trustrl.core.records import PolicyTokens, RolloutTokens, TopK
from trustrl.core.token_logprobs import default_product_dtype, token_logprobs
from trustrl.errors import ConfigError, MissingDataError, RecordError
from trustrl.kernels import devices
from trustrl.kernels.derivatives import once_differentiable
from trustrl.kernels.logprob_outputs import wide_dtype
from trustrl.kernels.pass_inputs import slices


class PolicyHead(NamedTuple):
    """The policy's output layer: logits = softcap · tanh((hidden @ weight.T + bias) / softcap) / temperature."""

    weight: Float[Tensor, "V D"]
    """Output embedding, one row per vocabulary id."""
    bias: Float[Tensor, " V"] | None = None
    softcap: float | None = None
    temperature: float = 1.0
    version: int | None = None
    """Version of the weights, which regions that read ages need."""


def policy_loss_from_hidden(
    hidden_ND: Float[Tensor, "N D"],
    head: PolicyHead,
    rollout: RolloutTokens,
    region: Region,
    *,
    reduction: Reduction,
    penalties: Sequence[Penalty] = (),
    on_nonfinite: OnNonFinite = "drop",
) -> LossOutput:
    """Computes `policy_loss` of packed tokens from their hidden states, with three products at any number of tokens.

    Gives the loss, sums and gradients of `token_logprobs` followed by `policy_loss`, and is those two calls for as many
    tokens as the hidden size, whose products they keep. Of more tokens, the forward pass computes the gradients and the
    backward pass multiplies them by the upstream gradient, so use `torch.no_grad()` if no backward pass follows. The
    own top-K and the entropy cost no further product. On an accelerator, where the pass over the vocabulary recomputes
    its products, nothing is saved.

    Memory in addition to the inputs: the head's gradient, one block's products in a buffer of the same size, and the
    hidden states' gradient. With several blocks, the gradient of a bf16 head is summed in float32.

    Args:
        hidden_ND: Last hidden states that predict the tokens of `rollout`.
        head: The policy's output layer. If it is frozen, the two calls run.
        rollout: Packed tokens with `token_ids`. Tokens outside the loss cost nothing on a CPU.
        region: A region that decides token by token.
        reduction: Reduction from token terms to one number.
        penalties: Additional terms. An entropy bonus differentiates the entropy.
        on_nonfinite: As in `policy_loss`.

    Raises:
        ConfigError: If decisions or the reduction depend on whole sequences or on all tokens of the call, if the region
            reads a whole distribution, or if the products are float16, whose gradients need a loss scale before they
            are computed.
        RecordError: If the records do not fit each other.
        MissingDataError: If the records lack data that the region needs.

    Examples:
        >>> from trustrl.regions import DPPO
        >>> from trustrl.config.terms import TokenMean
        >>> hidden, head = torch.eye(2).requires_grad_(), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> rollout = RolloutTokens(
        ...     token_ids=torch.tensor([0, 1]),
        ...     behavior_logp=torch.tensor([-0.6, -2.5]),
        ...     advantage=torch.tensor([1.0, 1.0]),
        ...     in_loss=torch.tensor([True, True]),
        ... )
        >>> out = policy_loss_from_hidden(hidden, PolicyHead(head), rollout, DPPO(), reduction=TokenMean(num_tokens=2))
        >>> out.loss.backward()
        >>> hidden.grad  # the second token rose from 0.08 to 0.58 and would rise further: masked
        tensor([[-0.2225,  0.1112],
                [ 0.0000,  0.0000]])
    """
    needs = needs_of_call(region, reduction)
    _check(hidden_ND, head, rollout, region, needs)
    entropy = True if any(isinstance(penalty, EntropyBonus) for penalty in penalties) else "detached"
    settings: dict[str, Any] = {"region": region, "penalties": penalties}
    leaves = (hidden_ND, head.weight, head.bias)
    blocks = slices(len(hidden_ND), _rows_of_a_block(hidden_ND, head.weight))
    trained = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves[1:])
    if len(blocks) == 1 or not trained:
        policy = _policy_tokens(hidden_ND, head, rollout, needs, entropy)
        return policy_loss(policy, rollout, reduction=reduction, on_nonfinite=on_nonfinite, **settings)
    # Faults are raised below, from the numbers of all tokens.
    faulty = "drop" if on_nonfinite == "raise" else on_nonfinite

    def block_loss(hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: slice) -> tuple[Tensor, PolicyTokens]:
        def part(x: Tensor) -> Tensor:
            return x[rows]

        tokens = _mapped(part, rollout)
        policy = _policy_tokens(hidden, head._replace(weight=weight, bias=bias), tokens, needs, entropy)
        own = replace(reduction, weights=reduction.weights[rows]) if isinstance(reduction, TokenWeights) else reduction
        out = policy_loss(policy, tokens, reduction=own, on_nonfinite=faulty, **settings)
        return out.loss, _mapped(Tensor.detach, policy)

    function: Any = _GradientsInForward
    policies: list[PolicyTokens] = []
    zero = function.apply(*leaves, blocks, block_loss, policies)
    with torch.no_grad():
        policy = _mapped(lambda *parts: torch.cat(parts), *policies)
        out = policy_loss(policy, rollout, reduction=reduction, on_nonfinite=on_nonfinite, **settings)
    return replace(out, loss=out.loss + zero.to(out.loss.dtype))


BlockLoss = Callable[[Tensor, Tensor, Tensor | None, slice], tuple[Tensor, PolicyTokens]]
"""Callable (hidden states of some rows, weight, bias, those rows) → their part of the loss, and their log-probs."""


class _GradientsInForward(torch.autograd.Function):
    """Zero whose gradients are those of the blocks' losses."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        blocks: list[slice],
        block_loss: BlockLoss,
        policies: list[PolicyTokens],
    ) -> Tensor:
        ctx.wants, ctx.settings, ctx.used = ctx.needs_input_grad[:3], (blocks, block_loss), False
        gradients, block_policies = _block_gradients((hidden, weight, bias), ctx.wants, blocks, block_loss)
        policies += block_policies
        # Saved like every tensor, so that activation checkpointing drops them and makes them again.
        ctx.save_for_backward(hidden, weight, bias, *gradients)
        return hidden.new_zeros((), dtype=wide_dtype(hidden))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        hidden, weight, bias, *gradients = ctx.saved_tensors
        if ctx.used:  # an earlier backward pass through the same graph scaled them or returned them
            gradients, _ = _block_gradients((hidden, weight, bias), ctx.wants, *ctx.settings)
        ctx.used = True
        # In place, so that a loss scale needs no second gradient of the head's size. `data`, because autograd refuses a
        # second backward pass if a saved tensor has changed. Reading the factor is free on a CPU only.
        scaled = [None if x is None else x.data for x in gradients]
        del gradients
        if not (devices.free_to_look(grads[0]) and float(grads[0]) == 1.0):
            for x in scaled:
                if x is not None:
                    x.mul_(grads[0])
        d_hidden, d_weight, d_bias = scaled
        return d_hidden, d_weight, d_bias, None, None, None


def _block_gradients(
    leaves: tuple[Tensor, Tensor, Tensor | None],
    wants: Sequence[bool],
    blocks: Sequence[slice],
    block_loss: BlockLoss,
) -> tuple[list[Tensor | None], list[PolicyTokens]]:
    """Returns the gradients of hidden states, weight and bias, and each block's log-probs."""
    d_hidden = torch.zeros_like(leaves[0]) if wants[0] else None
    d_head: list[Tensor | None] = [None, None]
    policies: list[PolicyTokens] = []
    for rows in blocks:
        own = (leaves[0][rows], *leaves[1:])
        own_leaves: list[Any] = [
            None if x is None else x.detach().requires_grad_(want) for x, want in zip(own, wants, strict=True)
        ]
        with torch.enable_grad():
            loss, policy = block_loss(own_leaves[0], own_leaves[1], own_leaves[2], rows)
        policies.append(policy)
        torch.autograd.backward(loss)
        del loss
        d_rows, *parts = (None if x is None else x.grad for x in own_leaves)
        if d_hidden is not None and d_rows is not None:
            d_hidden[rows] = d_rows
        d_head = list(map(_summed, d_head, parts))
        del parts, own_leaves  # before the next block makes its own
    rounded = [None if x is None or y is None else x.to(y.dtype) for x, y in zip(d_head, leaves[1:], strict=True)]
    return [d_hidden, *rounded], policies


def _summed(total: Tensor | None, part: Tensor | None) -> Tensor | None:
    """Returns total + part in float32 or better, so that low-precision parts are rounded once."""
    if part is None:
        return total
    return part.to(wide_dtype(part)) if total is None else total.add_(part)


def _rows_of_a_block(hidden: Tensor, weight: Tensor) -> int:
    """Returns the size of equal blocks whose products fit into the head's gradient."""
    product_dtype = default_product_dtype(hidden)
    num_blocks = math.ceil(len(hidden) * product_dtype.itemsize / (weight.shape[1] * weight.dtype.itemsize))
    return math.ceil(len(hidden) / max(num_blocks, 1))


def _policy_tokens(
    hidden: Tensor, head: PolicyHead, rollout: RolloutTokens, needs: Needs, entropy: bool | Literal["detached"]
) -> PolicyTokens:
    """Returns what a region reads of the policy, with gradient."""
    assert rollout.token_ids is not None
    out = token_logprobs(
        hidden,
        head.weight,
        torch.where(rollout.in_loss, rollout.token_ids, -1),
        gather_ids=rollout.topk.ids if rollout.topk is not None and needs.topk else None,
        top_k=needs.topk if needs.fills else 0,
        entropy=entropy,
        temperature=head.temperature,
        bias=head.bias,
        softcap=head.softcap,
    )
    return PolicyTokens(
        logp=out.logp,
        topk_logp=out.gathered_logp,
        tail_logp=out.tail_logp,
        topk=None if out.topk is None else TopK(out.topk.ids, out.topk.logp, of=needs.anchor),
        entropy=out.entropy,
        version=head.version,
    )


def _mapped(function: Callable[..., Tensor], *records: Any) -> Any:
    """Returns a record whose tensors are the function's results on the tensors of all records, field by field."""
    first = records[0]
    if isinstance(first, Tensor):
        return function(*records)
    if not is_dataclass(first) or isinstance(first, type):
        return first
    names = [field.name for field in fields(first) if field.init]
    return replace(first, **{name: _mapped(function, *(getattr(record, name) for record in records)) for name in names})


def _check(hidden: Tensor, head: PolicyHead, rollout: RolloutTokens, region: Region, needs: Needs) -> None:
    """Raises if the call cannot be split into blocks of tokens."""
    advice = "Use token_logprobs and policy_loss."
    if needs.sequences or needs.whole_call:
        what = "whole sequences" if needs.sequences else "all tokens of the call"
        raise ConfigError(f"region and reduction must decide token by token, but {region.kind} needs {what}. {advice}")
    if needs.full:
        raise ConfigError(f"region must read single ids, but {region.kind} reads whole distributions. {advice}")
    if default_product_dtype(hidden) == torch.float16:
        raise ConfigError(f"Products must be bfloat16 or wider, got float16, whose gradients underflow here. {advice}")
    if rollout.kept_ids is not None:
        raise ConfigError(f"rollout.kept_ids must be None, got kept ids of a truncated sampler. {advice}")
    if rollout.token_ids is None:
        raise MissingDataError("rollout.token_ids must be given, got None. Pass the sampled token of each row.")
    if rollout.in_loss.shape != hidden.shape[:1]:
        raise RecordError(
            f"rollout must be packed with one token per hidden state, got {tuple(rollout.in_loss.shape)} for "
            f"{tuple(hidden.shape)}. Flatten batch and time first."
        )
