"""A vector or table broadcast against the batch (`x + p`, `x - p`, `x * p`), and norms, whose weights and biases are such.

`y = x * p` has the gradient `sum_t g_t x_t`: with x = (1, 2) and g = (3, 4) in two times it is 11.

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> module, x, g = torch.nn.ParameterDict({"p": torch.ones(1)}), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])
>>> PhantomClipping(module).norms(lambda: (x * module["p"] * g).sum((1, 2)))
tensor([11.], dtype=torch.float64)
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.algebra import Form
from dpformer.clipping.axis import Layout
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule, writes
from dpformer.clipping.sums import sizes
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View

T = torch.Tensor


def from_broadcast(view: View, terms: Tensor, samples: Layout, size: Tensor | None = None) -> Form:
    """The form of a view that was broadcast against the batch, from the gradient `terms` at the broadcast, samples first.

    Every element of the view gets the sum of the terms it was copied to, apart for each sample. size: the norms `[B, T]` of the
    terms that are added, if they are computed already.

    >>> bias = torch.nn.Parameter(torch.zeros(2))
    >>> terms = torch.tensor([[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0], [7.0, 8.0]]])  # 2 samples, 2 times, 2 features
    >>> from_broadcast(View(bias, "bias", bias), terms, Layout(2)).gradient[..., 0]
    tensor([[ 4.,  6.],
            [12., 14.]])
    """
    batch = samples.batch
    wanted, *aligned = samples.aligned(view.value.shape, terms.dim())
    own_rows = wanted != 1  # then as many as the terms have
    if own_rows:
        samples.demand_first(view.name)
    k = terms.shape[0] // batch  # more than 1 where time was merged into the first dimension
    apart = terms.to(view.parameter.dtype).reshape(batch, k, *terms.shape[1:])
    shape = (batch, k if own_rows else 1, *aligned)
    added = [k for k, (have, want) in enumerate(zip(apart.shape, shape, strict=True)) if want == 1 and have != 1]
    summed = apart.sum(added, keepdim=True) if added else apart
    if size is None:
        # One term for each place along the dimensions that are added: padding, where they are 0, adds nothing.
        size = sizes(apart.movedim(added, list(range(1, 1 + len(added)))).reshape(batch, -1, summed[0].numel()))
    return view.from_gradient(summed, batch, size.sum(1), own_rows)


def _combine(
    recorder: Recorder, function: Any, compute: Any, input: Tensor, other: Tensor, terms: Callable[..., Tensor]
) -> Tensor:
    """A parameter and a tensor with the batch; `terms` are the gradients at the parameter's copies."""
    a, b = recorder.view(input), recorder.view(other)
    view, x = (a, other) if a is not None else (b, input)
    assert view is not None
    if not isinstance(x, Tensor):
        return compute(*(recorder.record_rows(function, view) if y is view.value else y for y in (input, other)))
    in_place = writes(function.__name__)
    if in_place and (a is not None or x._is_view()):
        raise recorder.refuse(function, view, "writes into a part of another tensor; write it without the underscore")
    given = x.detach().clone() if in_place else x
    output = (function if in_place else compute)(recorder.value(input), recorder.value(other))

    def derive(gradient: Tensor, samples: Layout, given: Tensor) -> Forms:
        yield view, from_broadcast(view, terms(gradient, given), samples)

    return recorder.record(function, output, [view], derive, saved=[given.detach().expand(output.shape)])


@register_rule(torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, lazy=True)
@register_rule(torch.sub, T.sub, T.__sub__, T.sub_, T.__isub__, lazy=True)
def add(recorder: Recorder, function: Any, input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """`x + p`, `p + x`, `x - p` or `p - x`."""
    compute = torch.sub if "sub" in function.__name__ else torch.add
    if alpha != 1:
        return recorder.call(compute, input, recorder.call(torch.mul, other, alpha))
    sign = -1 if compute is torch.sub and recorder.view(other) is not None else 1
    return _combine(recorder, function, compute, input, other, lambda g, x: g if sign == 1 else -g)


@register_rule(torch.mul, T.mul, T.__mul__, T.__rmul__, T.mul_, T.__imul__, lazy=True)
def multiply(recorder: Recorder, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """`x * p` or `p * x`."""
    return _combine(recorder, function, torch.mul, input, other, lambda g, x: g * x)


@register_rule(F.layer_norm)
def layer_norm(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """`xhat * w + b` has the gradients `sum_t g_t xhat_t` and `sum_t g_t`."""
    w, b = recorder.view(weight), recorder.view(bias)
    own = recorder.value(weight), recorder.value(bias)
    output, mean, scale = torch.native_layer_norm(input, list(normalized_shape), *own, eps)

    def derive(gradient: Tensor, samples: Layout, x: Tensor, mean: Tensor, scale: Tensor) -> Forms:
        if w is not None:
            # xhat is computed again: cheap, where keeping it would cost as much memory as the input.
            yield w, from_broadcast(w, (x - mean).mul_(scale).mul_(gradient), samples)
        if b is not None:
            yield b, from_broadcast(b, gradient, samples)

    saved = [recorder.data(function, input).detach(), mean.detach(), scale.detach()]
    return recorder.record(function, output, [w, b], derive, saved)


@register_rule(F.rms_norm)
def rms_norm(
    recorder: Recorder, function: Any, input: Tensor, shape: Any, weight: Tensor, eps: float | None = None
) -> Tensor:
    """The norm without weight, then a product."""
    return recorder.call(torch.mul, F.rms_norm(recorder.data(function, input), shape, None, eps), weight)


@register_rule(torch.group_norm, torch.instance_norm, torch.batch_norm)
def scaled_norm(recorder: Recorder, function: Any, input: Tensor, *rest: Any) -> Tensor:
    """The norm without weight and bias, which are then a product and a sum."""
    at, own = 1 if function is torch.group_norm else 0, list(rest)
    weight, bias = own[at : at + 2]
    if function is torch.batch_norm and own[4]:
        view = recorder.view(weight) or recorder.view(bias)
        assert view is not None
        raise recorder.refuse(function, view, "mixes samples in training mode; call eval() on it")
    own[at] = own[at + 1] = None
    output = function(recorder.data(function, input), *own)
    if weight is not None:
        output = recorder.call(lambda: output * channels(weight, output))
    return recorder.call(lambda: output + channels(bias, output)) if bias is not None else output


def channels(p: Tensor, x: Tensor) -> Tensor:
    """A parameter `[channels]` as `[channels, 1, ...]`, to be broadcast over x `[B, channels, ...]`."""
    return p.view(-1, *(1 for _ in range(x.dim() - 2)))
