r"""Any device, plain torch: the vocabulary in tiles, the logits recomputed in the backward pass.

Replaces, without its [N, V] arrays,

    logits = cap(hidden @ head.T + bias) · scale
    known  = logits.gather(-1, ids)
    rest   = logits with −inf at the counted ids
    torch.logsumexp(rest, -1),  entropy of softmax(rest)

**Head repair.** The logits of the given ids are computed apart, as float32 dot products, and are left out of the tiles.
The rounding of a bf16 product is then left only in the rest: the error of a log-prob is at most (mass outside the ids)
× (largest rounding of a logit).

**Order.** The forward pass streams the vocabulary for a block of rows and keeps four numbers per row. The backward pass
takes the vocabulary as the outer loop, so that each tile of the head's gradient is written once; the hidden states'
gradient adds up in float32. When nobody differentiates the entropy, the gradient of `rest` in the hidden states is
made in the forward pass (`slope`), from the tile that is there anyway: with a frozen head nothing is recomputed.

Memory beside inputs, outputs and gradients: one tile of `block_rows × block_vocab` in the products' dtype (two with
`slope`), and one block of head rows for the given ids when uncompiled.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trustrl.kernels import tiles
from trustrl.kernels.outputs import wide_dtype

BLOCK_ROWS, BLOCK_VOCAB = 1024, 4096
EAGER_DOT_ROWS = 64
"""Rows whose given head rows are gathered at once when the dot products are not compiled."""

SAFE_EXPONENT = 20.0
"""A tile's logits may exceed the running shift by this much before the shift is raised: one pass instead of two."""


class Pass(NamedTuple):
    """What one pass over the vocabulary is about."""

    hidden: Tensor
    head: Tensor
    bias: Tensor | None
    ids: Tensor
    """[N, C], each within the vocabulary."""
    counts: Tensor
    """[N, C], true on the columns that are cells of their own: no two of a row with the same id."""
    scale: Tensor
    """[N], 1 / temperature."""
    softcap: float | None
    product_dtype: torch.dtype
    """What the tiles are multiplied in. Inputs are rounded to it first: that is the model's definition."""
    block_rows: int
    block_vocab: int

    def rows(self, at: slice | Tensor) -> "Pass":
        """The same for some of the rows."""
        return self._replace(hidden=self.hidden[at], ids=self.ids[at], counts=self.counts[at], scale=self.scale[at])

    @property
    def large(self) -> bool:
        """Whether compiling pays."""
        return self.hidden.shape[0] * self.head.shape[0] >= tiles.WORTH_COMPILING

    @property
    def wide(self) -> torch.dtype:
        """What sums and results are held in."""
        return torch.promote_types(self.product_dtype, torch.float32)


class Streamed(NamedTuple):
    """Results per row."""

    known: Tensor
    """[N, C + k], logits at the given ids and at those found."""
    found: Tensor
    """[N, k], the largest ids of the rest; −1 where the vocabulary ended."""
    rest: Tensor
    """[N], log-sum-exp of every other logit; −inf where there is none."""
    inner: Tensor
    """[N], entropy within the rest."""
    largest: Tensor
    """[N], largest |product| in the rest."""
    slope: Tensor
    """[N, D], ∂rest/∂hidden, or nothing."""


def forward(work: Pass, top_k: int, slope: bool) -> Streamed:
    """One pass over the vocabulary for every row."""
    num_rows = work.hidden.shape[0]
    whole: Streamed | None = None
    for rows in slices(num_rows, work.block_rows):
        block = _forward_block(work.rows(rows), top_k, slope)
        if len(block.rest) == num_rows:
            return block
        if whole is None:
            whole = Streamed(*(x.new_empty((num_rows, *x.shape[1:])) for x in block))
        for all_rows, some in zip(whole, block, strict=True):
            all_rows[rows] = some
    assert whole is not None  # there is always one block
    return whole


