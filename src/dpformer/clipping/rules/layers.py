"""Layers in terms of functions that have rules, and convolutions.

A convolution is a linear map of the patches of its input: `G_i = sum_t g_t (x) patch_t`. With the patches (1, 2) and (2, 3) of
the signal (1, 2, 3), and g = (1, 10), it is (21, 32):

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> conv, x = torch.nn.Conv1d(1, 1, 2, bias=False), torch.tensor([[[1.0, 2.0, 3.0]]])
>>> PhantomClipping(conv).norms(lambda: (conv(x) * torch.tensor([1.0, 10.0])).sum((1, 2))).square().round()  # 21^2 + 32^2
tensor([1465.], dtype=torch.float64)
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.recorder import RULES, Recorder, register_rule
from dpformer.clipping.rules.apart import lazily
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View
from dpformer.clipping.walk import Layout

_CONVOLUTIONS = (torch.conv1d, torch.conv2d, torch.conv3d)
_TRANSPOSED = (torch.conv_transpose1d, torch.conv_transpose2d, torch.conv_transpose3d)
_by_samples = RULES[torch.conv2d]  # `apart`'s


def _channels(p: Tensor, x: Tensor) -> Tensor:
    """A parameter `[channels]` as `[channels, 1, ...]`, to be broadcast over x `[B, channels, ...]`."""
    return p.view(-1, *(1 for _ in range(x.dim() - 2)))


def _any(recorder: Recorder, *values: Any) -> View:
    return next(view for value in values if (view := recorder.view(value)) is not None)


@register_rule(*_CONVOLUTIONS, *_TRANSPOSED)
def convolution(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """A convolution; its bias is added by a use of its own."""
    if input.dim() != weight.dim():
        raise ValueError(f"{function.__name__}: samples are missing: the input has {input.dim()} dimensions")
    if bias is not None:
        output = recorder.call(function, input, weight, None, *rest, **more)
        return recorder.call(lambda: output + _channels(bias, output))
    if (view := recorder.view(weight)) is None:
        return function(input, weight, None, *rest, **more)
    recorder.data(function, input)
    named = dict(zip(("stride", "padding", "dilation", "groups"), rest, strict=False)) | more
    flat = (
        function in _CONVOLUTIONS[:2] and named.get("groups", 1) == 1 and not isinstance(named.get("padding", 0), str)
    )
    if not flat:
        return _by_samples(recorder, function, input, weight, None, *rest, **more)
    two = function is torch.conv2d

    def pair(value: int | Sequence[int], missing: int) -> tuple[int, ...]:
        given = (value,) if isinstance(value, int) else tuple(value)
        return (given * 2)[:2] if two else (missing, given[0])

    size = pair(weight.shape[2:], 1)
    about = {k: pair(named.get(k, default), default) for k, default in (("stride", 1), ("padding", 0), ("dilation", 1))}
    output = function(input, view.value.detach(), None, *rest, **more)

    def derive(gradient: Tensor, samples: Layout, input: Tensor) -> Forms:
        batch = samples.batch

        def compute(part: slice) -> Tensor:
            g, x = (t.reshape(batch, -1, *t.shape[1:])[part].to(view.parameter.dtype) for t in (gradient, input))
            patches = F.unfold((x if two else x.unsqueeze(3)).flatten(0, 1), size, **about)
            patches = patches.view(*x.shape[:2], *patches.shape[1:])  # [b, k, channels * size, places]
            own = torch.einsum("bkot,bkct->boc", g.flatten(3), patches)
            return own.reshape(len(own), *view.value.shape)

        yield view, lazily(view, compute, gradient[0].numel() + input[0].numel() * size[0] * size[1])

    return recorder.record(function, output, [view], derive, saved=[input.detach()])


@register_rule(torch.group_norm, torch.instance_norm, torch.batch_norm)
def scaled_norm(recorder: Recorder, function: Any, input: Tensor, *rest: Any, **more: Any) -> Tensor:
    """The norm without weight and bias, which are then a product and a sum."""
    at = 1 if function is torch.group_norm else 0
    own = list(rest)
    weight, bias = own[at], own[at + 1]
    if function is torch.batch_norm and own[4]:
        raise recorder.refuse(
            function, _any(recorder, weight, bias), "mixes samples in training mode; call eval() on it"
        )
    own[at] = own[at + 1] = None
    output = function(recorder.data(function, input), *own, **more)
    if weight is not None:
        output = recorder.call(lambda: output * _channels(weight, output))
    return recorder.call(lambda: output + _channels(bias, output)) if bias is not None else output


@register_rule(torch.prelu)
def prelu(recorder: Recorder, function: Any, input: Tensor, weight: Tensor) -> Tensor:
    """`max(0, x) + w min(0, x)`."""
    return recorder.call(
        lambda: input.clamp_min(0) + (_channels(weight, input) if weight.numel() > 1 else weight) * input.clamp_max(0)
    )


@register_rule(F.scaled_dot_product_attention, lazy=True)
def attention(
    recorder: Recorder,
    function: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Any = None,
    *rest: Any,
    **more: Any,
) -> Tensor:
    """Attention with a trainable bias, which is added to zeros for each sample, or with learned queries, keys or values."""
    if recorder.view(attn_mask) is not None:
        batch = next(t for t in (query, key, value) if recorder.view(t) is None)
        shape = (len(batch), query.shape[1], query.shape[-2], key.shape[-2])
        attn_mask = recorder.call(torch.add, batch.new_zeros(()).expand(shape), attn_mask)
    given = [query, key, value]
    for k, tensor in enumerate(given):
        if (view := recorder.view(tensor)) is not None:
            given[k] = recorder.record_rows(function, view)
    return function(*given, attn_mask, *rest, **more)


@register_rule(torch.embedding_bag)
def embedding_bag(
    recorder: Recorder,
    function: Any,
    weight: Tensor,
    indices: Tensor,
    offsets: Tensor,
    scale_grad_by_freq: bool = False,
    mode: int = 0,
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> tuple[Tensor, ...]:
    """Sums, means or maxima of rows, each over a bag of ids: bags are padded to the longest."""
    view = recorder.view(weight)
    if view is None or scale_grad_by_freq or sparse or not view.is_whole:
        raise recorder.refuse(function, _any(recorder, weight, per_sample_weights), "takes it in a way without a rule")
    starts = offsets[:-1] if include_last_offset else offsets
    ends = torch.cat([starts[1:], starts.new_tensor([len(indices)])])
    longest = int((ends - starts).max()) if len(starts) else 0
    place = starts[:, None] + torch.arange(longest, device=starts.device)
    there = place < ends[:, None]
    place = place.clamp_max(max(len(indices) - 1, 0))
    ids = indices[place]
    if padding_idx is not None:
        there = there & (ids != padding_idx)
    picked = recorder.call(F.embedding, ids, weight, padding_idx)
    if mode == 2:
        found = picked.masked_fill(~there[..., None], -torch.inf).amax(1).where(there.any(1, keepdim=True), 0.0)
        return found, offsets, offsets, offsets
    weights = there.to(picked.dtype) if per_sample_weights is None else per_sample_weights[place] * there
    total = (picked * weights[..., None]).sum(1)
    return (total / there.sum(1, keepdim=True).clamp_min(1) if mode == 1 else total), offsets, offsets, offsets
