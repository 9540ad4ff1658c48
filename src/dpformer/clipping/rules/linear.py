"""Linear maps, and products as linear maps: `y = x W' + b` has the gradients `sum_t g_t (x) x_t` and `sum_t g_t`, g at y.

Two times, one input and one output feature: x = (1, 2), g = (3, 4) give dW = 3*1 + 4*2 = 11 and db = 7:

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> layer = torch.nn.Linear(1, 1)
>>> x, g = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])
>>> PhantomClipping(layer).norms(lambda: (layer(x) * g).sum((1, 2))).square().round()  # 11^2 + 7^2
tensor([170.], dtype=torch.float64)
"""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.axis import Layout
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule
from dpformer.clipping.rules.apart import apart, lazily, product
from dpformer.clipping.rules.broadcast import from_broadcast
from dpformer.clipping.sums import sizes
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View

T = torch.Tensor


def linear_forms(w: View | None, b: View | None, gradient: Tensor, samples: Layout, input: Tensor) -> Forms:
    """What a linear map adds to weight and bias; gradient (at its output) and input: `[B, ..., d]` or `[B * k, ..., d]` each."""
    size = _sizes(gradient, samples.batch)
    if w is not None:
        g, x = (_per_sample(value, samples.batch).to(w.parameter.dtype) for value in (gradient, input))
        yield w, w.from_outer(g, x, (size, _sizes(input, samples.batch)))
    if b is not None:
        yield b, from_broadcast(b, gradient, samples, size)


def _per_sample(x: Tensor, batch: int) -> Tensor:
    """`[B, T, d]`."""
    return x.reshape(batch, math.prod(x.shape[:-1]) // batch, x.shape[-1])


def _sizes(x: Tensor, batch: int) -> Tensor:
    """The norms of the samples' parts of x at each time, `[B, T]`, or slightly more: see `sums.sizes`."""
    return sizes(_per_sample(x if x.dtype in (torch.float32, torch.float64) else x.float(), batch))


@register_rule(F.linear)
def linear(recorder: Recorder, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with a trainable weight, bias or both; any leading dimensions."""
    recorder.data(function, input)
    # With two dimensions the output is no view of another tensor, which would have to be copied to be recorded.
    shape = torch.Size((*input.shape[:-1], weight.shape[0])) if input.dim() > 2 and weight.dim() == 2 else None
    flat = input if shape is None else input.flatten(0, -2)
    output = F.linear(flat, recorder.value(weight), recorder.value(bias))
    w, b = recorder.view(weight), recorder.view(bias)
    if w is not None and w.value.dim() != 2:
        raise recorder.refuse(function, w, "takes it as a vector; give the weight two dimensions")

    def derive(gradient: Tensor, samples: Layout, flat: Tensor) -> Forms:
        return linear_forms(w, b, gradient, samples, flat)

    recorded = recorder.record(function, output, [w, b], derive, saved=[flat])
    return recorded if shape is None else recorded.view(shape)


@register_rule(torch.matmul, T.matmul, T.__matmul__, torch.mm, T.mm)
def matmul(
    recorder: Recorder, function: Any, input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None
) -> Tensor:
    """A product with a parameter on one side: `x @ P`, `x @ p` and `P @ x` are linear maps of x."""
    right = mat2 if other is None else other
    assert right is not None
    p, q = recorder.view(input), recorder.view(right)
    if q is not None and p is None and q.value.dim() == 2 and input.dim() > 1:
        return recorder.call(lambda: F.linear(input, right.T))
    if q is not None and p is None and q.value.dim() == 1 and input.dim() > 1:
        return recorder.call(lambda: F.linear(input, right[None])).squeeze(-1)
    if p is not None and p.value.dim() == 2 and right.dim() == 3:
        return recorder.call(lambda: F.linear(right.mT, input)).mT
    return apart(recorder, torch.matmul, product, (input, right), {})


@register_rule(T.__rmatmul__)
def reflected(recorder: Recorder, function: Any, right: Tensor, left: Tensor) -> Tensor:
    """`left @ right`, called from the right."""
    return recorder.call(torch.matmul, left, right)


@register_rule(torch.addmm, T.addmm)
def addmm(
    recorder: Recorder, function: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`beta input + alpha mat1 @ mat2`, as Hugging Face's Conv1D has it: a trainable `mat2` is a weight, `input` a bias."""
    if beta == alpha == 1 and input.dim() == 1:
        return recorder.call(lambda: F.linear(mat1, mat2.T, input))
    scale = lambda x, factor: x if factor == 1 else x * factor  # noqa: E731
    return recorder.call(lambda: scale(mat1 @ mat2, alpha) + scale(input, beta))


@register_rule(*(f for f in (getattr(torch, "_grouped_mm", None), getattr(F, "grouped_mm", None)) if f is not None))
def grouped(recorder: Recorder, function: Any, input: Tensor, weights: Tensor, offs: Tensor, **more: Any) -> Tensor:
    """Experts: rows `offs[e - 1]` to `offs[e]` of the input `[K, p]` times the matrix e of `[E, p, q]`."""
    view = recorder.view(weights)
    if view is None or input.dim() != 2 or view.value.dim() != 3 or any(v is not None for v in more.values()):
        view = view or recorder.view(input)
        assert view is not None
        raise recorder.refuse(function, view, "has a rule for inputs [K, p] and weights [experts, p, q] alone")
    output = function(recorder.data(function, input), view.value.detach(), offs=offs)
    ends = offs.tolist()

    def derive(gradient: Tensor, samples: Layout, input: Tensor) -> Forms:
        owners = samples.owners_of(input)
        parts = []
        for start, end in pairwise((0, *ends)):
            own = Layout(samples.batch, owners=owners[start:end])
            parts.append([own.first(x[start:end].to(view.parameter.dtype)) for x in (input, gradient)])

        def compute(part: slice) -> Tensor:
            return torch.stack([x[part].mT @ g[part] for x, g in parts], 1)

        yield view, lazily(view, compute, sum(x[0].numel() + g[0].numel() for x, g in parts))

    return recorder.record(function, output, [view], derive, saved=[input.detach()], raw=True)
