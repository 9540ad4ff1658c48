"""Products with a parameter: `x @ P`, `x @ P.T`, `P @ x`, `x @ p`, `addmm` (Hugging Face's Conv1D).

`y = x P` has the gradient `sum_t x_t (x) g_t`. With x = (1, 2), g = 3 in one time it is (3, 6):

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> module, x = torch.nn.ParameterDict({"P": torch.zeros(2, 1)}), torch.tensor([[1.0, 2.0]])
>>> PhantomClipping(module).norms(lambda: 3 * (x @ module["P"])[:, 0]).square().round()  # 3^2 + 6^2
tensor([45.], dtype=torch.float64)
"""

from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.apart import apart, product
from dpformer.clipping.rules.shapes import from_broadcast, per_sample
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View
from dpformer.clipping.walk import Layout


@register_rule(torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__, torch.mm, torch.Tensor.mm)
def matmul(
    recorder: Recorder, function: Any, input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None
) -> Tensor:
    """A product with a parameter on one side."""
    left, right = input, other if mat2 is None else mat2
    assert right is not None
    p, r = recorder.view(left), recorder.view(right)
    if r is None:
        assert p is not None
        return _from_left(recorder, function, p, right)
    if r.value.dim() > 2 or left.dim() < 2:
        return apart(recorder, torch.matmul, product, (left, right), {})
    output = torch.matmul(left, r.value.detach())

    def derive(gradient: Tensor, samples: Layout, left: Tensor) -> Forms:
        if r.value.dim() == 1:
            yield r, from_broadcast(r, gradient[..., None] * left, samples)
        else:
            batch, dtype = samples.batch, r.parameter.dtype
            yield r, r.from_outer(per_sample(left, batch, dtype), per_sample(gradient, batch, dtype))

    return recorder.record(function, output, [r], derive, saved=[left.detach()])


def _from_left(recorder: Recorder, function: Any, p: View, right: Tensor) -> Tensor:
    """`P @ x` with x `[B, p, T]`: the gradient is `sum_t g[:, t] (x) x[:, t]`."""
    if p.value.dim() != 2 or right.dim() != 3:
        return apart(recorder, torch.matmul, product, (p.value, right), {})
    output = torch.matmul(p.value.detach(), right)

    def derive(gradient: Tensor, samples: Layout, right: Tensor) -> Forms:
        batch, dtype = samples.batch, p.parameter.dtype
        rows = per_sample(gradient.transpose(1, 2), batch, dtype)
        yield p, p.from_outer(rows, per_sample(right.transpose(1, 2), batch, dtype))

    return recorder.record(function, output, [p], derive, saved=[right])


@register_rule(torch.Tensor.__rmatmul__)
def reflected(recorder: Recorder, function: Any, right: Tensor, left: Tensor) -> Tensor:
    """`left @ right`, called from the right."""
    return matmul(recorder, function, left, right)


@register_rule(torch.addmm, torch.Tensor.addmm)
def addmm(
    recorder: Recorder, function: Any, input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`input + mat1 @ mat2`: a bias and a linear map whose weight lies the other way round."""
    views = [recorder.view(t) for t in (input, mat1, mat2)]
    if views[1] is not None:
        raise recorder.refuse(function, views[1], "takes it as its second argument rather than its third")
    if beta != 1 or alpha != 1:
        mat2, input = recorder.call(torch.mul, mat2, alpha), recorder.call(torch.mul, input, beta)
        return recorder.call(torch.addmm, input, mat1, mat2)
    output = torch.addmm(recorder.value(input), mat1, recorder.value(mat2))
    b, _, w = views

    def derive(gradient: Tensor, samples: Layout, mat1: Tensor) -> Forms:
        if w is not None:
            batch, dtype = samples.batch, w.parameter.dtype
            yield w, w.from_outer(per_sample(mat1, batch, dtype), per_sample(gradient, batch, dtype))
        if b is not None:
            yield b, from_broadcast(b, gradient, samples)

    return recorder.record(function, output, [w, b], derive, saved=[mat1])
