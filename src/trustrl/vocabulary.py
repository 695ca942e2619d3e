"""From hidden states to everything a trust region needs of the vocabulary, without [tokens, vocabulary] logits.

Shape suffixes: N tokens, D hidden size, V vocabulary (this rank's part of it), K given ids.
"""

from typing import Literal, NamedTuple, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor

from trustrl.config.checks import one_of
from trustrl.errors import ConfigError, MissingDataError, RecordError
from trustrl.kernels import cells, chunked, vocab_parallel
from trustrl.kernels.divergence import divergence_sums
from trustrl.kernels.outputs import TokenLogprobs
from trustrl.kernels.reference import logits_reference, token_logprobs_reference
from trustrl.kernels.vocab_parallel import VocabShard
from trustrl.kernels.vocab_pass import vocab_pass
from trustrl.kernels.work import Pass

Impl = Literal["auto", "reference", "chunked", "triton"]


class Anchor(NamedTuple):
    """Another policy's hidden states at the same tokens, and its head: what exact divergences are measured from."""

    hidden: Float[Tensor, "N D"]
    head: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None = None
    logsumexp: Float[Tensor, " N"] | None = None
    """Its log-sum-exp, if it was recorded: saves one of the three extra products."""


def token_logprobs(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids: Int[Tensor, "N K"] | None = None,
    top_k: int = 0,
    entropy: bool | Literal["detached"] = False,
    against: Anchor | None = None,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    product_dtype: torch.dtype | None = None,
    shard: VocabShard | None = None,
    impl: Impl = "auto",
    block_rows: int = chunked.BLOCK_ROWS,
    block_vocab: int = chunked.BLOCK_VOCAB,
) -> TokenLogprobs:
    r"""Log-probs of the sampled tokens, at given ids and at the policy's own top-K, their tail mass and entropy.

    Replaces, without its [N, V] arrays,

        logp = torch.log_softmax(softcap · tanh((hidden @ head.T + bias) / softcap) / temperature, -1)

    The given ids and the sampled token are right even where bf16 products are not: their logits are computed apart in
    float32. What rounding is left is returned as `logp_error`: the true log-probs lie within it (of float32's own
    rounding it holds the usual estimate, √D units in the last place, not a proof). Everything but `tv`, `kl` and
    `logp_error` is differentiable; only the gradients that are asked for are computed, and a row whose coefficients are
    all 0 costs nothing in the backward pass.

    Args:
        hidden_ND: last hidden states, after the final norm.
        head_VD: the output embedding; its rows are words. A frozen head (no gradient) is the fast path.
        token_ids_N: the sampled tokens; a negative id makes an ignored row.
        gather_ids: ids to read, in any order; negative ids are empty, a repeated id counts once in the tail.
        top_k: how many of the policy's own most probable ids to return.
        entropy: whether to return the entropy; "detached" for its value alone, which is cheaper with a frozen head.
        against: another policy; its exact TV and KL are returned. Costs three more products, without gradient.
        temperature: divides the logits; one number or one per token.
        bias: added to the products.
        softcap: bends logits into ±softcap, as Gemma does.
        product_dtype: what tiles are multiplied in; autocast's dtype or the hidden states' own unless said otherwise.
        shard: set where the head is this rank's part of a sharded vocabulary. `logp_error` is then not returned.
        impl: "auto" takes the chunked pass. The Triton pass is chosen by name until it has run on a GPU.
        block_rows: tokens per tile of the chunked pass.
        block_vocab: words per tile.

    Returns:
        TokenLogprobs, float32 or better.

    Raises:
        RecordError: shapes, dtypes or devices do not fit.
        ConfigError: a setting is out of range.

    Examples:
        >>> hidden, head = torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
        >>> out = token_logprobs(hidden, head, torch.tensor([0, 1]), gather_ids=torch.tensor([[1], [0]]))
        >>> out.logp, out.tail_logp.exp()
        (tensor([-0.5514, -0.5514]), tensor([0.2119, 0.2119]))
    """
    _check_tensors(hidden_ND, head_VD, token_ids_N, gather_ids, bias, against)
    one_of("impl", impl, get_args(Impl))
    if entropy not in (True, False, "detached"):
        raise ConfigError(f'entropy must be True, False or "detached", got {entropy!r}.')
    _check_settings(temperature, softcap, top_k, head_VD, shard, impl)
    settings = {"temperature": temperature, "bias": bias, "softcap": softcap}
    if impl == "reference":
        out = token_logprobs_reference(
            hidden_ND, head_VD, token_ids_N, gather_ids=gather_ids, top_k=top_k, entropy=bool(entropy), **settings
        )
        return (
            out if against is None else _reference_divergence(out, hidden_ND, head_VD, token_ids_N, against, settings)
        )
    if shard is not None and shard.reduce_hidden_gradient:
        hidden_ND = vocab_parallel.SumGradient.apply(hidden_ND, shard.group)  # type: ignore[assignment]
    device = hidden_ND.device.type
    if product_dtype is None:
        product_dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_ND.dtype
    wide = torch.promote_types(product_dtype, torch.float32)
    scale_N = torch.as_tensor(temperature, dtype=wide, device=hidden_ND.device).reciprocal().expand(len(hidden_ND))
    given = cells.given_ids(token_ids_N, gather_ids)
    ids_NC, counts_NC, inside_NC = given.ids_NC, given.counts_NC, None
    if shard is not None:
        ids_NC, inside_NC = vocab_parallel.local_ids(given, shard, len(head_VD))
        counts_NC = counts_NC & inside_NC
    work = Pass(hidden_ND, head_VD, bias, ids_NC, counts_NC, scale_N, softcap, product_dtype, block_rows, block_vocab)
    frozen = not (head_VD.requires_grad or (bias is not None and bias.requires_grad))
    chosen = "triton" if impl == "triton" else "chunked"
    # With a frozen head the forward pass can make the hidden states' gradient itself, unless the entropy needs one too.
    slope = (
        chosen == "chunked" and frozen and entropy is not True and torch.is_grad_enabled() and hidden_ND.requires_grad
    )
    known = _known(work, given, chosen, top_k, slope, entropy is True)
    if shard is not None and inside_NC is not None:
        known = vocab_parallel.merge(shard, inside_NC, known)
    out = cells.outputs(given, known, gather_ids, top_k, bool(entropy))
    if entropy == "detached" and out.entropy is not None:
        out = out._replace(entropy=out.entropy.detach())
    if shard is not None:
        out = out._replace(logp_error=None)
    if against is not None:
        tv, kl = _divergence(work, given, against, out.logsumexp, inside_NC, shard)
        out = out._replace(tv=tv, kl=kl)
    return out


