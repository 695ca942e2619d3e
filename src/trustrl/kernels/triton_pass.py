r"""One pass over the vocabulary in Triton, for NVIDIA and AMD GPUs. This and `triton_divergence` need `triton`.

Replaces, without its [N, V] arrays,

    raw = hidden @ head.T + bias                # float32 products, never rounded to the inputs' dtype
    z = cap(raw) * scale                        # cap(x) = softcap · tanh(x / softcap), or x itself
    known = z.gather(1, ids)
    z = z.index_put((row, ids), -inf)           # at the counted ids
    found = z.topk(top_k); z = z.index_put((row, found), -inf)
    rest = z.logsumexp(1)
    q = exp(z - rest)
    inner = -(q * log(q)).sum(1)
    largest = raw.abs().amax(1)                 # over the rest

and, with g the gradients of rest, of inner and of the logits at given and found ids,

    dz = q * (g_rest - g_inner * (log(q) + inner))
    dz = dz.scatter_add(1, ids, g_known) * slope                       # slope = ∂z/∂raw
    dz @ head, dz.T @ hidden, dz.sum(0)                                # dz in the inputs' dtype

**Forward.** A program streams one split of the vocabulary past one block of tokens and keeps, per token, the maximum,
Σe and Σe·(z − maximum) with e = exp(z − maximum). A few torch operations on [splits, N] merge the splits. The ids of
each row are sorted beforehand. Columns only ascend, so each row keeps its next due id, and one step over the tile
serves all its rows. A tile takes as many steps as its fullest row has ids in it, usually zero or one; comparing every
column with every id would take C.

**Top-k.** Each split keeps the K largest products of each row in global memory. A tile is searched only while it has
a product above the least of them: K · (1 + ln(columns / K)) times per row if the columns come in random order. The
product that leaves the list joins the split's sums. `torch.topk` over [N, S · K] then picks the best of all splits, and
the others return to the rest as one more split.

**Backward.** One kernel recomputes the logits for as many columns as fit in a bounded buffer, and writes dz to it as if
no id were known. A second kernel overwrites the cells of the known ids. Torch computes the three products: it writes
each slice of the head's gradient once and accumulates d_hidden in float32.

**Rows.** Rows that are not live, and rows whose coefficients are all 0, come last; their blocks return at once in every
kernel. The two products of the backward pass that torch computes include them, as zeros: the host does not know their
number, and asking for it would be a wait.

**Memory** in addition to inputs, results and gradients, with b bytes per input and S · N ≤ `PROGRAMS` · 128 + N:

    forward     40 · S · N, plus 48 · S · N · K with top_k
    backward    max(BUFFER_BYTES, N · V · b / SLICES) for dz (at least one tile of columns), 4 · N · D for d_hidden,
                and N · D · b for hidden states without those of skipped rows, if the head's gradient is wanted

A hidden size that is not a multiple of 16 costs a copy of hidden states and head.

**Bytes moved** in the backward pass, beyond the operands of each product: 3 · N · V · b (dz written once, read by two
products) and at most SLICES · 8 · N · D (d_hidden read and written once for each slice of the vocabulary). The number
of slices does not grow with N.

The kernels run under Triton's interpreter, and compile ahead of time for sm_80, sm_90, sm_100 and gfx942 without
spilling a register. They have not run on a GPU, and their speed is unknown.

Shape suffixes: N tokens, D hidden size, V vocabulary, C known ids per token, K top-k, S splits.
"""

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from trustrl.kernels.devices import BUFFER_BYTES, SLICES
from trustrl.kernels.triton_kernels import FLOOR_VALUE, dz_kernel, given_kernel, known_kernel, rest_kernel
from trustrl.kernels.triton_launch import (
    ID_LAUNCH,
    LAUNCHES,
    SLOTS,
    TOP_K_LAUNCHES,
    Rows,
    aligned,
    blocks,
    compile_time,
    dense,
    due_ids,
    launch_for,
    ordered_rows,
)


class PassResult(NamedTuple):
    """Results of the forward pass in float32. Rows that are not live hold zeros, and −1 as an id."""

    known_NC: Float[Tensor, "N C+K"]
    """Logits at the given ids and at the found ids."""
    found_NK: Int[Tensor, "N K"]
    """Ids of the largest logits that are not counted, largest first; −1 pads a vocabulary with fewer than K."""
    rest_N: Float[Tensor, " N"]
    """Log-sum-exp of the rest: the vocabulary without the counted and the found ids. −inf if the rest is empty."""
    inner_N: Float[Tensor, " N"]
    """Entropy within the rest, in nats; 0 if the rest is empty."""
    largest_N: Float[Tensor, " N"]
    """Largest |product + bias| of the rest; 0 if the rest is empty."""


