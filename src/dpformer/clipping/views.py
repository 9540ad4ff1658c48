"""Functions of parameters alone, before the batch comes in: parts of a parameter, and parameters of their own.

A use is where a parameter meets the batch, because only there the gradients of the samples are still apart. A transpose, rows and
another shape are *views* of a parameter, whose gradients need no more than factors. The result of any other function (`1 + w`,
weight norm) is *derived*: a parameter of its own, at which each sample's gradient G_i is formed. A vector-Jacobian product
carries G_i to the parameters that it was computed from, for a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dpformer.clipping.algebra import Dense, Form, Lazy, Outer, Sparse
from dpformer.clipping.gradient import matrix_shape

_REPEATS = {"expand", "expand_as", "broadcast_to", "repeat", "tile", "repeat_interleave"}


@dataclass(frozen=True)
class View:
    """`value` has the elements of `parameter` in their order; or, with `index` `[*value.shape[:-1]]`, its rows at `index`.

    `transposed` (two dimensions): `value` is the transpose of that. `value` is a leaf that requires a gradient, so that whatever
    is computed from it outside a rule is noticed. The row `padding` gets no gradient. `has_batch`: picked by ids or repeated, so
    that its first dimension may be the samples; `repeated`: it is sure to be. `attach` makes the value with its autograd graph.
    """

    parameter: nn.Parameter
    name: str
    value: Tensor
    index: Tensor | None = None
    transposed: bool = False
    padding: int | None = None
    has_batch: bool = False
    repeated: bool = False
    attach: Callable[[], Tensor] | None = None

    def attached(self) -> Tensor:
        """The value with its autograd graph."""
        return self.parameter if self.attach is None else self.attach()

    @property
    def is_whole(self) -> bool:
        """Is it the parameter as it is, perhaps in another shape?"""
        return self.index is None and not self.transposed

    def derive(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View | None:
        """The view that `function(self, *args, **kwargs)` makes; None if it is none of the kinds above."""
        value = function(self.value.detach(), *args, **kwargs)
        attach = lambda: function(self.attached(), *args, **kwargs)  # noqa: E731
        made = replace(self, value=_leaf(value), attach=attach)
        if self.value.dim() == 2 and _is_transpose(function, args, kwargs):
            return replace(made, transposed=not self.transposed, has_batch=False, repeated=False)
        if self.transposed or _name(function) in _REPEATS:
            return None
        if (
            _keeps_rows(function, args, kwargs, self.value)
            and self.value.shape[-1] == matrix_shape(self.parameter.shape)[1]
        ):
            rows = function(self.row_ids(), *args, **kwargs)
            return replace(made, index=rows, has_batch=self.has_batch or self.repeated)
        contiguous = value.is_contiguous() and self.value.is_contiguous() and value.numel() == self.value.numel()
        return made if self.is_whole and contiguous and value.data_ptr() == self.value.data_ptr() else None

    def repeats(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether each element of the first dimension of `function(self, *args, **kwargs)` is the same part of the parameter."""
        if _name(function) not in _REPEATS:
            return False
        ids = torch.arange(self.value.numel(), device=self.value.device).view(self.value.shape)
        return _is_one(function(ids, *args, **kwargs))

    def take(self, ids: Tensor, padding: int | None, has_batch: bool) -> View:
        """The view of the rows `ids` of a whole parameter, `[*ids.shape, C]`."""
        ids = torch.where(ids < 0, ids + len(self.value), ids)
        attach = lambda: F.embedding(ids, self.attached(), padding)  # noqa: E731
        view = replace(self, value=_leaf(self.value.detach()[ids]), index=ids, padding=padding, attach=attach)
        return replace(view, has_batch=has_batch, repeated=has_batch and len(ids) > 1 and _is_one(ids))

    def copied(self, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> View:
        """The same view with a copy of its value, perhaps in another type."""
        value = _leaf(function(self.value.detach(), *args, **kwargs))
        return replace(self, value=value, attach=lambda: function(self.attached(), *args, **kwargs))

    def row_ids(self) -> Tensor:
        """Row of the parameter that each row of the (untransposed) view is, `[*shape[:-1]]`."""
        if self.index is not None:
            return self.index
        shape = self.value.shape[:-1]
        return torch.arange(shape.numel(), device=self.value.device).view(shape)

    def from_gradient(self, gradient: Tensor, batch: int, bound: Tensor, own_rows: bool = False) -> Form:
        """The form of a gradient at this view: `[B, ..., *value.shape]`, or `value.shape` itself with `own_rows`.

        `own_rows` means that the view's first dimension runs over the samples, so that sample i has its share only.
        """
        R, C = matrix_shape(self.parameter.shape)
        as_rows = self.index is not None or (
            own_rows and self.value.shape == self.parameter.shape and len(self.value.shape) > 1
        )
        if as_rows and not self.transposed:
            ids = self.row_ids()
            index = ids.reshape(batch, -1) if own_rows else ids.reshape(1, -1).expand(batch, -1)
            values = gradient.reshape(batch, index.shape[1], C)
            if self.padding is not None:
                values = values.masked_fill((index == self.padding)[..., None], 0)
            return Sparse(index, values)
        if own_rows:
            each, shares = torch.arange(batch, device=gradient.device), gradient.reshape(batch, -1)
            gradient = gradient.new_zeros(batch, batch, shares.shape[1])
            gradient[each, each] = shares
        if self.transposed:
            gradient = gradient.reshape(batch, *self.value.shape).transpose(1, 2)
            return replace(self, transposed=False, value=self.value.T).from_gradient(gradient, batch, bound)
        return Dense(gradient.reshape(batch, R, C), bound)

    def from_outer(self, rows: Tensor, cols: Tensor, sizes: tuple[Tensor, Tensor] | None = None) -> Form:
        """The form of `sum_t rows_t (x) cols_t` as a gradient at this (two-dimensional) view; sizes: see `Outer`."""
        if self.transposed:
            swapped = sizes and (sizes[1], sizes[0])
            return replace(self, transposed=False, value=self.value.T).from_outer(cols, rows, swapped)
        R, C = matrix_shape(self.parameter.shape)
        if self.index is None and self.value.shape == (R, C):
            return Outer(rows, cols, sizes)
        if self.index is not None and self.padding is None:
            # The rows that are not in the view have no part: as large as what came in, not as the parameter per sample.
            return Outer(rows.new_zeros(*rows.shape[:2], R).index_add_(2, self.index, rows), cols)
        return self.from_gradient(rows.transpose(1, 2) @ cols, len(rows), Outer(rows, cols).bound())


@dataclass(frozen=True)
class Derived:
    """`output` is a function of `sources`, with its autograd graph, which is apart from that of the losses."""

    output: Tensor
    sources: tuple[nn.Parameter, ...]

    def pull(self, at: nn.Parameter, forms: list[Form], batch: int) -> Iterator[tuple[nn.Parameter, Form]]:
        """What `forms`, the gradients at the output, add to the gradient of each source. at: the output as a parameter."""

        def compute(source: nn.Parameter, samples: slice) -> Tensor:
            count = samples.stop - samples.start
            gradient = at.new_zeros(count, *matrix_shape(at.shape))
            for form in forms:
                form.form_into(gradient, samples)
            pulled = self._product(source, gradient.view(count, *at.shape))
            return source.new_zeros(count, *source.shape) if pulled is None else pulled

        for source in self.sources:
            yield source, Lazy(partial(compute, source), 2 * at.numel() + source.numel())

    def _product(self, source: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """`[b, *source.shape]` from `[b, *output.shape]`, or None if the output does not depend on the source."""
        rest = {"retain_graph": True, "allow_unused": True}
        if len(gradient) > 1:
            try:
                return torch.autograd.grad(self.output, source, gradient, is_grads_batched=True, **rest)[0]
            except RuntimeError:  # a function that cannot be batched: one at a time
                pass
        each = [torch.autograd.grad(self.output, source, one, **rest)[0] for one in gradient]
        return None if each[0] is None else torch.stack(each)


def _name(function: Any) -> str:
    return getattr(function, "__name__", "")


def _is_one(index: Tensor) -> bool:
    """Is the index the same for each element of its first dimension?"""
    return index.dim() > 0 and (index.stride(0) == 0 or bool((index == index[:1]).all()))


def _leaf(value: Tensor) -> Tensor:
    return value.detach().requires_grad_(value.is_floating_point())


def _is_transpose(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a function turns a matrix: decided on a matrix of two different sides."""
    turning = _name(function) in ("__get__", "t", "transpose", "swapaxes", "permute")
    return turning and function(torch.empty(2, 3, device="meta"), *args, **kwargs).shape == (3, 2)


def _keeps_rows(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> bool:
    """Whether the function acts on leading dimensions alone: then it can act on row ids, at 1/C of the size."""
    name, dim = _name(function), value.dim()
    if dim < 2 or kwargs:
        return False
    if name == "__getitem__":
        keys = args[0] if isinstance(args[0], tuple) else (args[0],)
        simple = all(k is None or isinstance(k, (int, slice)) for k in keys)
        return simple and sum(k is not None for k in keys) < dim
    if name in ("unsqueeze", "narrow"):
        return isinstance(args[0], int) and 0 <= args[0] < dim - (name == "narrow")
    return False
