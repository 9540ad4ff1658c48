"""Parts of a parameter that do not have a batch in them yet: a transpose, a slice, the rows at some positions.

A view's use is where it meets the batch, because only there the gradients of the samples are still apart: the gradient at
`P[:L]` in `x + P[:L]` is already summed over samples, the gradient at the sum is not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dpformer.clipping.forms import Dense, Form, Outer, Sparse
from dpformer.clipping.gradient import matrix_shape


@dataclass(frozen=True)
class View:
    """`value` is made of elements of `parameter`; exactly one of the layouts says which.

    whole        the parameter itself
    transposed   its transpose (two dimensions)
    rows         rows of the parameter as an `R x C` matrix; ids `[*value.shape[:-1]]`
    elements     flat positions in the parameter, `[*value.shape]`

    `value` is a leaf that requires a gradient, so that whatever is computed from it outside a rule is noticed.
    `has_batch`: picked by ids or repeated to a size, so that its first dimension may be the samples.
    """

    parameter: nn.Parameter
    name: str
    value: Tensor
    layout: str = "whole"
    index: Tensor | None = None
    padding: int | None = None
    has_batch: bool = False

    def derive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
        """The view that `function(self, *args, **kwargs)` makes; the function only moves elements."""
        value = _leaf(function(self.value.detach(), *args, **kwargs))
        has_batch = self.has_batch or getattr(function, "__name__", "") in ("expand", "expand_as", "repeat")
        turned = value.dim() == 2 and self.layout in ("whole", "transposed") and _is_transpose(function, args)
        if turned and self.parameter.dim() == 2:
            layout = "transposed" if self.layout == "whole" else "whole"
            return View(self.parameter, self.name, value, layout)
        if self.layout in ("whole", "rows") and self.value.dim() > 1 and _keeps_rows(function, args, self.value.dim()):
            rows = function(self.row_ids(), *args, **kwargs)
            return View(self.parameter, self.name, value, "rows", rows, self.padding, has_batch)
        elements = function(self.element_ids(), *args, **kwargs)
        C = self.parameter.shape[-1] if self.parameter.dim() > 1 else 1
        if C > 1 and value.dim() > 1 and value.shape[-1] == C and value.numel():
            first = elements[..., :1]
            steps = torch.arange(C, device=elements.device)
            if bool(((first % C == 0) & (elements - first == steps).all(-1, keepdim=True)).all()):
                return View(self.parameter, self.name, value, "rows", first[..., 0] // C, self.padding, has_batch)
        return View(self.parameter, self.name, value, "elements", elements, None, has_batch)

    def take(self, ids: Tensor, padding: int | None, has_batch: bool) -> View:
        """The view of the rows `ids` of a whole parameter, `[*ids.shape, C]`."""
        return View(self.parameter, self.name, _leaf(self.parameter.detach()[ids]), "rows", ids, padding, has_batch)

    def copied(self, value: Tensor) -> View:
        """The same view with a copy of its value, perhaps in another type."""
        return replace(self, value=_leaf(value))

    def row_ids(self) -> Tensor:
        """Row of the parameter that each row of the view is, `[*value.shape[:-1]]`."""
        if self.layout == "rows":
            assert self.index is not None
            return self.index
        shape = self.parameter.shape[:-1]
        return torch.arange(shape.numel(), device=self.value.device).view(shape)

    def element_ids(self) -> Tensor:
        """Flat position in the parameter of each element of the view, `[*value.shape]`."""
        if self.layout == "elements":
            assert self.index is not None
            return self.index
        if self.layout == "rows":
            C = self.parameter.shape[-1]
            return self.row_ids()[..., None] * C + torch.arange(C, device=self.value.device)
        ids = torch.arange(self.parameter.numel(), device=self.value.device).view(self.parameter.shape)
        return ids.T if self.layout == "transposed" else ids

    def from_gradient(self, gradient: Tensor, batch: int, bound: Tensor, own_rows: bool = False) -> Form:
        """The form of a gradient at this view: `[B, *value.shape]`, or `value.shape` itself with `own_rows`.

        `own_rows` means that the view's first dimension runs over the samples, so that sample i has its share only.
        """
        R, C = matrix_shape(self.parameter.shape)
        if self.layout == "rows" or (own_rows and self.layout == "whole" and self.parameter.dim() > 1):
            ids = self.row_ids()
            index = ids.reshape(batch, -1) if own_rows else ids.reshape(1, -1).expand(batch, -1)
            values = gradient.reshape(batch, index.shape[1], C)
            if self.padding is not None:
                values = values.masked_fill((index == self.padding)[..., None], 0)
            return Sparse(index, values)
        if self.layout == "whole" and not own_rows:
            return Dense(gradient.reshape(batch, R, C), bound)
        if self.layout == "transposed" and not own_rows:
            return Dense(gradient.transpose(-1, -2), bound)
        ids = self.element_ids()
        index = ids.reshape(batch, -1) if own_rows else ids.reshape(1, -1).expand(batch, -1)
        dense = gradient.new_zeros(batch, R * C).scatter_add_(1, index, gradient.reshape(batch, -1))
        return Dense(dense.view(batch, R, C), bound)

    def from_outer(self, rows: Tensor, cols: Tensor) -> Form:
        """The form of `sum_t rows_t (x) cols_t` as a gradient at this (two-dimensional) view."""
        if self.layout == "whole":
            return Outer(rows, cols)
        if self.layout == "transposed":
            return Outer(cols, rows)
        outer = Outer(rows, cols)
        batch = rows.shape[0]
        return self.from_gradient(rows.transpose(1, 2) @ cols, batch, outer.bound())


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _is_transpose(function: Any, args: tuple[Any, ...]) -> bool:
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") in ("T", "mT")
    if name == "t":
        return True
    if name in ("transpose", "swapaxes", "swapdims"):
        return {a % 2 for a in args if isinstance(a, int)} == {0, 1}
    return False


def _keeps_rows(function: Any, args: tuple[Any, ...], dim: int) -> bool:
    """Whether the function acts on leading dimensions alone: then it can act on row ids, at 1/C of the size."""
    name = getattr(function, "__name__", "")
    if name == "__getitem__":
        keys = args[0] if isinstance(args[0], tuple) else (args[0],)
        simple = all(k is None or isinstance(k, (int, slice)) for k in keys)
        return simple and sum(k is not None for k in keys) < dim
    if name in ("unsqueeze", "narrow"):
        return isinstance(args[0], int) and 0 <= args[0] < dim - (name == "narrow")
    return False
