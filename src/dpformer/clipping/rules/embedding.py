"""Rows of a table: the gradient of row r is the sum of the gradients at all places where it was looked up.

An item that occurs twice, with gradients 1 and 2, has the gradient 3, not two gradients of its own:

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> table, s = torch.nn.Embedding(5, 1), torch.tensor([[4, 4, 2]])
>>> g = torch.tensor([[[1.0], [2.0], [5.0]]])
>>> PhantomClipping(table).norms(lambda: (table(s) * g).sum((1, 2))).square().round()  # 3^2 + 5^2
tensor([34.], dtype=torch.float64)
"""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.clipping.algebra import Sparse
from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.apart import lazily
from dpformer.clipping.rules.shapes import per_sample
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View
from dpformer.clipping.walk import Layout

T = torch.Tensor


@register_rule(F.embedding, views=True)
def embedding(
    recorder: Recorder,
    function: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """F.embedding; the row `padding_idx` gets no gradient, as in torch."""
    view = recorder.view(weight)
    assert view is not None
    if max_norm is not None or scale_grad_by_freq or sparse:
        raise recorder.refuse(function, view, "has no rule for max_norm, scale_grad_by_freq or sparse")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    return rows(recorder, function, view, input, padding_idx)


def rows(recorder: Recorder, function: Any, view: View, ids: Tensor, padding: int | None = None) -> Tensor:
    """Rows `ids` of a whole parameter: a use where the ids belong to samples, else (positions, say) a view."""
    if not view.is_whole or view.parameter.dim() != 2:
        if ids in recorder.shared:
            return recorder.add_view(view.derive(T.__getitem__, (ids,), {}))
        return pick(recorder, function, view, ids, padding)
    one = ids.dim() > 1 and ids.shape[0] == 1
    data = ids.dim() > 1 and not recorder.shared.is_constant(ids)
    if ids in recorder.shared and not one and not data:
        return recorder.add_view(view.take(ids, padding, has_batch=ids.dim() > 1))
    ids = torch.where(ids < 0, ids + len(view.value), ids)
    output = F.embedding(ids, view.value.detach())

    def derive(gradient: Tensor, samples: Layout, ids: Tensor) -> Forms:
        index = ids.reshape(samples.batch, -1)
        values = per_sample(gradient, samples.batch, view.parameter.dtype)
        if padding is not None:
            values = values.masked_fill((index == padding)[..., None], 0)
        yield view, Sparse(index, values)

    output = recorder.record(function, output, [view], derive, saved=[ids])
    if one:
        # A batch of one, or ids made to be broadcast: the latter shows when it meets a batch.
        recorder.note_broadcast(output, view.take(ids, padding, has_batch=False))
    return output


def pick(recorder: Recorder, function: Any, view: View, key: Any, padding: int | None = None) -> Tensor:
    """Elements of any view by a key that has ids of samples in it."""
    places = torch.arange(view.value.numel(), device=view.value.device).view(view.value.shape)[key]
    if padding is not None:
        frozen = places // view.value[0].numel() == padding
    output = view.value.detach()[key]

    def derive(gradient: Tensor, samples: Layout, places: Tensor) -> Forms:
        index = places.reshape(samples.batch, -1)
        values = gradient.reshape(samples.batch, -1).to(view.parameter.dtype)
        if padding is not None:
            values = values.masked_fill(samples.first(frozen).reshape(samples.batch, -1), 0)

        def compute(part: slice) -> Tensor:
            own = values[part]
            out = own.new_zeros(len(own), view.value.numel()).scatter_add_(1, index[part], own)
            return out.view(len(own), *view.value.shape)

        yield view, lazily(view, compute)

    return recorder.record(function, output, [view], derive, saved=[places])


@register_rule(torch.index_select, torch.Tensor.index_select, views=True)
def index_select(recorder: Recorder, function: Any, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows of a table by a list of ids."""
    view = recorder.view(input)
    assert view is not None
    if dim in (0, -input.dim()):
        return rows(recorder, function, view, index)
    return recorder.call(T.__getitem__, input, (*(slice(None) for _ in range(dim % input.dim())), index))
