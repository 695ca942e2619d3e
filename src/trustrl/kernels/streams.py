"""What is kept while the vocabulary streams by: where the given ids fall, the running sums, the largest ids so far."""

import torch
from torch import Tensor

from trustrl.kernels import tiles
from trustrl.kernels.outputs import wide_dtype
from trustrl.kernels.work import Pass, spread

SAFE_EXPONENT = 20.0
"""A tile's logits may exceed the running shift by this much before the shift is raised: one pass instead of two."""


class Cells:
    """The counted cells of a block of rows in order of their id, so that each tile finds its own in one slice."""

    def __init__(self, work: Pass) -> None:
        row, cell = work.counts.nonzero(as_tuple=True)
        self.column, order = work.ids[row, cell].sort()
        self.row, self.cell = row[order], cell[order]
        starts = [*range(0, work.head.shape[0], work.block_vocab), work.head.shape[0]]
        self.edges = torch.searchsorted(self.column, torch.tensor(starts, device=self.column.device)).tolist()
        self.block_vocab = work.block_vocab

    def within(self, tile: int) -> tuple[Tensor, Tensor, Tensor]:
        """(row, cell, column of the tile) of the cells in a tile."""
        at = slice(self.edges[tile], self.edges[tile + 1])
        return self.row[at], self.cell[at], self.column[at] - tile * self.block_vocab

    def mark(self, tile: int, product: Tensor, tokens_last: bool = False) -> None:
        """Puts −inf at the cells of a tile: they are accounted for apart."""
        row, _, column = self.within(tile)
        product[(column, row) if tokens_last else (row, column)] = -torch.inf


class Running:
    """Σ e, Σ e·x and the largest values of each row, added tile by tile under a shift that is raised when it must."""

    def __init__(self, work: Pass, slope: bool, vocab_axis: int = -1) -> None:
        num_rows, num_features = work.hidden.shape
        self.vocab_axis = vocab_axis
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
        """Takes a tile in; with `weights` as room, its part of the slope too."""
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
        scale = work.scale.unsqueeze(self.vocab_axis)
        shift = self._finite_shift()
        return tiles.fused_summary(product, bias, scale, work.softcap, shift, self.vocab_axis, weights, large=large)

    def _finite_shift(self) -> Tensor:
        # A row without a cell so far has no shift; 0 makes its exponentials 0.
        return torch.where(self.shift > -torch.inf, self.shift, 0.0).unsqueeze(self.vocab_axis)

    def add_slope_at(self, product: Tensor, bias: Tensor | None, ids: Tensor, work: Pass) -> None:
        """The slope of a few cells of each row, whose head rows lie anywhere."""
        z, slope = tiles.logits(product, bias, work.scale.unsqueeze(-1), work.softcap)
        self.slope += spread(torch.exp(z - self._finite_shift()) * slope, work._replace(ids=ids))

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


GROUP = 16
"""Cells whose largest decides whether any of them is looked at."""


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
        k = self.ids.shape[1]
        new_key, column = self._candidates(product if bias is None else product + bias)
        there = new_key > -torch.inf
        new_product = product.gather(-1, column)
        new_bias = torch.zeros_like(new_key) if bias is None else bias[column].to(new_key.dtype)
        keys = torch.cat([self.key, new_key], dim=-1)
        ids = torch.cat([self.ids, torch.where(there, column + start, -1)], dim=-1)
        products, biases = torch.cat([self.product, new_product], dim=-1), torch.cat([self.bias, new_bias], dim=-1)
        chosen = keys.topk(k, dim=-1).indices
        is_chosen = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, chosen, True)
        row, at = (is_chosen[:, k:] & there).nonzero(as_tuple=True)
        product[row, column[row, at]] = -torch.inf
        dropped = self.product.masked_fill(is_chosen[:, :k], -torch.inf), self.bias
        self.dropped_ids = self.ids.clamp(min=0)
        self.key, self.ids = keys.gather(-1, chosen), ids.gather(-1, chosen)
        self.product, self.bias = products.gather(-1, chosen), biases.gather(-1, chosen)
        return dropped

    def _candidates(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """(keys, columns) of a tile that hold its best; −inf fills rows with fewer.

        Once a few tiles have passed, hardly any cell beats the k-th best so far. The largest of each group of cells
        tells which groups may; only those are looked at, three times cheaper than sorting the tile.
        """
        num_rows, width = key.shape
        num_groups = width // GROUP
        if width % GROUP == 0 and num_rows:
            beats = key.view(num_rows, GROUP, num_groups).amax(1) > self.key.amin(-1, keepdim=True).to(key.dtype)
            counts = beats.sum(-1)
            most = int(counts.max())
            if most * GROUP <= width // 4:
                row, group = beats.nonzero(as_tuple=True)
                place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
                groups = row.new_full((num_rows, most), -1)
                groups[row, place] = group
                step = torch.arange(GROUP, device=row.device) * num_groups
                column = (groups.clamp(min=0).unsqueeze(-1) + step).flatten(1)
                found = key.gather(-1, column).to(self.key.dtype)
                return found.masked_fill((groups < 0).repeat_interleave(GROUP, -1), -torch.inf), column
        found, column = key.topk(min(self.ids.shape[1], width), dim=-1)
        return found.to(self.key.dtype), column
