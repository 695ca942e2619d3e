"""Log-probs, top-K, entropy and exact divergences from hidden states, without [tokens, vocabulary] logits.

Shape suffixes: N tokens, D hidden size, V vocabulary (this rank's part of it), K given ids.
"""

from typing import Any, Literal, NamedTuple, cast, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.config.validators import one_of
from trustrl.core.vocabulary_impl import VocabularyCall, chosen_impl
from trustrl.errors import ConfigError, MissingDataError, RecordError
from trustrl.kernels import devices, vocab_parallel
from trustrl.kernels.fused_divergence import divergence_sums
from trustrl.kernels.id_columns import GivenIds, given_ids
from trustrl.kernels.logprob_outputs import LogitSummary, TokenLogprobs, TopLogprobs, assembled_logprobs
from trustrl.kernels.pass_inputs import PassInputs
from trustrl.kernels.reference import logits_reference, token_logprobs_reference
from trustrl.kernels.vocab_parallel import VocabShard
from trustrl.kernels.vocab_pass import run_pass

Impl = Literal["auto", "reference", "chunked", "triton"]


__all__ = ["AnchorStates", "TokenLogprobs", "TopLogprobs", "VocabShard", "token_logprobs"]


class AnchorStates(NamedTuple):
    """Hidden states and head of another policy at the same tokens, from which exact divergences are measured."""

    hidden: Float[Tensor, "N D"]
    head: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None = None
    logsumexp: Float[Tensor, " N"] | None = None
    """The anchor's log-sum-exp, if it was recorded. Saves one of the three extra products."""


