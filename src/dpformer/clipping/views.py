"""Parts of a parameter that do not have a batch in them yet: a transpose, a slice, the rows at some positions.

A view's use is where it meets the batch, because only there the gradients of the samples are still apart: the gradient at
`P[:L]` in `x + P[:L]` is already summed over samples, the gradient at the sum is not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.clipping.algebra import Dense, Form, Outer, Sparse
from dpformer.clipping.gradient import matrix_shape

_REPEATS = ("expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave")


@dataclass(frozen=True)
class View:
    """`value` is made of elements of `parameter`; the layout says which.

    whole      the parameter itself
    rows       rows of the parameter as an `R x C` matrix; `index` has their ids, `[*value.shape[:-1]]`
    elements   any; `index` has flat positions in the parameter, `[*value.shape]`

    `transposed` (two dimensions, whole or rows) means that `value` is the transpose of that. `value` is a leaf that requires a
    gradient, so that whatever is computed from it outside a rule is noticed. The row `padding` gets no gradient. `has_batch`:
    picked by ids or repeated to a size, so that its first dimension may be the samples; `repeated`: it is sure to be.
    `attach` makes the value again, with its autograd graph down to the parameters.
    """

    parameter: nn.Parameter
    name: str
    value: Tensor
    layout: Literal["whole", "rows", "elements"] = "whole"
    transposed: bool = False
    index: Tensor | None = None
    padding: int | None = None
    has_batch: bool = False
    repeated: bool = False
    attach: Callable[[], Tensor] | None = None

    def attached(self) -> Tensor:
        """The value with its autograd graph."""
        return self.parameter if self.attach is None else self.attach()

    @property
    def is_whole(self) -> bool:
        """Is it the parameter as it is?"""
        return self.layout == "whole" and not self.transposed

    def derive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
        """The view that `function(self, *args, **kwargs)` makes; the function only moves elements."""
        value = _leaf(function(self.value.detach(), *args, **kwargs))
        attach = lambda: function(self.attached(), *args, **kwargs)  # noqa: E731
        if self.value.dim() == 2 and self.layout != "elements" and _is_transpose(function, args, kwargs):
            return replace(
                self, value=value, transposed=not self.transposed, has_batch=False, repeated=False, attach=attach
            )
        if self.layout != "elements" and not self.transposed and _keeps_rows(function, args, kwargs, self.value.dim()):
            rows = function(self.row_ids(), *args, **kwargs)
            repeated = self._repeats(function, rows)
            view = replace(self, value=value, layout="rows", index=rows, attach=attach)
        else:
            elements = function(self.element_ids(), *args, **kwargs)
            repeated = self._repeats(function, elements)
            view = replace(self, value=value, layout="elements", transposed=False, index=elements, attach=attach)
        return replace(view, has_batch=self.has_batch or repeated, repeated=repeated)

    def _repeats(self, function: Any, index: Tensor) -> bool:
        return self.repeated or (getattr(function, "__name__", "") in _REPEATS and _is_one(index))

    def take(self, ids: Tensor, padding: int | None, has_batch: bool) -> View:
        """The view of the rows `ids` of a whole parameter, `[*ids.shape, C]`."""
        ids = torch.where(ids < 0, ids + len(self.value), ids)
        value = _leaf(self.value.detach()[ids])
        view = replace(self, value=value, layout="rows", index=ids, padding=padding, has_batch=has_batch)
        attach = lambda: F.embedding(ids, self.attached(), padding)  # noqa: E731
        return replace(view, repeated=has_batch and len(ids) > 1 and _is_one(ids), attach=attach)

    def copied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
        """The same view with a copy of its value, perhaps in another type."""
        value = _leaf(function(self.value.detach(), *args, **kwargs))
        return replace(self, value=value, attach=lambda: function(self.attached(), *args, **kwargs))

    def row_ids(self) -> Tensor:
        """Row of the parameter that each row of the (untransposed) view is, `[*shape[:-1]]`."""
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
            ids = self.row_ids()[..., None] * C + torch.arange(C, device=self.value.device)
        else:
            ids = torch.arange(self.parameter.numel(), device=self.value.device).view(self.parameter.shape)
        return ids.T if self.transposed else ids

    def from_gradient(self, gradient: Tensor, batch: int, bound: Tensor, own_rows: bool = False) -> Form:
        """The form of a gradient at this view: `[B, ..., *value.shape]`, or `value.shape` itself with `own_rows`.

        `own_rows` means that the view's first dimension runs over the samples, so that sample i has its share only.
        """
        R, C = matrix_shape(self.parameter.shape)
        if self.transposed and not own_rows:
            gradient = gradient.reshape(batch, *self.value.shape).transpose(1, 2)
            return replace(self, transposed=False, value=self.value.T).from_gradient(gradient, batch, bound)
        if self.layout == "whole" and not own_rows:
            return Dense(gradient.reshape(batch, R, C), bound)
        if self.layout == "rows" and not self.transposed:
            index = _apart(self.row_ids(), batch, own_rows)
            values = gradient.reshape(batch, index.shape[1], C)
            if self.padding is not None:
                values = values.masked_fill((index == self.padding)[..., None], 0)
            return Sparse(index, values)
        index = _apart(self.element_ids(), batch, own_rows)
        values = gradient.reshape(batch, -1)
        if self.padding is not None:
            values = values.masked_fill(index // C == self.padding, 0)
        return Dense(gradient.new_zeros(batch, R * C).scatter_add_(1, index, values).view(batch, R, C), bound)

    def from_outer(self, rows: Tensor, cols: Tensor, sizes: tuple[Tensor, Tensor] | None = None) -> Form:
        """The form of `sum_t rows_t (x) cols_t` as a gradient at this (two-dimensional) view; sizes: see `Outer`."""
        if self.transposed:
            swapped = sizes and (sizes[1], sizes[0])
            return replace(self, transposed=False, value=self.value.T).from_outer(cols, rows, swapped)
        if self.layout == "whole":
            return Outer(rows, cols, sizes)
        if self.layout == "rows" and self.padding is None:
            # The rows that are not in the view have no part: as large as what came in, not as the parameter per sample.
            R, _ = matrix_shape(self.parameter.shape)
            return Outer(rows.new_zeros(*rows.shape[:2], R).index_add_(2, self.row_ids(), rows), cols)
        return self.from_gradient(rows.transpose(1, 2) @ cols, len(rows), Outer(rows, cols).bound())


def _apart(ids: Tensor, batch: int, own_rows: bool) -> Tensor:
    """Ids `[B, n]` of each sample: its share of them, or all."""
    return ids.reshape(batch, -1) if own_rows else ids.reshape(1, -1).expand(batch, -1)


def _is_one(index: Tensor) -> bool:
    """Is the index the same for each element of its first dimension?"""
    return index.dim() > 0 and (index.stride(0) == 0 or bool((index == index[:1]).all()))


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _is_transpose(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function turns a matrix: decided on a matrix of two different sides."""
    if getattr(function, "__name__", "") not in ("__get__", "t", "transpose", "swapaxes", "permute"):
        return False
    return bool(function(torch.empty(2, 3, device="meta"), *args, **kwargs).shape == (3, 2))


def _keeps_rows(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dim: int) -> bool:
    """Whether the function acts on leading dimensions alone: then it can act on row ids, at 1/C of the size."""
    name = getattr(function, "__name__", "")
    if dim < 2 or kwargs:
        return False
    if name == "__getitem__":
        keys = args[0] if isinstance(args[0], tuple) else (args[0],)
        simple = all(k is None or isinstance(k, (int, slice)) for k in keys)
        return simple and sum(k is not None for k in keys) < dim
    if name in ("unsqueeze", "narrow"):
        return isinstance(args[0], int) and 0 <= args[0] < dim - (name == "narrow")
    return False
