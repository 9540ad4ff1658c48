"""`y = x W' + b`: the gradient of W is `sum_t g_t (x) x_t`, of b `sum_t g_t`, with g the gradient at y.

Two times, one input and one output feature: x = (1, 2), g = (3, 4) give dW = 3*1 + 4*2 = 11 and db = 7:

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> layer = torch.nn.Linear(1, 1)
>>> x, g = torch.tensor([[[1.0], [2.0]]]), torch.tensor([[[3.0], [4.0]]])
>>> PhantomClipping(layer).norms(lambda: (layer(x) * g).sum((1, 2))).square().round()  # 11^2 + 7^2
tensor([170.], dtype=torch.float64)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.shapes import from_broadcast, per_sample, sizes_of
from dpformer.clipping.use import Forms
from dpformer.clipping.walk import Layout


@register_rule(F.linear)
def linear(recorder: Recorder, function: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """F.linear with a trainable weight, bias or both; any leading dimensions."""
    recorder.data(function, input)
    # With two dimensions the output is no view of another tensor, which would have to be copied to be recorded.
    shape = torch.Size((*input.shape[:-1], weight.shape[0])) if input.dim() > 2 and weight.dim() == 2 else None
    flat = input if shape is None else input.flatten(0, -2)
    output = F.linear(flat, recorder.value(weight), recorder.value(bias))
    w, b, sizes = recorder.view(weight), recorder.view(bias), recorder.sizes
    if w is not None and w.value.dim() != 2:
        raise recorder.refuse(function, w, "takes it as a vector; give the weight two dimensions")

    def derive(gradient: Tensor, samples: Layout, flat: Tensor) -> Forms:
        batch = samples.batch
        size = sizes_of(gradient, batch)
        if w is not None:
            own = id(input), samples  # the input is alive as long as this: its identity is its own
            if own not in sizes:
                sizes[own] = sizes_of(flat, batch)
            g, x = (per_sample(value, batch, w.parameter.dtype) for value in (gradient, flat))
            yield w, w.from_outer(g, x, (size, sizes[own]))
        if b is not None:
            yield b, from_broadcast(b, gradient, samples, size)

    recorded = recorder.record(function, output, [w, b], derive, saved=[flat])
    return recorded if shape is None else recorded.view(shape)