def _forward_block(work: Pass, top_k: int, slope: bool) -> Streamed:
    hidden = work.hidden.to(work.product_dtype)
    num_rows, size = hidden.shape[0], work.head.shape[0]
    cells = Cells(work)
    running = Running(work, slope)
    best = Best(num_rows, top_k, hidden)
    room = hidden.new_empty(num_rows * min(work.block_vocab, size) * (2 if slope else 1))
    for at, columns in enumerate(slices(size, work.block_vocab)):
        head, bias = work.head[columns].to(work.product_dtype), _part(work.bias, columns)
        product, weights = _carve(room, slope, num_rows, head.shape[0])
        torch.mm(hidden, head.T, out=product)
        row, _, column = cells.within(at)
        product[row, column - columns.start] = -torch.inf
        if top_k:
            dropped, dropped_bias = best.take(product, bias, columns.start)
            running.add(dropped, dropped_bias, work, large=False)
            if slope:  # what is dropped from the best belongs to the rest, at head rows of its own
                running.add_slope_at(dropped, dropped_bias, best.dropped_ids, work)
        running.add(product, bias, work, work.large, weights, head)
    found = best.ids
    ids = torch.cat([work.ids, found.clamp(min=0)], dim=-1)
    return Streamed(given_logits(work._replace(ids=ids)), found, *running.results())


class Upstream(NamedTuple):
    """What the backward pass starts from, per row."""

    rest: Tensor
    inner: Tensor
    slope: Tensor
    d_known: Tensor
    """[N, C], the loss's gradient in `known`; its columns include the ids found."""
    d_rest: Tensor
    d_inner: Tensor


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


def backward(work: Pass, upstream: Upstream, wants: tuple[bool, bool, bool]) -> Gradients:
    r"""Gradients in (hidden, head, bias), those that are wanted. `work.ids` includes the ids found.

    With q_j = exp(z_j − rest) and H the entropy within the rest:   ∂/∂z_j = q_j (d_rest − d_inner (log q_j + H))

    A row whose coefficients are all exactly 0 is left out of every product.
    """
    alive = (upstream.d_known != 0).any(-1) | (upstream.d_rest != 0) | (upstream.d_inner != 0)
    if bool(alive.all()):
        return _gradients(work, upstream, wants)
    at = alive.nonzero().squeeze(-1)
    # Without features there is no row to pick.
    some = Upstream(*(x[at] if x.numel() else x for x in upstream))
    d_hidden, d_head, d_bias = _gradients(work.rows(at), some, wants)
    if d_hidden is not None:
        d_hidden = d_hidden.new_zeros(work.hidden.shape).index_copy_(0, at, d_hidden)
    return d_hidden, d_head, d_bias


def _gradients(work: Pass, upstream: Upstream, wants: tuple[bool, bool, bool]) -> Gradients:
    rest, inner, slope, d_known, d_rest, d_inner = upstream
    wants_hidden, wants_head, wants_bias = wants
    d_cells = torch.where(work.counts, d_known * _known_slope(work), 0.0)
    live = rest > -torch.inf
    sums = RestGradient(
        base=torch.where(live, rest, torch.inf),
        on_mass=torch.where(live, d_rest - d_inner * inner, 0.0),
        on_log=torch.where(live, d_inner, 0.0),
    )
    d_hidden = streamed = None
    if wants_hidden and slope.numel():
        d_hidden = torch.empty_like(work.hidden)
        for at in slices(len(d_rest), work.block_rows):
            d_hidden[at] = slope[at] * d_rest[at].unsqueeze(-1) + _spread(d_cells[at], work.rows(at))
    elif wants_hidden:
        d_hidden = streamed = torch.zeros(work.hidden.shape, dtype=work.wide, device=work.hidden.device)
    d_head = torch.empty_like(work.head) if wants_head else None
    d_bias = torch.zeros_like(work.bias, dtype=work.wide) if wants_bias and work.bias is not None else None
    if streamed is not None or d_head is not None or d_bias is not None:
        rows = slices(work.hidden.shape[0], work.block_rows)
        blocks = [_Block(work.rows(at), sums.rows(at), d_cells[at]) for at in rows]
        _stream_backward(work, blocks, streamed, d_head, d_bias)
    return (
        None if d_hidden is None else d_hidden.to(work.hidden.dtype),
        d_head,
        None if d_bias is None or work.bias is None else d_bias.to(work.bias.dtype),
    )


