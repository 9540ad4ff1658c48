"""Layers in terms of functions that have rules, and the tied output layer."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.axis import Layout
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import register_rule
from dpformer.clipping.tied import Head
from dpformer.clipping.tied_head import HeadPass, Plain, tied_cross_entropy
from dpformer.clipping.use import Forms


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
        view = view or recorder.view(per_sample_weights)
        assert view is not None
        raise recorder.refuse(function, view, "takes it in a way without a rule")
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
        largest = picked.masked_fill(~there[..., None], -torch.inf).amax(1).where(there.any(1, keepdim=True), 0.0)
        return largest, offsets, offsets, offsets
    weights = there.to(picked.dtype) if per_sample_weights is None else per_sample_weights[place] * there
    total = (picked * weights[..., None]).sum(1)
    return (total / there.sum(1, keepdim=True).clamp_min(1) if mode == 1 else total), offsets, offsets, offsets


@register_rule(tied_cross_entropy)
def tied(recorder: Recorder, function: Any, hidden: Tensor, table: Tensor, *rest: Any) -> Tensor:
    """The head with a trainable table, which must be a whole parameter. rest: targets, weights, bias, workspace."""
    view = recorder.view(table)
    recorder.data(function, hidden)
    assert view is not None
    if view.value is not view.parameter or id(view.parameter) in recorder.derived:
        raise recorder.refuse(function, view, "needs the whole table as it is; use a bias of -inf to leave items out")
    targets, weights, bias, workspace = rest
    head = HeadPass(hidden.detach(), view.parameter.detach(), targets, weights, bias, workspace, recorder.route)

    def derive(gradient: Tensor, samples: Layout, *saved: Tensor) -> Forms:
        yield view, Head(head, gradient)

    losses = Plain.apply(hidden, view.parameter.detach(), head, targets, weights)
    return recorder.record(function, losses, [view], derive, saved=[hidden, targets, weights])
