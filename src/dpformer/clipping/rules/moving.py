"""Functions that only move a parameter's elements: they make views, whose use comes when they meet the batch.

Learned positions: with the gradients (1, 2) at two times, `P[:2]` gets (1, 2) and the rest of P nothing:

>>> import torch
>>> from dpformer.clipping import PhantomClipping
>>> module, x, g = torch.nn.ParameterDict({"P": torch.zeros(9, 1)}), torch.zeros(1, 2, 1), torch.tensor([[[1.0], [2.0]]])
>>> PhantomClipping(module).norms(lambda: ((x + module["P"][:2]) * g).sum((1, 2))).square().round()
tensor([5.], dtype=torch.float64)
"""

from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.recorder import Recorder, register_rule
from dpformer.clipping.rules.embedding import pick, rows

T = torch.Tensor


@register_rule(
    *(torch.t, T.t, T.T.__get__, T.mT.__get__, torch.transpose, T.transpose, T.swapaxes, T.permute, torch.permute),  # type: ignore[attr-defined]
    *(T.view, T.reshape, torch.reshape, T.view_as, T.flatten, torch.flatten, T.squeeze, torch.squeeze),
    *(T.unsqueeze, torch.unsqueeze, T.expand, T.expand_as, T.narrow, torch.narrow, T.broadcast_to, torch.broadcast_to),
    *(
        T.repeat,
        T.tile,
        torch.tile,
        T.repeat_interleave,
        torch.repeat_interleave,
        T.flip,
        torch.flip,
        T.roll,
        torch.roll,
    ),
    *(T.select, torch.select, T.unflatten, torch.unflatten, T.movedim, torch.movedim),
    lazy=True,
    views=True,
)
def move(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A view of a view."""
    view = recorder.view(input)
    if view is None:
        # x.view_as(p), x.expand_as(p): the parameter gives its shape only
        return function(input, *(recorder.value(a) for a in args), **kwargs)
    return recorder.add_view(view.derive(function, args, kwargs))


@register_rule(
    T.to, T.type_as, T.float, T.double, T.half, T.bfloat16, T.contiguous, T.clone, torch.clone, lazy=True, views=True
)
def copy(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same elements in another type or place."""
    view = recorder.view(input)
    if view is None:
        return function(input, *(recorder.value(a) for a in args), **kwargs)
    copied = view.copied(function, tuple(recorder.value(a) for a in args), kwargs)
    return recorder.add_view(copied) if copied.value.is_floating_point() else copied.value


@register_rule(T.__getitem__, lazy=True, views=True)
def getitem(recorder: Recorder, function: Any, input: Tensor, key: Any) -> Tensor:
    """Rows by ids, or any slice."""
    view = recorder.view(input)
    if view is None:
        raise recorder.refuse(function, recorder.view(key), "uses it as an index")  # type: ignore[arg-type]
    if view.is_whole and isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32) and view.value.dim() == 2:
        return rows(recorder, function, view, key)
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, Tensor) and k not in recorder.shared for k in keys):
        return pick(recorder, function, view, key)
    return recorder.add_view(view.derive(function, (key,), {}))
