"""State kept while the vocabulary streams past a block of rows: running sums and running top-k.

On a CPU, both read values to skip work. On an accelerator that would wait for the device once per tile or more, so
they do the work instead: the sums find each tile's maximum first, and the top-k sorts every tile.
"""

import torch
from torch import Tensor

from trustrl.kernels import devices, tile_math
from trustrl.kernels.logprob_outputs import wide_dtype
from trustrl.kernels.pass_inputs import PassInputs, weighted_head_rows

SAFE_EXPONENT = 20.0
"""A tile's logits may exceed the running shift by this much before the shift is raised. Saves a second evaluation."""


def add_product(total: Tensor, left: Tensor, right: Tensor, first: bool = False) -> None:
    """Adds left @ right to `total` in place, or replaces it if `first`. Equal dtypes need no temporary result."""
    if total.dtype == left.dtype:
        torch.addmm(total, left, right, beta=0 if first else 1, out=total)  # torch's FLOP counter misses `addmm_`
    elif first:
        total.copy_(left @ right)
    else:
        total += left @ right


class RunningSums:
    """Σ e, Σ e·x and the largest |product| of each row, accumulated tile by tile under a shift that rises as needed."""

    def __init__(self, inputs: PassInputs, slope: bool, vocab_axis: int = -1) -> None:
        num_rows, num_features = inputs.hidden.shape
        self.inputs, self.vocab_axis = inputs, vocab_axis
        self.scale = inputs.scale.unsqueeze(vocab_axis)
        self.shift = torch.full((num_rows,), -torch.inf, dtype=inputs.wide, device=inputs.hidden.device)
        self.total, self.moment, self.largest = (torch.zeros_like(self.shift) for _ in range(3))
        self.slope = self.shift.new_zeros((num_rows, num_features if slope else 0))
        # float16 weights overflow above e¹¹, so with float16 the shift follows every rise.
        self.safe = 0.0 if slope and inputs.product_dtype == torch.float16 else SAFE_EXPONENT

    def add(
        self,
        product: Tensor,
        bias: Tensor | None,
        large: bool,
        weights: Tensor | None = None,
        head: Tensor | None = None,
    ) -> None:
        """Accumulates one vocabulary tile. If the buffer `weights` is given, adds the tile's share of the slope."""
        if devices.free_to_look(product):
            self._add_lagged(product, bias, large, weights)
        else:
            self._add_online(product, bias, large, weights)
        if weights is not None and head is not None:
            add_product(self.slope, weights, head)

    def _add_lagged(self, product: Tensor, bias: Tensor | None, large: bool, weights: Tensor | None) -> None:
        """Accumulates a tile under the shift of the tiles before it, and again under its own if that is too low."""
        top, size, total, moment = self._summary(product, bias, large, weights)
        if bool((top > self.shift + self.safe).any()):
            self._raise_to(torch.maximum(self.shift, top))
            top, size, total, moment = self._summary(product, bias, large, weights)
        self.total += total
        self.moment += moment
        self.largest = torch.maximum(self.largest, size)

    def _add_online(self, product: Tensor, bias: Tensor | None, large: bool, weights: Tensor | None) -> None:
        """Accumulates a tile under the largest logit so far, without reading a value."""
        self.shift, self.total, self.moment, self.largest, keep = tile_math.fused_online_sums(
            product, bias, self.scale, self.inputs.softcap, self.vocab_axis, self.shift, self.total, self.moment,
            self.largest, weights, large=large,
        )  # fmt: skip
        if self.slope.numel():
            self.slope *= keep.unsqueeze(-1)

    def _summary(
        self, product: Tensor, bias: Tensor | None, large: bool, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        shift, softcap = self._finite_shift(), self.inputs.softcap
        return tile_math.fused_summary(product, bias, self.scale, softcap, shift, self.vocab_axis, weights, large=large)

    def _finite_shift(self) -> Tensor:
        # A row without a finite logit so far has no shift; 0 makes its exponentials 0.
        return torch.where(self.shift > -torch.inf, self.shift, 0.0).unsqueeze(self.vocab_axis)

    def add_slope_at(self, product: Tensor, bias: Tensor | None, ids: Tensor) -> None:
        """Accumulates the slope of a few cells of each row, whose head rows may lie anywhere."""
        z, slope = tile_math.logits(product, bias, self.scale, self.inputs.softcap)
        self.slope += weighted_head_rows(torch.exp(z - self._finite_shift()) * slope, self.inputs._replace(ids=ids))

    def _raise_to(self, higher: Tensor) -> None:
        moved = torch.where(self.shift > -torch.inf, self.shift - higher, 0.0)
        keep = torch.exp(moved)
        # Σ e (z − shift), converted from the previous shift to the higher one.
        self.moment = (self.moment + moved * self.total) * keep
        self.total = self.total * keep
        self.slope *= keep.unsqueeze(-1)
        self.shift = higher

    def results(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Returns (rest, inner, largest, slope)."""
        empty = self.total == 0
        total = torch.where(empty, 1.0, self.total)
        log_total = torch.log(total)
        rest = torch.where(empty, -torch.inf, torch.where(empty, 0.0, self.shift) + log_total)
        inner = log_total - self.moment / total
        return rest, inner, self.largest, self.slope.div_(total.unsqueeze(-1))


GROUP = 16
"""Number of cells in a group. Only the group's largest cell is compared with the k-th best so far."""


class RunningTopK:
    """The k largest cells of each row so far. The running sums exclude them, so no mass is ever subtracted."""

    def __init__(self, num_rows: int, k: int, like: Tensor) -> None:
        self.product = like.new_full((num_rows, k), -torch.inf)
        self.ids = torch.full((num_rows, k), -1, device=like.device)
        self.key = torch.full((num_rows, k), -torch.inf, dtype=wide_dtype(like), device=like.device)
        self.bias = torch.zeros_like(self.key)
        self.dropped_ids = self.ids
        self.marked, self.untouched = like.new_full((), -torch.inf), like.new_full((), torch.inf)

    def take(self, product: Tensor, bias: Tensor | None, start: int) -> tuple[Tensor, Tensor]:
        """Moves a tile's best cells into the top k and writes −inf in their place.

        Returns:
            (products, biases) of the cells they displace.
        """
        k = self.ids.shape[1]
        new_key, column = self._candidates(product if bias is None else product + bias)
        present = new_key > -torch.inf
        new_product = product.gather(-1, column)
        new_bias = torch.zeros_like(new_key) if bias is None else bias[column].to(new_key.dtype)
        keys = torch.cat([self.key, new_key], dim=-1)
        ids = torch.cat([self.ids, torch.where(present, column + start, -1)], dim=-1)
        products, biases = torch.cat([self.product, new_product], dim=-1), torch.cat([self.bias, new_bias], dim=-1)
        chosen = keys.topk(k, dim=-1).indices
        is_chosen = torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, chosen, True)
        # The minimum, because padding repeats columns.
        marks = torch.where(is_chosen[:, k:] & present, self.marked, self.untouched)
        product.scatter_reduce_(-1, column, marks, "amin")
        dropped = self.product.masked_fill(is_chosen[:, :k], -torch.inf), self.bias
        self.dropped_ids = self.ids.clamp(min=0)
        self.key, self.ids = keys.gather(-1, chosen), ids.gather(-1, chosen)
        self.product, self.bias = products.gather(-1, chosen), biases.gather(-1, chosen)
        return dropped

    def _candidates(self, key: Tensor) -> tuple[Tensor, Tensor]:
        """Returns (keys, columns) of a set of cells that includes the tile's best. −inf pads rows with fewer cells.

        After the first few tiles, hardly any cell beats the k-th best so far. The largest cell of each group tells
        which groups can contain such a cell, and only the cells that do are compared. Their number is a value, so an
        accelerator sorts the tile.
        """
        num_rows, width = key.shape
        num_groups = width // GROUP
        if width % GROUP == 0 and num_rows and devices.free_to_look(key):
            bound = self.key.amin(-1, keepdim=True).to(key.dtype)
            row, group = (key.view(num_rows, GROUP, num_groups).amax(1) > bound).nonzero(as_tuple=True)
            if len(row) * 4 <= num_rows * num_groups:
                cells = group.unsqueeze(-1) + torch.arange(GROUP, device=row.device) * num_groups
                pair, lane = (key[row.unsqueeze(-1), cells] > bound[row]).nonzero(as_tuple=True)
                row = row[pair]
                counts = torch.bincount(row, minlength=num_rows)
                place = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
                column = row.new_full((num_rows, int(counts.max())), -1)
                column[row, place] = cells[pair, lane]
                empty, column = column < 0, column.clamp(min=0)
                return key.gather(-1, column).to(self.key.dtype).masked_fill(empty, -torch.inf), column
        keys, column = key.topk(min(self.ids.shape[1], width), dim=-1)
        return keys.to(self.key.dtype), column
