r"""Any device, plain torch: the vocabulary in tiles, the logits recomputed in the backward pass.

Replaces, without its [N, V] arrays,

    logp = torch.log_softmax(cap(hidden @ head.T + bias) / temperature, -1)
    logp.gather(-1, ids), logsumexp of the rest, −(exp(logp) · logp).sum(-1)

**Head repair.** The logits of the given ids are computed apart, as float32 dot products, and take the place of the
tile's rounded ones inside the log-sum-exp. Rounding is then left only in the tail: the error of a log-prob is at most
(mass outside the ids) × (largest rounding of a logit).

Memory beside inputs and gradients: one tile of `block_rows × block_vocab` in float32 (two in the backward pass) and the
given ids' head rows of one block. Products: one forward, three backward (one of them the recomputation; one fewer with
a frozen head).
"""

from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from trustrl.kernels.outputs import TokenLogprobs, first_of_its_id, wide_dtype

BLOCK_ROWS, BLOCK_VOCAB, BLOCK_GATHER = 1024, 4096, 64


class Shape(NamedTuple):
    """What turns a raw product into a logit, and how the work is cut."""

    softcap: float | None
    block_rows: int
    block_vocab: int


def token_logprobs_chunked(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    token_ids_N: Int[Tensor, " N"],
    *,
    gather_ids_NK: Int[Tensor, "N K"] | None = None,
    entropy: bool = False,
    temperature: float | Float[Tensor, " N"] = 1.0,
    bias_V: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    block_rows: int = BLOCK_ROWS,
    block_vocab: int = BLOCK_VOCAB,
) -> TokenLogprobs:
    """The same results as `token_logprobs_reference`, a tile of the vocabulary at a time.

    Gradients reach hidden states, head and bias, whichever ask for one. Ids below 0 are empty columns.
    """
    token_N1 = token_ids_N.unsqueeze(-1)
    ids_NK = token_N1 if gather_ids_NK is None else torch.cat([token_N1, gather_ids_NK], dim=-1)
    valid_NK = (ids_NK >= 0) & first_of_its_id(ids_NK)
    # An empty column is read at the sampled token's id; like a repeated one it counts nowhere.
    read_NK = torch.where(ids_NK >= 0, ids_NK, token_N1)
    dtype = wide_dtype(hidden_ND)
    scale_N = torch.as_tensor(temperature, dtype=dtype, device=hidden_ND.device).reciprocal().expand(hidden_ND.shape[0])
    shape = Shape(softcap, block_rows, block_vocab)
    known_NK, rest_N, inner_N = _Pass.apply(hidden_ND, head_VD, bias_V, read_NK, valid_NK, scale_N, shape)  # type: ignore[misc]
    lse_N = torch.logaddexp(torch.logsumexp(known_NK.masked_fill(~valid_NK, -torch.inf), dim=-1), rest_N)
    logp_NK = known_NK - lse_N.unsqueeze(-1)
    gathered = tail = None
    if gather_ids_NK is not None:
        gathered = logp_NK[:, 1:].masked_fill(gather_ids_NK < 0, -torch.inf)
        tail = rest_N - lse_N
    if entropy:
        # −Σ p log p over the known ids, and the rest as one cell with an entropy of its own: no term cancels another.
        on_known = torch.where(valid_NK, logp_NK.exp() * logp_NK, 0.0).sum(-1)
        log_rest = torch.where(rest_N > -torch.inf, rest_N - lse_N, 0.0)
        on_rest = torch.where(rest_N > -torch.inf, log_rest.exp() * (log_rest - inner_N), 0.0)
        return TokenLogprobs(logp_NK[:, 0], lse_N, gathered, tail, -on_known - on_rest)
    return TokenLogprobs(logp_NK[:, 0], lse_N, gathered, tail)


