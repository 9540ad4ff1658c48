"""From tensors whose first dimension holds the samples to per-sample matrices and sums."""

import math

import torch
from torch import Tensor

from dpformer.clipping.algebra import Form
from dpformer.clipping.sums import sizes
from dpformer.clipping.views import View
from dpformer.clipping.walk import Layout


def per_sample(x: Tensor, batch: int, dtype: torch.dtype) -> Tensor:
    """`[B, ..., d]` or `[B * k, ..., d]` to `[B, T, d]`, in the parameter's type (autocast may have used another)."""
    T = math.prod(x.shape[:-1]) // batch
    return x.reshape(batch, T, x.shape[-1]).to(dtype)


def sizes_of(x: Tensor, batch: int) -> Tensor:
    """The norms of the samples' parts of x at each time, `[B, T]`, or slightly more: see `algebra.sizes`."""
    if x.dtype not in (torch.float32, torch.float64):
        x = x.float()  # autocast may have used a narrow type
    return sizes(x.reshape(batch, -1, x.shape[-1]))


def from_broadcast(view: View, terms: Tensor, samples: Layout, size: Tensor | None = None) -> Form:
    """The form of a view that was broadcast against the batch, from the gradient `terms` at the broadcast, samples first.

    Every element of the view gets the sum of the terms it was copied to, apart for each sample. size: the norms `[B, T]` of the
    terms that are added, if they are computed already.

    >>> from torch import nn
    >>> bias = nn.Parameter(torch.zeros(2))
    >>> terms = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])  # 2 samples, 2 times, 2 features
    >>> from_broadcast(View(bias, "bias", bias), terms, Layout(2)).gradient[..., 0]
    tensor([[ 4.,  6.],
            [12., 14.]])
    """
    shape, batch = view.value.shape, samples.batch
    aligned = (1,) * (terms.dim() - (0 if samples.is_first else 2) - len(shape)) + tuple(shape)
    own_rows = aligned[samples.dim] != 1  # then as many as the terms have
    if own_rows:
        samples.demand_first(view.name)
    k = terms.shape[0] // batch  # more than 1 where time was merged into the first dimension
    apart = terms.to(view.parameter.dtype).reshape(batch, k, *terms.shape[1:])
    shape = torch.Size((batch, k if own_rows else 1, *samples.aligned(aligned)))
    added = [k for k, (have, want) in enumerate(zip(apart.shape, shape, strict=True)) if want == 1 and have != 1]
    summed = apart.sum(added, keepdim=True) if added else apart
    if size is None:
        # One term for each place along the dimensions that are added: padding, where they are 0, adds nothing.
        size = sizes(apart.movedim(added, list(range(1, 1 + len(added)))).reshape(batch, -1, summed[0].numel()))
    return view.from_gradient(summed, batch, size.sum(1), own_rows)
