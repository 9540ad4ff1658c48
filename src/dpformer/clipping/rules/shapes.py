"""From tensors whose first dimension holds the samples to per-sample matrices and sums."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dpformer.clipping.forms import Form, sizes
from dpformer.clipping.views import View


def per_sample(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B, ..., d]` or `[B * k, ..., d]` to `[B, T, d]`, in the parameter's type (autocast may have used another)."""
    T = math.prod(x.shape[:-1]) // batch
    return x.reshape(batch, T, x.shape[-1]).to(dtype)


def sizes_of(x: Tensor, batch: int) -> Tensor:
    """The norms of the samples' parts of x, `[B]`, or a little more; see `forms.sizes`."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()  # autocast may have used a narrow type
    return sizes(x.reshape(batch, -1))


def from_broadcast(view: View, terms: Tensor, batch: int, size: Tensor | None = None) -> Form:
    """The form of a view that was broadcast against the batch, from the gradient `terms` `[B, ...]` at the broadcast.

    Every element of the view gets the sum of the terms it was copied to, apart for each sample. size: the norms `[B]` of the
    samples' terms, if they are known.

    >>> from torch import nn
    >>> bias = nn.Parameter(torch.zeros(2))
    >>> terms = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])  # 2 samples, 2 times, 2 features
    >>> from_broadcast(View(bias, "bias", bias), terms, batch=2).gradient[..., 0]
    tensor([[ 4.,  6.],
            [12., 14.]])
    """
    shape = view.value.shape
    own_rows = len(shape) == terms.dim() and shape[0] == terms.shape[0] and shape[0] != 1
    aligned = (1,) * (terms.dim() - len(shape)) + tuple(shape)
    k = terms.shape[0] // batch  # more than 1 where time was merged into the first dimension
    apart = terms.to(view.parameter.dtype).reshape(batch, k, *terms.shape[1:])
    summed = _sum_to(apart, (batch, k if own_rows else 1, *aligned[1:]))
    # Cauchy-Schwarz: n terms added into each element have norms that sum to at most sqrt(n)
    # times their root sum of squares.
    if size is None:
        size = sizes_of(terms, batch)
    bound = size * math.sqrt(apart.numel() / max(1, summed.numel()))
    return view.from_gradient(summed, batch, bound, own_rows)


def _sum_to(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    dims = [k for k, (have, want) in enumerate(zip(x.shape, shape, strict=True)) if want == 1 and have != 1]
    return x.sum(dims, keepdim=True) if dims else x
