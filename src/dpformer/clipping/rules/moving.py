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
from dpformer.clipping.rules.embedding import rows

T = torch.Tensor


@register_rule(
    *(torch.t, T.t, T.T.__get__, T.mT.__get__, torch.transpose, T.transpose, T.swapaxes, T.permute, torch.permute),  # type: ignore[attr-defined]
    *(T.view, T.reshape, torch.reshape, T.view_as, T.flatten, torch.flatten, T.squeeze, torch.squeeze),
    *(T.unsqueeze, torch.unsqueeze, T.expand, T.expand_as, T.narrow, torch.narrow),
    lazy=True,
)
def move(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """A view of a view."""
    view = recorder.view(input)
    if view is None:
        # x.view_as(p), x.expand_as(p): the parameter gives its shape only
        return function(input, *(recorder.value(a) for a in args), **kwargs)
    return recorder.add_view(view.derive(function, args, kwargs))


@register_rule(T.to, T.type_as, T.float, T.double, T.half, T.bfloat16, T.contiguous, T.clone, torch.clone, lazy=True)
def copy(recorder: Recorder, function: Any, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The same elements in another type or place."""
    view = recorder.view(input)
    if view is None:
        return function(input, *(recorder.value(a) for a in args), **kwargs)
    copied: Tensor = function(view.value.detach(), *args, **kwargs)
    return recorder.add_view(view.copied(copied)) if copied.is_floating_point() else copied


@register_rule(T.__getitem__, lazy=True)
def getitem(recorder: Recorder, function: Any, input: Tensor, key: Any) -> Tensor:
    """Rows by ids, or any slice."""
    view = recorder.view(input)
    if view is None:
        raise recorder.refuse(function, recorder.view(key), "uses it as an index")  # type: ignore[arg-type]
    whole = view.layout == "whole" and not view.transposed
    if whole and isinstance(key, Tensor) and key.dtype in (torch.int64, torch.int32):
        return rows(recorder, function, view, key)
    keys = key if isinstance(key, tuple) else (key,)
    if any(isinstance(k, Tensor) and k not in recorder.shared for k in keys):
        raise recorder.refuse(
            function, view, "picks elements by an index without a rule (wanted one tensor of row ids)"
        )
    return recorder.add_view(view.derive(function, (key,), {}))