def _known(work: Pass, given: cells.GivenIds, impl: str, top_k: int, slope: bool, inner_grad: bool) -> cells.Known:
    """One pass over this rank's vocabulary."""
    logits_NC, found_NF, rest_N, inner_N, largest_N, _ = vocab_pass(
        work.hidden, work.head, work.bias, work.ids, work.counts, given.live_N, *work[5:], impl, top_k, slope
    )
    num_given = work.ids.shape[1]
    # Half a unit in the last place of the product; the sum inside it was made in float32.
    unit = 0.0 if impl == "triton" else torch.finfo(work.product_dtype).eps / 2
    own_unit = torch.finfo(work.wide).eps / 2 * work.hidden.shape[1] ** 0.5
    largest_logit_N = torch.maximum(largest_N * work.scale, logits_NC.detach().abs().amax(-1))
    return cells.Known(
        given_NC=logits_NC[:, :num_given],
        found_ids_NF=found_NF,
        found_NF=logits_NC[:, num_given:],
        rest_N=rest_N,
        inner_N=inner_N if inner_grad else inner_N.detach(),
        rounding_N=unit * largest_N * work.scale,
        own_rounding_N=own_unit * torch.where(given.live_N, largest_logit_N, 0.0),
    )


@torch.no_grad()
def _divergence(
    work: Pass,
    given: cells.GivenIds,
    against: Anchor,
    policy_lse_N: Tensor,
    inside_NC: Tensor | None,
    shard: VocabShard | None,
) -> tuple[Tensor, Tensor]:
    """Exact (TV, KL(anchor‖policy)), from a second pass over both heads."""
    anchor = work._replace(hidden=against.hidden, head=against.head, bias=against.bias)
    anchor_lse_N = against.logsumexp
    if anchor_lse_N is None:
        known = _known(anchor, given, "chunked", 0, slope=False, inner_grad=False)
        if shard is not None and inside_NC is not None:
            known = vocab_parallel.merge(shard, inside_NC, known)
        anchor_lse_N = cells.outputs(given, known, None, 0, False).logsumexp
    at = given.live_N.nonzero().squeeze(-1)
    sums = divergence_sums(work.rows(at), anchor.rows(at), policy_lse_N[at], anchor_lse_N.to(work.scale.dtype)[at])
    sums = vocab_parallel.sum_over_ranks(sums, shard)
    tv, kl = sums.new_zeros((len(policy_lse_N), 2)).index_copy_(0, at, sums).unbind(-1)
    return tv / 2, kl