def forward(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_NC: Int[Tensor, "N C"],
    counts_NC: Bool[Tensor, "N C"],
    scale_N: Float[Tensor, " N"],
    softcap: float | None,
    live_N: Bool[Tensor, " N"] | None = None,
    top_k: int = 0,
) -> PassResult:
    """Returns the logits at given and found ids, and statistics of the rest.

    Args:
        hidden_ND: bfloat16, float16 or float32.
        head_VD: The same dtype as `hidden_ND`.
        bias_V: Added to the products; −inf removes a column.
        ids_NC: 0 ≤ id < V, in any order, with or without repetitions.
        counts_NC: True on the first column of each id to exclude.
        scale_N: 1 / temperature.
        softcap: Bound of the logits before scaling.
        live_N: False on rows to skip. None computes all rows.
        top_k: Number of the largest logits to find among those that are not counted.
    """
    hidden_ND, head_VD = aligned(hidden_ND, head_VD)
    hidden_ND, head_VD, bias_V, scale_N, ids_NC = dense(hidden_ND, head_VD, bias_V, scale_N.float(), ids_NC)
    (N, D), V, device = hidden_ND.shape, head_VD.shape[0], hidden_ND.device
    launch = launch_for(hidden_ND, head_VD, TOP_K_LAUNCHES if top_k else LAUNCHES)
    live_N = torch.ones(N, dtype=torch.bool, device=device) if live_N is None else live_N
    rows = ordered_rows(live_N)
    due = due_ids(ids_NC, counts_NC, V, launch)
    splits = len(due.starts_SN)
    partials_4SN = torch.zeros(4, splits, N, dtype=torch.float32, device=device)
    raw_SNK = ids_SNK = None
    if top_k:
        raw_SNK = torch.full((splits, N, top_k), FLOOR_VALUE, dtype=torch.float32, device=device)
        ids_SNK = torch.zeros((splits, N, top_k), dtype=torch.int32, device=device)
    # Triton launches on the current device, which may not be the tensors'.
    with torch.cuda.device_of(hidden_ND):
        rest_kernel[(blocks(N, launch.rows) * splits,)](
            hidden_ND, head_VD, bias_V, scale_N, softcap, *rows, *due[:2], partials_4SN, raw_SNK, ids_SNK,
            N, V, D, top_k, splits, due.tiles, **compile_time(launch, D), SLOTS=SLOTS,
        )  # fmt: skip
    known_NC = given_logits(hidden_ND, head_VD, bias_V, ids_NC, scale_N, softcap, rows)
    found_NK = ids_NC.new_empty((N, 0), dtype=torch.int64)
    if raw_SNK is not None and ids_SNK is not None:
        best_NK, found_NK, others_NP = _best(raw_SNK, ids_SNK)
        partials_4SN = torch.cat([partials_4SN, _as_split(others_NP, scale_N, softcap)], dim=1)
        best_NK = torch.where(found_NK >= 0, _logit(best_NK, scale_N.unsqueeze(1), softcap), 0.0)
        known_NC = torch.cat([known_NC, best_NK], dim=1)
    rest_N, inner_N, largest_N = (torch.where(live_N, x, 0.0) for x in _merged(*partials_4SN))
    return PassResult(known_NC, found_NK, rest_N, inner_N, largest_N)


def given_logits(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_NC: Int[Tensor, "N C"],
    scale_N: Float[Tensor, " N"],
    softcap: float | None,
    rows: Rows,
) -> Float[Tensor, "N C"]:
    """Returns the logits at the given ids as float32 dot products; 0 in rows that are not live.

    The tensors must be contiguous. Keeps no gathered row of the head, so it needs no memory besides its result.
    """
    (N, C), D = ids_NC.shape, hidden_ND.shape[1]
    known_NC = torch.zeros((N, C), dtype=torch.float32, device=hidden_ND.device)
    with torch.cuda.device_of(hidden_ND):
        given_kernel[(N, blocks(C, ID_LAUNCH["IDS"]))](
            hidden_ND, head_VD, bias_V, scale_N, softcap, *rows, ids_NC.int(), known_NC, C, D, **ID_LAUNCH
        )  # fmt: skip
    return known_NC


