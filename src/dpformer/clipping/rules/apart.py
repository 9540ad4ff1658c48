"""Functions without a formula of their own: the gradient of each sample by a vector-Jacobian product on that sample's part.

All that has to be known of a function is where the samples lie in its inputs, given where they lie in its output: `_ALIGN`. The
products of some samples are one call (`torch.func.vmap`).
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from dpformer.clipping.algebra import Lazy
from dpformer.clipping.axis import Layout
from dpformer.clipping.gradient import matrix_shape
from dpformer.clipping.recorder import Recorder
from dpformer.clipping.registry import named, register_rule
from dpformer.clipping.use import Forms
from dpformer.clipping.views import View
from dpformer.errors import ClippingError

Shape = Sequence[int]
# From an equation (einsum), the shapes of the tensors, the output's shape and the samples' dimension in it to their dimension in
# each of the tensors: None where it has none, -1 where that is not known.
Align = Callable[[Any, list[Shape], Shape, int], list[int | None]]


def lazily(view: View, compute: Callable[[slice], Tensor], size: int = 0) -> Lazy:
    """The form of gradients at a view, `[b, *view.value.shape]`, that are computed when they are wanted."""

    def at_parameter(samples: slice) -> Tensor:
        gradient = compute(samples).to(view.parameter.dtype)
        if view.is_whole:
            return gradient
        count = len(gradient)
        out = gradient.new_zeros(count, *matrix_shape(view.parameter.shape))
        view.from_gradient(gradient, count, gradient.new_zeros(count)).form_into(out, slice(0, count))
        return out

    return Lazy(at_parameter, max(size, view.value.numel(), view.parameter.numel()))


def _broadcast(equation: Any, given: list[Shape], out: Shape, dim: int) -> list[int | None]:
    """Each tensor is broadcast to the output's shape."""
    places = [dim + len(shape) - len(out) for shape in given]
    return [k if k >= 0 and shape[k] == out[dim] else None for k, shape in zip(places, given, strict=True)]


def _first(equation: Any, given: list[Shape], out: Shape, dim: int) -> list[int | None]:
    """A convolution or PReLU: the first tensor has samples first, as the output has; all others are parameters."""
    return [0 if dim == 0 and len(given[1]) in (1, len(given[0])) else -1, *(None for _ in given[1:])]


def product(equation: Any, given: list[Shape], out: Shape, dim: int) -> list[int | None]:
    """`a @ b`, perhaps added to something: rows of the output are rows of a, its columns are columns of b."""
    *more, a, b = given
    if len(a) < 2 or len(b) < 2:
        return [-1] * len(given)
    rows, columns = len(out) - 2, len(out) - 1
    left, right = (_broadcast(None, [shape], out, dim)[0] for shape in (a, b))
    if dim == rows:
        left, right = len(a) - 2, None
    elif dim == columns:
        left, right = None, len(b) - 1
    return [*_broadcast(None, more, out, dim), left, right]


def _bilinear(equation: Any, given: list[Shape], out: Shape, dim: int) -> list[int | None]:
    """`x1 W x2 + b`: x1 and x2 have the leading dimensions of the output."""
    return [dim, dim, *(None for _ in given[2:])] if dim < len(out) - 1 else [-1] * len(given)


def _einsum(equation: Any, given: list[Shape], out: Shape, dim: int) -> list[int | None]:
    """By letter."""
    equation = equation.replace(" ", "") if isinstance(equation, str) else "..."
    if "..." in equation or "->" not in equation:
        return [-1] * len(given)
    inputs, result = equation.split("->")
    return [k if (k := letters.find(result[dim])) >= 0 else None for letters in inputs.split(",")]


_ALIGN: dict[Align, str] = {
    _broadcast: """
        div __truediv__ true_divide pow __pow__ __rpow__ where maximum minimum max min lerp addcmul addcdiv masked_fill
        atan2 clamp clamp_min clamp_max hypot logaddexp fmod
    """,
    _first: "prelu conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    product: "bmm baddbmm",
    _bilinear: "bilinear",
    _einsum: "einsum",
}


def apart(recorder: Recorder, function: Any, align: Align, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Record a use whose gradients are computed sample by sample. Of the tensors among the arguments, `align` says the rest."""
    values, form = tree_flatten((args, kwargs))
    places = [k for k, value in enumerate(values) if isinstance(value, Tensor)]
    views = {k: view for k in places if (view := recorder.view(values[k])) is not None}
    given = [recorder.value(values[k]) for k in places]

    def compute(tensors: Sequence[Tensor]) -> Tensor:
        filled = list(values)
        for k, tensor in zip(places, tensors, strict=True):
            filled[k] = tensor
        own, named = tree_unflatten(filled, form)
        return function(*own, **named)

    values = [None if isinstance(value, Tensor) else value for value in values]
    output = compute(given)
    if not isinstance(output, Tensor):
        raise recorder.refuse(function, next(iter(views.values())), "has several results")
    shape, equation = output.shape, args[0] if isinstance(args[0], str) else None

    def derive(gradient: Tensor, samples: Layout, *given: Tensor) -> Forms:
        batch = samples.batch
        dims: list[int | None] = [None] * len(given)
        if batch > 1:
            dims = align(equation, [tensor.shape for tensor in given], shape, samples.dim)
        for dim, tensor in zip(dims, given, strict=True):
            if samples.owners is not None or dim == -1 or (dim is not None and tensor.shape[dim] != shape[samples.dim]):
                name = next(iter(views.values())).name
                raise ClippingError(
                    f"{function.__name__} uses parameter {name!r}, and where its samples lie is not clear: move them to the "
                    "first dimension"
                )
        g = samples.apart(gradient, samples.dim)
        parts = [tensor if dim is None else samples.apart(tensor, dim) for dim, tensor in zip(dims, given, strict=True)]
        size = sum(t.numel() // batch for dim, t in zip(dims, given, strict=True) if dim is not None)
        in_dims = (0, *(None if dim is None else 0 for dim in dims))

        def one(mine: int, g: Tensor, *own: Tensor) -> Tensor:
            at = lambda value: compute([*own[:mine], value, *own[mine + 1 :]])  # noqa: E731
            return torch.func.vjp(at, own[mine])[1](g)[0]

        def several(mine: int, part: slice) -> Tensor:
            inputs = [t if dim is None else t[part] for dim, t in zip(dims, parts, strict=True)]
            found, own = torch.func.vmap(partial(one, mine), in_dims)(g[part], *inputs), dims[mine]
            return found if own is None else samples.scattered(found, part, given[mine], own)

        for k, view in views.items():
            yield view, lazily(view, partial(several, places.index(k)), size + view.value.numel())

    return recorder.record(function, output, list(views.values()), derive, [t.detach() for t in given], raw=True)


def _register(align: Align, functions: list[Any]) -> None:
    @register_rule(*functions, lazy=align is _broadcast)
    def rule(recorder: Recorder, function: Any, *args: Any, **kwargs: Any) -> Tensor:
        return apart(recorder, function, align, args, kwargs)


for _align, _names in _ALIGN.items():
    _register(_align, named(_names))