def token_logprobs(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids: Int[Tensor, "N K"] | None = None,
    top_k: int = 0,
    entropy: bool | Literal["detached"] = False,
    against: AnchorStates | None = None,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    product_dtype: torch.dtype | None = None,
    shard: VocabShard | None = None,
    impl: Impl = "auto",
    block_rows: int | None = None,
    block_vocab: int | None = None,
) -> TokenLogprobs:
    r"""Returns log-probs of the sampled tokens, at given ids and at the policy's own top-K, with tail mass and entropy.

    Replaces, without its [N, V] arrays,

        logp = torch.log_softmax(softcap · tanh((hidden @ head.T + bias) / softcap) / temperature, -1)

    The log-probs of the given ids and the sampled token are accurate even if bf16 products are not, because their
    logits are computed separately in float32. The remaining rounding error is returned as `logp_error`: the true
    log-probs lie within it. (For float32's own rounding it uses the common estimate of √D units in the last place, not
    a proven bound.) Everything except `tv`, `kl` and `logp_error` is differentiable. Only the requested gradients are
    computed. On a CPU, ignored rows and rows whose coefficients are all 0 cost nothing. An accelerator computes them as
    zeros, because skipping them would wait for the device; nothing here does. With a trained head, the forward pass
    allocates the head's gradient and keeps products in it (see `trustrl.kernels.chunked_pass.KeptLogits`): use
    `torch.no_grad()` if no backward pass follows.

    Args:
        hidden_ND: Last hidden states, after the final norm.
        head_VD: Output embedding, one row per vocabulary id. A frozen head (no gradient) is the fast path.
        token_ids_N: Sampled tokens. A negative id marks an ignored row.
        gather_ids: Ids to read, in any order. Negative ids are empty; a repeated id counts once in the tail.
        top_k: Number of the policy's own most probable ids to return.
        entropy: True to return the entropy; "detached" for its value without gradient, cheaper with a frozen head.
        against: Another policy, to return the exact TV and KL from it. Costs three more products, without gradient.
        temperature: Divides the logits; one number or one per token.
        bias: Added to the products.
        softcap: Bends logits into ±softcap, as in Gemma.
        product_dtype: The dtype of the products. Defaults to autocast's dtype if enabled, else that of `hidden_ND`.
        shard: Set it if the head is this rank's part of a sharded vocabulary. `logp_error` is then not returned.
        impl: "auto" uses the Triton pass on a GPU if it agrees with the chunked pass on rows of the first batch, else
            the chunked pass. The environment variable TRUSTRL_VOCAB_IMPL replaces "auto".
        block_rows: Tokens per tile of the chunked pass. Chosen by the device if None.
        block_vocab: Vocabulary ids per tile. Chosen by the device if None.

    Returns:
        TokenLogprobs, in float32 or better.

    Raises:
        RecordError: If shapes, dtypes or devices do not match.
        ConfigError: If a setting is out of range.
        MissingDataError: If `impl="reference"` is used with a shard.

    Examples:
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> out = token_logprobs(hidden, head, torch.tensor([0, 1]), gather_ids=torch.tensor([[1], [0]]))
        >>> out.logp, out.tail_logp.exp()
        (tensor([-0.5514, -0.5514]), tensor([0.2119, 0.2119]))
    """
    _check_tensors(hidden_ND, head_VD, token_ids_N, gather_ids, bias, against)
    _check_settings(temperature, softcap, top_k, head_VD, shard, impl, entropy)
    if impl == "reference":
        settings: dict[str, Any] = {"temperature": temperature, "bias": bias, "softcap": softcap}
        out = token_logprobs_reference(
            hidden_ND, head_VD, token_ids_N, gather_ids=gather_ids, top_k=top_k, entropy=bool(entropy), **settings
        )
        return _reference_divergence(out, hidden_ND, head_VD, token_ids_N, against, settings)
    product_dtype = product_dtype or default_product_dtype(hidden_ND)
    call = VocabularyCall(
        hidden_ND, head_VD, token_ids_N, gather_ids, top_k, entropy, against, temperature, bias, softcap, product_dtype
    )
    chosen = chosen_impl(call, _run_alone) if impl == "auto" else impl
    if shard is not None and shard.reduce_hidden_gradient:
        hidden_ND = vocab_parallel.summed_gradient(hidden_ND, shard)
    wide = torch.promote_types(product_dtype, torch.float32)
    scale_N = _scale(temperature, hidden_ND, wide)
    row_ids = given_ids(token_ids_N, gather_ids)
    ids_NC, counts_NC, inside_NC = row_ids.ids_NC, row_ids.counts_NC, None
    if shard is not None:
        ids_NC, inside_NC = vocab_parallel.local_ids(row_ids.ids_NC, shard, len(head_VD))
        counts_NC = counts_NC & inside_NC
    rows, columns = devices.tile_sizes(hidden_ND, product_dtype)
    tile = block_rows or rows, block_vocab or columns
    inputs = PassInputs(hidden_ND, head_VD, bias, ids_NC, counts_NC, scale_N, softcap, product_dtype, *tile)
    frozen = not (head_VD.requires_grad or (bias is not None and bias.requires_grad))
    # With a frozen head, the forward pass can compute the hidden states' gradient, unless the entropy needs one too.
    slope = (
        chosen == "chunked" and frozen and entropy is not True and torch.is_grad_enabled() and hidden_ND.requires_grad
    )
    summary = _logit_summary(inputs, row_ids, chosen, top_k, slope, entropy is True)
    if shard is not None and inside_NC is not None:
        summary = vocab_parallel.merge(shard, inside_NC, summary)
    out = assembled_logprobs(row_ids, summary, gather_ids, top_k, bool(entropy))
    if entropy == "detached" and out.entropy is not None:
        out = out._replace(entropy=out.entropy.detach())
    if shard is not None:
        out = out._replace(logp_error=None)
    if against is not None:
        tv, kl = _exact_divergence(inputs, row_ids, against, out.logsumexp, inside_NC, shard, chosen)
        out = out._replace(tv=tv, kl=kl)
    return out


