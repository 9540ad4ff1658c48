"""Layer norm and RMS norm: `y = xhat * w + b` has the gradients `sum_t g_t xhat_t` and `sum_t g_t`.

xhat of (1, 3) is (-1, 1); with g = (2, 5) the weight gets (-2, 5) and the bias (2, 5):

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> norm = torch.nn.LayerNorm(2, eps=0)
>>> x, g = torch.tensor([[[1.0, 3.0]]]), torch.tensor([[[2.0, 5.0]]])
>>> PhantomClipping(norm).norms(lambda: (norm(x) * g).sum((1, 2))).square().round()  # 4 + 25 + 4 + 25
tensor([58.], dtype=torch.float64)
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.shapes import from_broadcast
from dpformer.clipping.use import Forms
from dpformer.clipping.walk import Layout

Parameters = tuple[Tensor | None, Tensor | None]
Normalise = Callable[..., Tensor]


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
    """F.layer_norm with a trainable weight, bias or both."""
    own = recorder.value(weight), recorder.value(bias)
    output, mean, scale = torch.native_layer_norm(input, list(normalized_shape), *own, eps)
    # xhat is computed again when it is needed: cheap, where keeping it would cost as much memory as the input.
    saved = [recorder.data(function, input).detach(), mean.detach(), scale.detach()]
    return _record(recorder, function, output, saved, (weight, bias), lambda x, mean, scale: (x - mean).mul_(scale))


@register_rule(F.rms_norm)
def rms_norm(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    """F.rms_norm with a trainable weight."""
    output = F.rms_norm(input, normalized_shape, recorder.value(weight), eps)
    normalise = partial(F.rms_norm, normalized_shape=normalized_shape, eps=eps)
    return _record(recorder, function, output, [recorder.data(function, input).detach()], (weight, None), normalise)


def _record(
    recorder: Recorder,
    function: Any,
    output: Tensor,
    saved: list[Tensor],
    parameters: Parameters,
    normalise: Normalise,
) -> Tensor:
    w, b = map(recorder.view, parameters)

    def derive(gradient: Tensor, samples: Layout, *saved: Tensor) -> Forms:
        if w is not None:
            yield w, from_broadcast(w, normalise(*saved).mul_(gradient), samples)
        if b is not None:
            yield b, from_broadcast(b, gradient, samples)

    return recorder.record(function, output, [w, b], derive, saved=saved)
