"""An embedding table that no rank has whole: each looks up the rows it has, and the sum over ranks is the look-up."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.rows import Rows

# Numbers drawn at a time when a table is filled; a multiple of 16, with which torch's stream does not depend on it.
BLOCK = 2**20


class RowEmbedding(nn.Module):
    """`nn.Embedding(rows.count, d, padding_idx=padding)` with this rank's rows alone: `weight` is `[len(rows), d]`.

    Its forward pass is a collective: all ranks must call it with the same ids.
    """

    def __init__(self, rows: Rows, d: int, padding_idx: int | None = None) -> None:
        super().__init__()
        self.rows, self.padding_idx = rows, padding_idx
        self.weight = nn.Parameter(torch.empty(len(rows), d))
        self.draw_()

    @torch.no_grad()
    def draw_(self, std: float = 1.0) -> None:
        """Fill with N(0, std^2), with the numbers that the whole table would get: every rank draws all, and keeps its own."""
        d = self.weight.shape[1]
        size, start, stop = self.rows.count * d, self.rows.first * d, self.rows.last * d
        flat = self.weight.view(-1)
        block = torch.empty(min(size, BLOCK), dtype=self.weight.dtype)
        for k in range(0, size, BLOCK):
            # Less than 16 numbers are drawn in another way: they go with the block before.
            if size - k < 16 and k:
                break
            n = size - k if size - k < BLOCK + 16 else BLOCK
            drawn = (block if n <= len(block) else torch.empty(n, dtype=block.dtype))[:n].normal_(std=std)
            low, high = max(k, start), min(k + n, stop)
            if low < high:
                flat[low - start : high - start] = drawn[low - k : high - k]

    def forward(self, ids: Tensor) -> Tensor:
        """Rows `ids` `[B, L]` of the whole table, `[B, L, d]`."""
        index, owned = self.rows.locate(ids)
        padding = None
        if self.padding_idx is not None and self.rows.first <= self.padding_idx < self.rows.last:
            padding = self.padding_idx - self.rows.first
        part = F.embedding(index, self.weight, padding).masked_fill(~owned[..., None], 0)
        return _Joined.apply(part, self.rows)


class _Joined(torch.autograd.Function):
    """The sum over ranks. All of them go on with the same loss, so the gradient at the sum is that at each part."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, rows: Rows) -> Tensor:
        return rows.sum_(part.clone())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