class _Pass(Function):
    """(logits at the given ids, log-sum-exp of the rest, entropy within the rest); the others follow by torch."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        read: Tensor,
        valid: Tensor,
        scale: Tensor,
        shape: Shape,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = wide_dtype(hidden)
        known = torch.empty(read.shape, dtype=dtype, device=hidden.device)
        rest = torch.full(read.shape[:1], -torch.inf, dtype=dtype, device=hidden.device)
        inner = torch.zeros_like(rest)
        for rows in _blocks(hidden.shape[0], shape.block_rows):
            h, s = hidden[rows], scale[rows]
            for some in _blocks(h.shape[0], BLOCK_GATHER):
                known[rows][some] = _logit(_given(h[some], head, bias, read[rows][some]), s[some], shape.softcap)[0]
            top = torch.full_like(s, -torch.inf)
            total, moment = torch.zeros_like(s), torch.zeros_like(s)
            for columns in _blocks(head.shape[0], shape.block_vocab):
                z, _ = _logit(_tile(h, head, bias, columns), s, shape.softcap)
                z = _without(z, read[rows], valid[rows], columns)
                higher = torch.maximum(top, z.amax(-1))
                # A tile may hold no cell at all; −inf − −inf is NaN.
                shift = torch.where(higher > -torch.inf, higher, 0.0)
                e = torch.exp(z - shift.unsqueeze(-1))
                keep = torch.exp(top - shift)
                before, total = total, total * keep + e.sum(-1)
                # Σ e (z − shift), carried over from the previous shift.
                moved = torch.where(top > -torch.inf, top - shift, 0.0)
                moment = (moment + moved * before) * keep
                moment = moment + torch.where(e > 0, e * (z - shift.unsqueeze(-1)), 0.0).sum(-1)
                top = higher
            empty = total == 0
            rest[rows] = torch.where(empty, -torch.inf, torch.where(empty, 0.0, top) + torch.log(total))
            some_mass = torch.where(empty, 1.0, total)
            inner[rows] = torch.log(some_mass) - moment / some_mass
        ctx.save_for_backward(hidden, head, bias, read, valid, scale, rest, inner)
        ctx.shape = shape
        return known, rest, inner

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        r"""With q the distribution within the rest, q_j = exp(z_j − rest), and H its entropy:

        ∂/∂z_j = q_j (g_rest − g_H (log q_j + H))
        """
        g_known, g_rest, g_inner = grad_outputs
        hidden, head, bias, read, valid, scale, rest, inner = ctx.saved_tensors
        shape: Shape = ctx.shape
        dtype = rest.dtype
        wants_hidden, wants_head, wants_bias = ctx.needs_input_grad[:3]
        d_hidden = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device) if wants_hidden else None
        d_head = torch.zeros(head.shape, dtype=dtype, device=head.device) if wants_head else None
        d_bias = torch.zeros(head.shape[0], dtype=dtype, device=head.device) if wants_bias else None

        def add(dz: Tensor, h: Tensor, columns: slice, at: slice) -> None:
            dz = dz.to(hidden.dtype)
            if d_hidden is not None:
                d_hidden[at] += dz @ head[columns]
            if d_head is not None:
                d_head[columns] += dz.T @ h
            if d_bias is not None:
                d_bias[columns] += dz.sum(0, dtype=dtype)

        for rows in _blocks(hidden.shape[0], shape.block_rows):
            h, s = hidden[rows], scale[rows]
            live = rest[rows] > -torch.inf
            on_rest = torch.where(live, g_rest[rows] - g_inner[rows] * inner[rows], 0.0).unsqueeze(-1)
            per_log = torch.where(live, g_inner[rows], 0.0).unsqueeze(-1)
            base = torch.where(live, rest[rows], torch.inf).unsqueeze(-1)
            for columns in _blocks(head.shape[0], shape.block_vocab):
                z, slope = _logit(_tile(h, head, bias, columns), s, shape.softcap)
                log_q = _without(z, read[rows], valid[rows], columns) - base
                q = torch.exp(log_q)
                dz = torch.where(q > 0, q * (on_rest - per_log * log_q), 0.0)
                add(dz * slope, h, columns, rows)
            for some in _blocks(h.shape[0], BLOCK_GATHER):
                ids = read[rows][some]
                _, slope = _logit(_given(h[some], head, bias, ids), s[some], shape.softcap)
                dz = g_known[rows][some] * slope
                if d_hidden is not None:
                    d_hidden[rows][some] += torch.einsum("nk,nkd->nd", dz, head[ids].to(dtype))
                if d_head is not None:
                    d_head.index_add_(
                        0, ids.reshape(-1), (dz.unsqueeze(-1) * h[some].to(dtype).unsqueeze(1)).flatten(0, 1)
                    )
                if d_bias is not None:
                    d_bias.index_add_(0, ids.reshape(-1), dz.reshape(-1))
        return (
            None if d_hidden is None else d_hidden.to(hidden.dtype),
            None if d_head is None else d_head.to(head.dtype),
            None if d_bias is None else d_bias.to(bias.dtype),
            None, None, None, None,
        )  # fmt: skip


def _blocks(size: int, step: int) -> list[slice]:
    return [slice(at, min(at + step, size)) for at in range(0, size, step)]


def _tile(hidden: Tensor, head: Tensor, bias: Tensor | None, columns: slice) -> Tensor:
    """Raw logits of some columns, multiplied in the inputs' dtype."""
    raw = (hidden @ head[columns].T).to(wide_dtype(hidden))
    return raw if bias is None else raw + bias[columns]


def _given(hidden: Tensor, head: Tensor, bias: Tensor | None, ids: Tensor) -> Tensor:
    """Raw logits at given ids, as dot products in float32 or better."""
    dtype = wide_dtype(hidden)
    raw = torch.einsum("nd,nkd->nk", hidden.to(dtype), head[ids].to(dtype))
    return raw if bias is None else raw + bias[ids]


def _logit(raw: Tensor, scale: Tensor, softcap: float | None) -> tuple[Tensor, Tensor]:
    """(logit, its slope in the raw product)."""
    scale = scale.unsqueeze(-1)
    if softcap is None:
        return raw * scale, scale
    bent = torch.tanh(raw / softcap)
    return softcap * bent * scale, (1 - bent.square()) * scale


def _without(z: Tensor, read: Tensor, valid: Tensor, columns: slice) -> Tensor:
    """The tile with −inf at the given ids: they are accounted for apart."""
    width = columns.stop - columns.start
    at = read - columns.start
    # Ids of other tiles go to one column too many, which is cut off again.
    at = torch.where(valid & (at >= 0) & (at < width), at, width)
    wide = torch.cat([z, z[:, :1]], dim=-1)
    return wide.scatter(-1, at, -torch.inf)[:, :width]