def backward(
    hidden_ND: Float[Tensor, "N D"],
    head_VD: Float[Tensor, "V D"],
    bias_V: Float[Tensor, " V"] | None,
    ids_NC: Int[Tensor, "N C"],
    counts_NC: Bool[Tensor, "N C"],
    scale_N: Float[Tensor, " N"],
    softcap: float | None,
    rest_N: Float[Tensor, " N"],
    inner_N: Float[Tensor, " N"],
    d_known_NC: Float[Tensor, "N C"],
    d_rest_N: Float[Tensor, " N"],
    d_inner_N: Float[Tensor, " N"],
    wants: tuple[bool, bool, bool],
) -> tuple[Float[Tensor, "N D"] | None, Float[Tensor, "V D"] | None, Float[Tensor, " V"] | None]:
    """Returns the gradients of hidden states, head and bias; None for each one that `wants` does not request.

    Takes the arguments of `forward`, its results for the rest, and the gradients of the logits at the ids, of rest and
    of inner. `ids_NC` includes the found ids. Gradients of columns with the same id are summed, counted or not. If a
    row's rest is empty, the gradients of rest and inner are ignored. Rows without a gradient are skipped. A frozen
    head, `wants = (True, False, False)`, saves one of three products.
    """
    size = hidden_ND.shape[1]
    hidden_ND, head_VD = aligned(hidden_ND, head_VD)
    hidden_ND, head_VD, bias_V, scale_N, ids_NC = dense(hidden_ND, head_VD, bias_V, scale_N.float(), ids_NC)
    d_known_NC = d_known_NC.float().contiguous()
    (N, D), V, C = hidden_ND.shape, head_VD.shape[0], ids_NC.shape[1]
    launch = launch_for(hidden_ND, head_VD, LAUNCHES)
    # Float32, because every slice of the vocabulary adds to it. A slice of the head's gradient is written once.
    d_hidden_ND = torch.zeros_like(hidden_ND, dtype=torch.float32) if wants[0] else None
    d_head_VD = torch.empty_like(head_VD) if wants[1] else None
    d_bias_V = torch.empty_like(bias_V) if wants[2] and bias_V is not None else None

    present_N = rest_N != -torch.inf
    base_N = torch.where(present_N, rest_N, -FLOOR_VALUE)  # if the rest is empty, every q is 0
    on_rest_N = torch.where(present_N, d_rest_N - d_inner_N * inner_N, 0.0)
    on_log_N = torch.where(present_N, d_inner_N, 0.0)
    alive_N = (d_known_NC != 0).any(-1) | (on_rest_N != 0) | (on_log_N != 0)
    rows = ordered_rows(alive_N)
    # In the head's gradient, 0 times a NaN of a skipped row would be NaN.
    states_ND = torch.where(alive_N.unsqueeze(-1), hidden_ND, 0.0) if wants[1] else hidden_ND
    id_NC, put_NC, stays_NC = _distinct(ids_NC, counts_NC, d_known_NC)
    width = _buffer_columns(N, V, hidden_ND.element_size(), launch.columns)
    # Rows without a gradient are never written, and stay 0.
    buffer = torch.zeros(N, width, dtype=hidden_ND.dtype, device=hidden_ND.device)
    for first in range(0, V, width):
        last = min(first + width, V)
        tiles = blocks(last - first, launch.columns)
        with torch.cuda.device_of(hidden_ND):
            dz_kernel[(blocks(N, launch.rows) * tiles,)](
                hidden_ND, head_VD, bias_V, scale_N, softcap, *rows, base_N, on_rest_N, on_log_N, buffer,
                first, N, V, D, tiles, width, **compile_time(launch, D),
            )  # fmt: skip
            known_kernel[(N, blocks(C, ID_LAUNCH["IDS"]))](
                hidden_ND, head_VD, bias_V, scale_N, softcap, *rows, id_NC, put_NC, stays_NC, buffer,
                first, last, C, D, width, **ID_LAUNCH,
            )  # fmt: skip
        dz = buffer[:, : last - first]
        if d_hidden_ND is not None:
            _add_product(d_hidden_ND, dz, head_VD[first:last])
        if d_head_VD is not None:
            torch.mm(dz.T, states_ND, out=d_head_VD[first:last])
        if d_bias_V is not None:
            d_bias_V[first:last] = dz.sum(0, dtype=torch.float32)
    d_hidden_ND = None if d_hidden_ND is None else d_hidden_ND[:, :size].to(hidden_ND.dtype)
    return d_hidden_ND, None if d_head_VD is None else d_head_VD[:, :size].contiguous(), d_bias_V