def _scale(temperature: float | Tensor, hidden_ND: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 1 / temperature of each row. A number is filled in on the device, not copied to it."""
    if not isinstance(temperature, Tensor):
        temperature = hidden_ND.new_full((), temperature, dtype=dtype)
    return temperature.to(hidden_ND.device, dtype).reciprocal().expand(len(hidden_ND))


def default_product_dtype(hidden_ND: Tensor) -> torch.dtype:
    """Returns autocast's dtype if autocast is enabled, else that of the hidden states."""
    device = hidden_ND.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype


def _run_alone(call: VocabularyCall, impl: str) -> TokenLogprobs:
    """Returns the outputs of one implementation, as if the head were the whole vocabulary."""
    return token_logprobs(**call._asdict(), impl=cast("Impl", impl))


def _logit_summary(
    inputs: PassInputs, row_ids: GivenIds, impl: str, top_k: int, slope: bool, inner_grad: bool
) -> LogitSummary:
    """Runs one pass over this rank's vocabulary."""
    logits_NC, found_NF, rest_N, inner_N, largest_N, _ = run_pass(inputs, row_ids.live_N, impl, top_k, slope)
    num_given = inputs.ids.shape[1]
    # Half a unit in the last place of the product; the sum inside the product is accumulated in float32.
    unit = 0.0 if impl == "triton" else torch.finfo(inputs.product_dtype).eps / 2
    own_unit = torch.finfo(inputs.wide).eps / 2 * inputs.hidden.shape[1] ** 0.5
    largest_logit_N = torch.maximum(largest_N * inputs.scale, logits_NC.detach().abs().amax(-1))
    return LogitSummary(
        given_NC=logits_NC[:, :num_given],
        found_ids_NF=found_NF,
        found_NF=logits_NC[:, num_given:],
        rest_N=rest_N,
        inner_N=inner_N if inner_grad else inner_N.detach(),
        rounding_N=unit * largest_N * inputs.scale,
        own_rounding_N=own_unit * torch.where(row_ids.live_N, largest_logit_N, 0.0),
    )


@torch.no_grad()
def _exact_divergence(
    inputs: PassInputs,
    row_ids: GivenIds,
    against: AnchorStates,
    policy_lse_N: Tensor,
    inside_NC: Tensor | None,
    shard: VocabShard | None,
    impl: str,
) -> tuple[Tensor, Tensor]:
    """Returns the exact (TV, KL(anchor‖policy)) from a second pass over both heads."""
    anchor = inputs._replace(hidden=against.hidden, head=against.head, bias=against.bias)
    anchor_lse_N = against.logsumexp
    if anchor_lse_N is None:
        summary = _logit_summary(anchor, row_ids, impl, 0, slope=False, inner_grad=False)
        if shard is not None and inside_NC is not None:
            summary = vocab_parallel.merge(shard, inside_NC, summary)
        anchor_lse_N = assembled_logprobs(row_ids, summary, None, 0, False).logsumexp
    if impl == "triton":
        from trustrl.kernels import triton_divergence  # imported on use, because only this pass needs triton

        sums = triton_divergence.divergence_sums(inputs, anchor, policy_lse_N, anchor_lse_N, row_ids.live_N)
    else:
        sums = divergence_sums(inputs, anchor, policy_lse_N, anchor_lse_N.to(inputs.scale.dtype), row_ids.live_N)
    tv, kl = (sums if shard is None else vocab_parallel.summed(sums, shard)).unbind(-1)
    return tv / 2, kl


def _reference_divergence(
    out: TokenLogprobs, hidden: Tensor, head: Tensor, token_ids: Tensor, against: AnchorStates | None,
    settings: dict[str, Any],
) -> TokenLogprobs:  # fmt: skip
    """Adds the exact TV and KL from an anchor to the reference outputs, with every logit in memory."""
    if against is None:
        return out
    with torch.no_grad():
        policy = torch.log_softmax(logits_reference(hidden, head, **settings), -1)
        anchor_settings: dict[str, Any] = {**settings, "bias": against.bias}
        anchor = torch.log_softmax(logits_reference(against.hidden, against.head, **anchor_settings), -1)
        live = token_ids >= 0
        tv = (policy.exp() - anchor.exp()).abs().sum(-1) / 2
        kl = torch.where(anchor > -torch.inf, anchor.exp() * (anchor - policy), 0.0).sum(-1)
    return out._replace(tv=torch.where(live, tv, 0.0), kl=torch.where(live, kl, 0.0))


def _check_tensors(
    hidden: Tensor, head: Tensor, token_ids: Tensor, gather_ids: Tensor | None, bias: Tensor | None,
    against: AnchorStates | None,
) -> None:  # fmt: skip
    """Raises if shapes, dtypes or devices do not match."""

    def must(ok: bool, what: str, rule: str, got: object, advice: str) -> None:
        if not ok:
            raise RecordError(f"{what} must be {rule}, got {got}. {advice}")

    rows = tuple(hidden.shape[:1])
    must(hidden.ndim == 2, "hidden_ND", "[tokens, hidden size]", tuple(hidden.shape), "Flatten batch and time first.")
    must(
        head.ndim == 2 and head.shape[1] == hidden.shape[1], "head_VD", f"[vocabulary, {hidden.shape[1]}]",
        tuple(head.shape), "Pass the output embedding's weight with one row per vocabulary id.",
    )  # fmt: skip
    named = {"token_ids_N": token_ids} | ({} if gather_ids is None else {"gather_ids": gather_ids})
    for name, ids in named.items():
        integer = not ids.is_floating_point() and ids.dtype != torch.bool
        must(integer, name, "an integer tensor", ids.dtype, "Convert it with .long().")
        must(ids.shape[:1] == rows, name, f"of {rows[0]} rows", tuple(ids.shape), "Pass one row per hidden state.")
    must(token_ids.ndim == 1, "token_ids_N", "one id per token", tuple(token_ids.shape), "Flatten batch and time.")
    if gather_ids is not None:
        must(gather_ids.ndim == 2, "gather_ids", "[tokens, K]", tuple(gather_ids.shape), "Flatten batch and time.")
    pairs: list[tuple[str, Tensor | None, tuple[int, ...]]] = [("bias", bias, (head.shape[0],))]
    if against is not None:
        pairs += [
            ("against.hidden", against.hidden, (rows[0], against.head.shape[-1])),
            ("against.head", against.head, (head.shape[0], against.hidden.shape[-1])),
            ("against.bias", against.bias, (head.shape[0],)),
            ("against.logsumexp", against.logsumexp, rows),
        ]
    present = {name: (x, shape) for name, x, shape in pairs if x is not None}
    for name, (x, shape) in present.items():
        must(tuple(x.shape) == shape, name, f"of shape {shape}", tuple(x.shape), "Use the same tokens and vocabulary.")
    tensors = {"head_VD": head, **named, **{name: x for name, (x, _) in present.items()}}
    for name, x in tensors.items():
        must(x.device == hidden.device, name, f"on {hidden.device}", x.device, "Move it there with .to().")


def _check_settings(
    temperature: float | Tensor,
    softcap: float | None,
    top_k: int,
    head: Tensor,
    shard: VocabShard | None,
    impl: Impl,
    entropy: bool | str,
) -> None:
    """Raises if a setting is out of range or does not fit `impl`."""
    one_of("impl", impl, get_args(Impl))
    if entropy not in (True, False, "detached"):
        raise ConfigError(f'entropy must be True, False or "detached", got {entropy!r}.')
    if not isinstance(temperature, Tensor) and not 0 < temperature < float("inf"):
        raise ConfigError(
            f"temperature must be a finite number > 0, got {temperature}. Greedy decoding has no distribution; "
            "use 1.0 to score its tokens."
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ConfigError(f"softcap must be a finite number > 0, got {softcap}. Use None to disable the cap.")
    if not 0 <= top_k <= len(head):
        raise ConfigError(f"top_k must be between 0 and the head's {len(head)} rows, got {top_k}.")
    if impl == "reference" and shard is not None:
        raise MissingDataError('shard must be None with impl="reference", got a shard. Use impl="chunked" instead.')
