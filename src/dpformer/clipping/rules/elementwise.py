"""A vector or table broadcast against the batch: `x + p`, `x - p`, `x * p`.

`y = x * p` has the gradient `sum_t g_t x_t`: with x = (1, 2) and g = (3, 4) in two times it is 11.

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> module, x, g = torch.nn.ParameterDict({"p": torch.ones(1)}), torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])
>>> PhantomClipping(module).norms(lambda: (x * module["p"] * g).sum((1, 2)))
tensor([11.], dtype=torch.float64)
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.shapes import from_broadcast
from dpformer.clipping.use import Forms
from dpformer.clipping.walk import Layout

T = torch.Tensor
Compute = Callable[..., Tensor]
Terms = Callable[[Tensor, Tensor], Tensor]


@register_rule(torch.add, T.add, T.__add__, T.__radd__, T.add_, T.__iadd__, lazy=True)
def add(recorder: Recorder, function: Any, input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """`x + p` or `p + x`."""
    return _combine(recorder, function, (input, other), torch.add, lambda g, x: g, alpha)


@register_rule(torch.sub, T.sub, T.__sub__, T.sub_, T.__isub__, lazy=True)
def subtract(recorder: Recorder, function: Any, input: Tensor, other: Tensor, *, alpha: float = 1) -> Tensor:
    """`x - p` or `p - x`."""
    sign = -1 if recorder.view(other) is not None else 1
    return _combine(recorder, function, (input, other), torch.sub, lambda g, x: sign * g, alpha)


@register_rule(torch.mul, T.mul, T.__mul__, T.__rmul__, T.mul_, T.__imul__, lazy=True)
def multiply(recorder: Recorder, function: Any, input: Tensor, other: Tensor) -> Tensor:
    """`x * p` or `p * x`."""
    return _combine(recorder, function, (input, other), torch.mul, lambda g, x: g * x)


def _combine(
    recorder: Recorder, function: Any, operands: tuple[Tensor, Tensor], compute: Compute, terms: Terms, alpha: float = 1
) -> Tensor:
    """A parameter and a tensor with the batch; `terms` are the gradients at the parameter's copies."""
    input, other = operands
    a, b = recorder.view(input), recorder.view(other)
    view, x = (a, other) if a is not None else (b, input)
    assert view is not None
    if not isinstance(x, Tensor) or alpha != 1:
        if not view.has_batch:
            return recorder.call(compute, input, recorder.call(torch.mul, other, alpha))
        recorded = recorder.record_rows(function, view)
        left, right = (recorded, other) if a is not None else (input, recorded)
        return compute(left, right, alpha=alpha) if alpha != 1 else compute(left, right)
    name = function.__name__
    in_place = name.startswith("__i") or (name.endswith("_") and not name.endswith("__"))
    if in_place and (a is not None or x._is_view()):
        raise recorder.refuse(function, view, "writes into a part of another tensor; write it without the underscore")
    given = x.detach().clone() if in_place else x
    output = function(x, recorder.value(other)) if in_place else compute(recorder.value(input), recorder.value(other))

    def derive(gradient: Tensor, samples: Layout, given: Tensor) -> Forms:
        yield view, from_broadcast(view, terms(gradient, given), samples)

    return recorder.record(function, output, [view], derive, saved=[given.detach().expand(output.shape)])
