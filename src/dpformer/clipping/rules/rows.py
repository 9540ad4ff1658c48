"""Rows and other elements of a parameter: by ids of samples they are a use, else a view that is used where it meets the batch.

The gradient of row r is the sum of the gradients at all places where it was looked up. An item that occurs twice, with gradients
1 and 2, has the gradient 3, not two gradients of its own:

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
from dpformer.clipping.axis import Layout
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import named, register_rule
from dpformer.clipping.rules.apart import lazily
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View

T = torch.Tensor
_MOVES = """
    t transpose swapaxes permute view reshape view_as flatten squeeze unsqueeze expand expand_as narrow broadcast_to repeat tile
    repeat_interleave flip roll select unflatten movedim
"""
_COPIES = "to type_as float double half bfloat16 contiguous clone"


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
    return _rows(recorder, function, view, input, padding_idx)


def _rows(recorder: Recorder, function: Any, view: View, ids: Tensor, padding: int | None = None) -> Tensor:
    """Rows `ids` of a whole parameter: a use where the ids belong to samples, else (positions, say) a view."""
    if not view.is_whole or view.value.shape != view.parameter.shape or view.value.dim() != 2:
        if ids in recorder.shared:
            if padding is None:
                return recorder.derive(T.__getitem__, (view.value, ids), {}, [view])
            return recorder.derive(F.embedding, (ids, view.value, padding), {}, [view])
        return _pick(recorder, function, view, ids, padding)
    one = ids.dim() > 1 and ids.shape[0] == 1
    data = ids.dim() > 1 and not recorder.shared.is_constant(ids)
    if ids in recorder.shared and not one and not data:
        return recorder.add_view(view.take(ids, padding, has_batch=ids.dim() > 1))
    ids = torch.where(ids < 0, ids + len(view.value), ids)
    output = F.embedding(ids, view.value.detach())

    def derive(gradient: Tensor, samples: Layout, ids: Tensor) -> Forms:
        index = ids.reshape(samples.batch, -1)
        values = gradient.reshape(*index.shape, gradient.shape[-1]).to(view.parameter.dtype)
        if padding is not None:
            values = values.masked_fill((index == padding)[..., None], 0)
        yield view, Sparse(index, values)

    output = recorder.record(function, output, [view], derive, saved=[ids])
    if one or id(view.parameter) in recorder.derived:
        # A batch of one, or ids to be broadcast, which a model may have cached: that shows when it meets a batch.
        recorder.note_broadcast(output, lambda: recorder.add_view(view.take(ids, padding, has_batch=False)))
    return output


def _pick(recorder: Recorder, function: Any, view: View, key: Any, padding: int | None = None) -> Tensor:
    """Elements of any view by a key that has ids of samples in it."""
    places = torch.arange(view.value.numel(), device=view.value.device).view(view.value.shape)[key]

    def derive(gradient: Tensor, samples: Layout, places: Tensor) -> Forms:
        index = places.reshape(samples.batch, -1)
        values = gradient.reshape(samples.batch, -1).to(view.parameter.dtype)
        if padding is not None:
            values = values.masked_fill(index // view.value[0].numel() == padding, 0)

        def compute(part: slice) -> Tensor:
            own = values[part]
            out = own.new_zeros(len(own), view.value.numel()).scatter_add_(1, index[part], own)
            return out.view(len(own), *view.value.shape)

        yield view, lazily(view, compute)

    output = recorder.record(function, view.value.detach()[key], [view], derive, saved=[places])
    if padding is None:  # as above
        recorder.note_broadcast(output, lambda: recorder.derive(T.__getitem__, (view.value, key), {}, [view]))
    return output


@register_rule(torch.index_select, T.index_select, views=True)
def index_select(recorder: Recorder, function: Any, input: Tensor, dim: int, index: Tensor) -> Tensor:
    """Rows of a table by a list of ids."""
    return recorder.call(T.__getitem__, input, (*(slice(None) for _ in range(dim % input.dim())), index))


@register_rule(T.__getitem__, lazy=True, views=True)
def getitem(recorder: Recorder, function: Any, input: Tensor, key: Any) -> Tensor:
    """Rows by ids, or any slice."""
    view = recorder.view(input)
    if view is None:
        raise recorder.refuse(function, recorder.view(key), "uses it as an index")  # type: ignore[arg-type]
    keys = tuple(
        int(k) if isinstance(k, Tensor) and not k.dim() else k for k in (key if isinstance(key, tuple) else (key,))
    )
    if len(keys) == 1 and isinstance(keys[0], Tensor) and keys[0].dtype in (torch.int64, torch.int32):
        return _rows(recorder, function, view, keys[0])
    if any(isinstance(k, Tensor) and k not in recorder.shared for k in keys):
        return _pick(recorder, function, view, keys)
    return move(recorder, function, input, keys)


@register_rule(*named(_MOVES), T.T.__get__, T.mT.__get__, lazy=True, views=True)  # type: ignore[attr-defined]
def move(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A function that only moves a parameter's elements."""
    view = recorder.view(input)
    if view is None:
        # x.view_as(p), x.expand_as(p): the parameter gives its shape only
        return function(input, *(recorder.value(a) for a in args), **kwargs)
    made = view.derive(function, args, kwargs)
    if made is not None:
        return recorder.add_view(made)
    return recorder.derive(function, (input, *args), kwargs, [view])


@register_rule(*named(_COPIES), lazy=True, views=True)
def copy(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same elements in another type or place."""
    view, args = recorder.view(input), tuple(recorder.value(a) for a in args)
    if view is None:
        return function(input, *args, **kwargs)
    copied = view.copied(function, args, kwargs)
    return recorder.add_view(copied) if copied.value.is_floating_point() else copied.value