def _best(raw_SNK: Tensor, ids_SNK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the best K products of all splits, their ids (−1 if there are fewer), and the other products [N, P]."""
    K = raw_SNK.shape[-1]
    raw_NP, ids_NP = (x.movedim(1, 0).flatten(1) for x in (raw_SNK, ids_SNK))
    best_NK, at_NK = raw_NP.topk(K, dim=-1)
    found_NK = torch.where(best_NK > FLOOR_VALUE, ids_NP.gather(-1, at_NK).long(), -1)
    return best_NK, found_NK, raw_NP.scatter(-1, at_NK, FLOOR_VALUE)


def _as_split(raw_NP: Tensor, scale_N: Tensor, softcap: float | None) -> Tensor:
    """Returns single products in the form of the kernel's partial results [4, 1, N], as one more split."""
    present_NP = raw_NP > FLOOR_VALUE
    z_NP = torch.where(present_NP, _logit(raw_NP, scale_N.unsqueeze(1), softcap), -torch.inf)
    top_N = z_NP.amax(1)
    below_NP = z_NP - torch.where(top_N == -torch.inf, 0.0, top_N).unsqueeze(1)
    e_NP = torch.exp(below_NP)
    moment_N = torch.where(present_NP, e_NP * below_NP, 0.0).sum(1)
    largest_N = torch.where(present_NP, raw_NP.abs(), 0.0).amax(1)
    return torch.stack([top_N, e_NP.sum(1), moment_N, largest_N]).unsqueeze(1)


def _logit(raw: Tensor, scale: Tensor, softcap: float | None) -> Tensor:
    return (raw if softcap is None else softcap * torch.tanh(raw / softcap)) * scale


def _distinct(ids_NC: Tensor, counts_NC: Tensor, d_known_NC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns each row's distinct ids, padded with −1: (id, its total gradient, 1 if the rest includes it as well).

    The gradients of one id are summed in float32, before any rounding: the sampled token is usually also one of the
    K ids, and its two gradients may cancel.
    """
    # A sort and not `torch.unique`, whose number of results would be a wait.
    ordered_NC, source_NC = ids_NC.sort(dim=-1)
    starts_NC = torch.zeros_like(ordered_NC)
    starts_NC[:, 1:] = ordered_NC[:, 1:] != ordered_NC[:, :-1]
    place_NC = starts_NC.cumsum(-1)
    id_NC = torch.full_like(ordered_NC, -1).scatter_(1, place_NC, ordered_NC)
    put_NC = torch.zeros_like(d_known_NC).scatter_add_(1, place_NC, d_known_NC.gather(1, source_NC))
    num_counted_NC = torch.zeros_like(ordered_NC).scatter_add_(1, place_NC, counts_NC.to(ids_NC).gather(1, source_NC))
    return id_NC.int(), put_NC, (num_counted_NC == 0).int()


def _merged(top_SN: Tensor, total_SN: Tensor, moment_SN: Tensor, largest_SN: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (log-sum-exp, entropy, largest product) over all splits. A split without a cell has top −inf."""
    top_N = top_SN.amax(0)
    shift_N = torch.where(top_N == -torch.inf, 0.0, top_N)  # −inf − −inf is NaN
    moved_SN = torch.where(top_SN == -torch.inf, 0.0, top_SN - shift_N)
    keep_SN = torch.exp(top_SN - shift_N)
    total_N = (total_SN * keep_SN).sum(0)
    moment_N = ((moment_SN + moved_SN * total_SN) * keep_SN).sum(0)
    log_total_N = torch.log(total_N)
    inner_N = torch.where(total_N == 0, 0.0, log_total_N - moment_N / total_N)
    return shift_N + log_total_N, inner_N, largest_SN.amax(0)


def _buffer_columns(N: int, V: int, bytes_each: int, step: int) -> int:
    """Returns the number of columns in the buffer: whole tiles, at least one, at most the vocabulary."""
    fitting = BUFFER_BYTES // max(N * bytes_each, 1) // step
    tiles = blocks(V, step)
    return max(1, min(max(fitting, blocks(tiles, SLICES)), tiles)) * step


def _add_product(total_ND: Tensor, dz: Tensor, head: Tensor) -> None:
    """Computes total += dz @ head in place, without rounding below float32."""
    if dz.is_cuda and dz.dtype != torch.float32:
        torch.addmm(total_ND, dz, head, out_dtype=torch.float32, out=total_ND)
    else:  # torch has `out_dtype` on GPUs only
        total_ND.addmm_(dz.float(), head.float())
