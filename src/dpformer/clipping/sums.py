"""Sums and norms whose rounding does not grow with their length: pieces in their own type, the rest in float64."""

import functools
import math

import torch
from torch import Tensor

# Numbers whose squares are added up in their own type, at most.
SQUARES = 1024
# Samples whose gradients are added up in their own type, at most; longer sums are made of blocks, in float64.
BLOCK = 64


def squared_norms(gradients: Tensor) -> Tensor:
    """`|G_i|^2` of gradients `[B, ...]` themselves, `[B]`: pieces in their own type, their sum in float64."""
    return norms_of_pieces(gradients).double().square().sum(1)


def norms_of_pieces(gradients: Tensor) -> Tensor:
    """Of gradients `[B, ...]`, the norms of the pieces that each of them is cut into, `[B, pieces]`."""
    return torch.linalg.vector_norm(gradients.view(len(gradients), -1, _piece(gradients[0].numel())), dim=-1)


@functools.cache
def _piece(count: int) -> int:
    """Into pieces of how many to cut so many numbers, so that none is left: the longer, the quicker, and the less exact."""
    return max(k for k in range(1, SQUARES + 1) if count % k == 0)


def add_to_rows(out: Tensor, rows: Tensor, values: Tensor) -> None:
    """`out[rows[k]] += values[k]`, in float64 first: a row that many samples share is a long sum, whose rounding would grow."""
    if len(out) <= len(rows):
        out += out.new_zeros(out.shape, dtype=torch.float64).index_add_(0, rows, values.double())
        return
    distinct, place = rows.unique(return_inverse=True)  # of a large table: memory for the rows that occur
    sums = values.new_zeros(len(distinct), values.shape[1], dtype=torch.float64).index_add_(0, place, values.double())
    out.index_add_(0, distinct, sums.to(out.dtype))


def add_weighted_rows(out: Tensor, rows: Tensor, weights: Tensor) -> None:
    """`out += sum_i weights[i] rows[i]` for out `[N]`, rows `[B, N]`; blocks of a long sum are added up in float64."""
    if len(rows) <= BLOCK:
        out.addmv_(rows.T, weights)
        return
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for block, own in zip(rows.split(BLOCK), weights.split(BLOCK), strict=True):
        total += block.T @ own
    out += total


def sizes(x: Tensor) -> Tensor:
    """Norms over the last dimension, or a little more: no less than the norm where squares underflow."""
    underflow = math.sqrt(2 * torch.finfo(x.dtype).tiny * x.shape[-1])
    return torch.linalg.vector_norm(x, dim=-1).add_(underflow)


def lengths(x: Tensor) -> Tensor:
    """Norms over the last dimension, float64; where squares may underflow, computed in float64 too."""
    lengths = torch.linalg.vector_norm(x, dim=-1).double()
    small = lengths.square() < tiny(x)
    if bool(small.any()):
        lengths[small] = torch.linalg.vector_norm(x[small].double(), dim=-1)
    return lengths


def tiny(x: Tensor) -> float:
    """Below this, a square may have lost its bits."""
    return 1e8 * torch.finfo(x.dtype).tiny