def _reference_divergence(
    out: TokenLogprobs, hidden: Tensor, head: Tensor, token_ids: Tensor, against: Anchor, settings: dict
) -> TokenLogprobs:
    with torch.no_grad():
        policy = torch.log_softmax(logits_reference(hidden, head, **settings), -1)
        other = {**settings, "bias": against.bias}
        anchor = torch.log_softmax(logits_reference(against.hidden, against.head, **other), -1)
        live = token_ids >= 0
        tv = (policy.exp() - anchor.exp()).abs().sum(-1) / 2
        kl = torch.where(anchor > -torch.inf, anchor.exp() * (anchor - policy), 0.0).sum(-1)
    return out._replace(tv=torch.where(live, tv, 0.0), kl=torch.where(live, kl, 0.0))


def _check_tensors(
    hidden: Tensor, head: Tensor, token_ids: Tensor, gather_ids: Tensor | None, bias: Tensor | None,
    against: Anchor | None,
) -> None:  # fmt: skip
    def must(ok: bool, what: str, rule: str, got: object, advice: str) -> None:
        if not ok:
            raise RecordError(f"{what} must be {rule}, got {got}. {advice}")

    rows = tuple(hidden.shape[:1])
    must(hidden.ndim == 2, "hidden_ND", "[tokens, hidden size]", tuple(hidden.shape), "Flatten batch and time first.")
    must(
        head.ndim == 2 and head.shape[1] == hidden.shape[1], "head_VD", f"[vocabulary, {hidden.shape[1]}]",
        tuple(head.shape), "Pass the output embedding's weight as the model keeps it, words as rows.",
    )  # fmt: skip
    named = {"token_ids_N": token_ids} | ({} if gather_ids is None else {"gather_ids": gather_ids})
    for name, ids in named.items():
        must(not ids.is_floating_point() and ids.dtype != torch.bool, name, "whole numbers", ids.dtype, "Use .long().")
        must(ids.shape[:1] == rows, name, f"of {rows[0]} rows", tuple(ids.shape), "One row for each hidden state.")
    must(token_ids.ndim == 1, "token_ids_N", "one id per token", tuple(token_ids.shape), "Flatten batch and time.")
    if gather_ids is not None:
        must(gather_ids.ndim == 2, "gather_ids", "[tokens, K]", tuple(gather_ids.shape), "Flatten batch and time.")
    pairs = [("bias", bias, (head.shape[0],))]
    if against is not None:
        pairs += [
            ("against.hidden", against.hidden, (rows[0], against.head.shape[-1])),
            ("against.head", against.head, (head.shape[0], against.hidden.shape[-1])),
            ("against.bias", against.bias, (head.shape[0],)),
            ("against.logsumexp", against.logsumexp, rows),
        ]
    for name, x, shape in pairs:
        must(x is None or tuple(x.shape) == shape, name, f"of shape {shape}", None if x is None else tuple(x.shape), "")
    tensors = {"head_VD": head, **named, **{n: x for n, x, _ in pairs if x is not None}}
    for name, x in tensors.items():
        must(x.device == hidden.device, name, f"on {hidden.device}", x.device, "Move it there with .to().")


def _check_settings(
    temperature: float | Tensor, softcap: float | None, top_k: int, head: Tensor, shard: VocabShard | None, impl: Impl
) -> None:
    if not isinstance(temperature, Tensor) and not 0 < temperature < float("inf"):
        raise ConfigError(
            f"temperature must be a finite number > 0, got {temperature}. Greedy decoding has no distribution; "
            "use 1.0 to score its tokens."
        )
    if softcap is not None and not 0 < softcap < float("inf"):
        raise ConfigError(f"softcap must be a finite number > 0, got {softcap}. Use None for no cap.")
    if not 0 <= top_k <= len(head):
        raise ConfigError(f"top_k must be between 0 and the head's {len(head)} rows, got {top_k}.")
    if impl == "triton" and top_k:
        raise ConfigError(f'impl "triton" must be used without top_k, got {top_k}. Use impl="chunked" for it.')
    if impl == "reference" and shard is not None:
        raise MissingDataError('impl "reference" must have the whole head, got a shard. Use impl="chunked".')