class RestGradient(NamedTuple):
    """Per-row coefficients of the gradient on the rest."""

    base: Tensor
    on_mass: Tensor
    on_log: Tensor

    def rows(self, at: slice) -> "RestGradient":
        """The same for some of the rows."""
        return RestGradient(*(x[at] for x in self))


class _Block(NamedTuple):
    work: Pass
    sums: RestGradient
    d_cells: Tensor


def _stream_backward(
    work: Pass, blocks: list[_Block], d_hidden: Tensor | None, d_head: Tensor | None, d_bias: Tensor | None
) -> None:
    """Recomputes each tile once and multiplies it into the gradients."""
    dtype, size = work.product_dtype, work.head.shape[0]
    cells = [Cells(block.work) for block in blocks]
    states = [block.work.hidden.to(dtype) for block in blocks]
    # The head's gradient wants the tokens as the inner axis of the product: twice as fast on a CPU.
    tokens_last = d_head is not None
    dim = 0 if tokens_last else -1
    widest = min(work.block_vocab, size)
    room = states[0].new_empty(max(map(len, states)) * widest)
    # Parts of a narrow gradient add up in float32 and are rounded once.
    several = d_head is not None and len(blocks) > 1
    sums = torch.empty((widest, work.head.shape[1]), dtype=work.wide, device=work.head.device) if several else None
    for at, columns in enumerate(slices(size, work.block_vocab)):
        head, bias = work.head[columns].to(dtype), _part(work.bias, columns)
        for n, (block, hidden) in enumerate(zip(blocks, states, strict=True)):
            shape = (len(head), len(hidden)) if tokens_last else (len(hidden), len(head))
            tile = room[: len(head) * len(hidden)].view(shape)
            torch.mm(*((head, hidden.T) if tokens_last else (hidden, head.T)), out=tile)
            row, cell, column = cells[n].within(at)
            where = (column - columns.start, row) if tokens_last else (row, column - columns.start)
            tile[where] = -torch.inf
            vectors = [x.unsqueeze(dim) for x in (block.work.scale, *block.sums)]
            tile_bias = None if bias is None else bias.unsqueeze(-1) if tokens_last else bias
            tiles.fused_gradient_in_place(tile, tile_bias, vectors[0], work.softcap, *vectors[1:], large=work.large)
            tile[where] = block.d_cells[row, cell].to(dtype)
            if d_hidden is not None:
                rows = slice(n * work.block_rows, n * work.block_rows + len(hidden))
                d_hidden[rows] += (tile.T if tokens_last else tile) @ head
            if d_head is not None:
                _into_head(d_head[columns], sums, tile, hidden, n, len(blocks))
            if d_bias is not None:
                d_bias[columns] += tile.sum(-1 if tokens_last else 0, dtype=d_bias.dtype)


def _into_head(d_head: Tensor, sums: Tensor | None, tile: Tensor, hidden: Tensor, block: int, num_blocks: int) -> None:
    """Adds one block of rows to a tile of the head's gradient."""
    if sums is None:
        if d_head.dtype == tile.dtype:
            torch.mm(tile, hidden, out=d_head)
        else:
            d_head.copy_(tile @ hidden)
        return
    sums = sums[: len(d_head)]
    part = tile @ hidden
    sums = sums.copy_(part) if block == 0 else sums.add_(part)
    if block == num_blocks - 1:
        d_head.copy_(sums)


class Cells:
    """The counted cells of a block of rows in order of their id, so that each tile finds its own in one slice."""

    def __init__(self, work: Pass) -> None:
        row, cell = work.counts.nonzero(as_tuple=True)
        self.column, order = work.ids[row, cell].sort()
        self.row, self.cell = row[order], cell[order]
        starts = [*range(0, work.head.shape[0], work.block_vocab), work.head.shape[0]]
        self.edges = torch.searchsorted(self.column, torch.tensor(starts, device=self.column.device)).tolist()

    def within(self, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """(row, cell, vocabulary id) of the cells in a tile."""
        at = slice(self.edges[tile], self.edges[tile + 1])
        return self.row[at], self.cell[at], self.column[at]


class Running:
    """Σ e, Σ e·x and the largest values of each row, added tile by tile under a shift that is raised when it must."""

    def __init__(self, work: Pass, slope: bool) -> None:
        num_rows, num_features = work.hidden.shape
        self.shift = torch.full((num_rows,), -torch.inf, dtype=work.wide, device=work.hidden.device)
        self.total, self.moment, self.largest = (torch.zeros_like(self.shift) for _ in range(3))
        self.slope = self.shift.new_zeros((num_rows, num_features if slope else 0))
        # float16 weights end at e¹¹, so there the shift follows every rise.
        self.safe = 0.0 if slope and work.product_dtype == torch.float16 else SAFE_EXPONENT

    def add(
        self,
        product: Tensor,
        bias: Tensor | None,
        work: Pass,
        large: bool,
        weights: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:
        """Takes a tile [rows, columns] in; with `weights` as room, its part of the slope too."""
        top, size, total, moment = self._summary(product, bias, work, large, weights)
        if bool((top > self.shift + self.safe).any()):
            self._raise_to(torch.maximum(self.shift, top))
            top, size, total, moment = self._summary(product, bias, work, large, weights)
        self.total += total
        self.moment += moment
        self.largest = torch.maximum(self.largest, size)
        if weights is not None and head is not None:
            self.slope += weights @ head

    def _summary(
        self, product: Tensor, bias: Tensor | None, work: Pass, large: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        args = (product, bias, work.scale.unsqueeze(-1), work.softcap, self._finite_shift(), -1)
        if weights is None:
            return tiles.fused_summary(*args, large=large)
        return tiles.fused_summary_and_weights(*args, weights, large=large)

    def _finite_shift(self) -> Tensor:
        # A row without a cell so far has no shift; 0 makes its exponentials 0.
        return torch.where(self.shift > -torch.inf, self.shift, 0.0).unsqueeze(-1)

    def add_slope_at(self, product: Tensor, bias: Tensor | None, ids: Tensor, work: Pass) -> None:
        """The slope of a few cells of each row, whose head rows lie anywhere."""
        z, slope = tiles.logits(product, bias, work.scale.unsqueeze(-1), work.softcap)
        self.slope += _spread(torch.exp(z - self._finite_shift()) * slope, work._replace(ids=ids))

    def _raise_to(self, higher: Tensor) -> None:
        moved = torch.where(self.shift > -torch.inf, self.shift - higher, 0.0)
        keep = torch.exp(moved)
        # Σ e (z − shift), carried over from the previous shift.
        self.moment = (self.moment + moved * self.total) * keep
        self.total = self.total * keep
        self.slope *= keep.unsqueeze(-1)
        self.shift = higher

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rest, inner, largest, slope)."""
        empty = self.total == 0
        total = torch.where(empty, 1.0, self.total)
        log_total = torch.log(total)
        rest = torch.where(empty, -torch.inf, torch.where(empty, 0.0, self.shift) + log_total)
        inner = log_total - self.moment / total
        return rest, inner, self.largest, self.slope.div_(total.unsqueeze(-1))


class Best:
    """The k largest cells of each row so far. They are kept out of the running sums, so no mass is ever subtracted."""

    def __init__(self, num_rows: int, k: int, like: Tensor) -> None:
        self.product = like.new_full((num_rows, k), -torch.inf)
        self.ids = torch.full((num_rows, k), -1, device=like.device)
        self.key = torch.full((num_rows, k), -torch.inf, dtype=wide_dtype(like), device=like.device)
        self.bias = torch.zeros_like(self.key)
        self.dropped_ids = self.ids

    def take(self, product: Tensor, bias: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Takes the best of a tile out of it (−inf is left there); returns (products, biases) of what they displace."""
        key = product if bias is None else product + bias
        k, width = self.ids.shape[1], min(self.ids.shape[1], product.shape[1])
        new_key, column = key.topk(width, dim=-1)
        new_product = product.gather(-1, column)
        new_bias = torch.zeros_like(new_key, dtype=self.key.dtype) if bias is None else bias[column].to(self.key.dtype)
        keys = torch.cat([self.key, new_key.to(self.key.dtype)], dim=-1)
        ids = torch.cat([self.ids, torch.where(new_key > -torch.inf, column + start, -1)], dim=-1)
        products, biases = torch.cat([self.product, new_product], dim=-1), torch.cat([self.bias, new_bias], dim=-1)
        chosen = keys.topk(k, dim=-1).indices
        is_chosen = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, chosen, True)
        product.scatter_(-1, column, torch.where(is_chosen[:, k:], -torch.inf, new_product))
        dropped = self.product.masked_fill(is_chosen[:, :k], -torch.inf), self.bias
        self.dropped_ids = self.ids.clamp(min=0)
        self.key, self.ids = keys.gather(-1, chosen), ids.gather(-1, chosen)
        self.product, self.bias = products.gather(-1, chosen), biases.gather(-1, chosen)
        return dropped


def given_logits(work: Pass) -> Tensor:
    """Logits at the given ids, as dot products in float32 or better."""
    hidden = work.hidden.to(work.product_dtype)
    if work.large:
        raw = tiles.fused_dots(hidden, work.head, work.ids, work.product_dtype, large=True)
    else:
        raw = torch.cat(
            [
                tiles.dots(hidden[rows], work.head, work.ids[rows], work.product_dtype)
                for rows in slices(len(hidden), EAGER_DOT_ROWS)
            ]
        )
    bias = None if work.bias is None else work.bias[work.ids]
    return tiles.logits(raw, bias, work.scale.unsqueeze(-1), work.softcap)[0]


def _known_slope(work: Pass) -> Tensor:
    """∂logit/∂product at the given ids."""
    if work.softcap is None:
        return work.scale.unsqueeze(-1)
    bent = given_logits(work) / (work.softcap * work.scale.unsqueeze(-1))
    return (1 - bent.square()) * work.scale.unsqueeze(-1)


def _spread(weights_NC: Tensor, work: Pass) -> Tensor:
    """Σ_c weights[n, c] · head[ids[n, c]]."""
    if not work.ids.numel():
        return torch.zeros(work.hidden.shape, dtype=work.wide, device=work.hidden.device)
    return F.embedding_bag(work.ids, work.head, per_sample_weights=weights_NC.to(work.head.dtype), mode="sum").to(
        work.wide
    )


def slices(size: int, step: int) -> list[slice]:
    """Consecutive slices of at most `step`; one, empty, where there is nothing."""
    return [slice(at, min(at + step, size)) for at in range(0, max(size, 1), step)]


def _part(bias: Tensor | None, columns: slice) -> Tensor | None:
    return None if bias is None else bias[columns]


def _carve(room: Tensor, twice: bool, num_rows: int, width: int) -> tuple[Tensor, Tensor | None]:
    """One or two contiguous tiles from the room made for the largest."""
    size = num_rows * width
    return room[:size].view(num_rows, width), room[size : 2 * size].view(num_rows, width) if twice else None
