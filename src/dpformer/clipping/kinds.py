"""The functions that are known to keep samples apart, and where samples lie in their inputs, given where they lie in the output.

Samples lie along one axis of a tensor. In row-major order `inner` is the number of elements behind that axis: the element at flat
position n belongs to sample `(n // inner) % B`. A reshape keeps `inner`, a transpose moves the axis. Where tokens are
picked by ids (experts), the axis has K rows in any order, and `Rows` has the sample that row `(n // inner) % K` belongs to.
`KINDS` has a rule for each function by the name of its node in the autograd graph (`walk.py` goes through the graph).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = Sequence[int]


@dataclass(frozen=True, eq=False)
class Rows:
    """The sample that each row of an axis belongs to, `[K]`; -1 for a row that no gradient comes to."""

    inner: int
    owners: Tensor


# `inner` of a tensor; None where it is not known; MIXED where the gradient is a sum over samples.
Inner = int | Rows | None
MIXED = 0
# From a node, the shape and `inner` of its output, and the shapes of its inputs to `inner` of each input.
Kind = Callable[[Any, Shape, int, Sequence[Shape | None], int], list[Inner]]


def place(shape: Shape, inner: int, batch: int) -> int | None:
    """The dimension that the samples' axis lies in; None if it lies across two.

    >>> place((5, 4, 3), 3, 4), place((20, 3), 3, 4), place((20, 3), 15, 4), place((2, 2, 3), 3, 4)
    (1, 0, 0, None)
    """
    behind = 1
    for dim in range(len(shape) - 1, -1, -1):
        size = behind * shape[dim]
        if size >= inner * batch:
            return dim if inner % behind == 0 and size % (inner * batch) == 0 else None
        behind = size
    return None


def place_of(shape: Shape, inner: int | Rows, batch: int) -> int | None:
    """The same for any kind of axis."""
    return place(shape, inner, batch) if isinstance(inner, int) else place(shape, inner.inner, len(inner.owners))


def _moved(inner: int, out: Shape, dim: int, given: Shape, to: int) -> Inner:
    """`inner` in a tensor of shape `given` whose dimension `to` is the output's dimension `dim`."""
    if not 0 <= to < len(given) or given[to] != out[dim]:
        return MIXED if not 0 <= to < len(given) or given[to] == 1 else None
    return inner // math.prod(out[dim + 1 :]) * math.prod(given[to + 1 :])


def _moved_axis(inner: int | Rows, out: Shape, dim: int, given: Shape, to: int) -> Inner:
    if isinstance(inner, int):
        return _moved(inner, out, dim, given, to)
    moved = _moved(inner.inner, out, dim, given, to)
    return Rows(moved, inner.owners) if isinstance(moved, int) and moved != MIXED else moved


def _signed(dim: int, rank: int) -> int:
    """A dimension as autograd saves it, counted from the front: -1 is saved as 2**64 - 1."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim + rank if dim < 0 else dim


def _dims(node: Any, rank: int) -> set[int]:
    saved = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    saved = (saved,) if isinstance(saved, int) else saved
    return {_signed(dim, rank) for dim in saved} if saved else set(range(rank))


def elementwise(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """Inputs of the output's shape, or broadcast to it."""
    inners: list[Inner] = []
    for shape in given:
        if shape is None or shape == out:
            inners.append(inner)
        elif (dim := place(out, inner, batch)) is None:
            inners.append(None)
        else:
            inners.append(_moved(inner, out, dim, shape, dim + len(shape) - len(out)))
    return inners


def reshape(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """The same elements in the same order."""
    return [inner]


def _by_dim(to: Callable[[Any, int, Shape, Shape], int | None]) -> Kind:
    """A kind from a function (node, samples' dimension in the output, output's shape, input's shape) to that in the input."""

    def kind(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
        dim = place(out, inner, batch)
        inners: list[Inner] = []
        for shape in given:
            where = None if dim is None or shape is None else to(node, dim, out, shape)
            inners.append(
                None if where is None or dim is None or shape is None else _moved(inner, out, dim, shape, where)
            )
        return inners

    return kind


def _data_alone(kind: Kind) -> Kind:
    """The first input is data; weight and bias are shared by all samples, whatever their shapes."""

    def first(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
        return [kind(node, out, inner, given[:1], batch)[0], *(MIXED for _ in given[1:])]

    return first


def _permuted(node: Any, dim: int, out: Shape, given: Shape) -> int:
    if hasattr(node, "_saved_dims"):
        return _signed(node._saved_dims[dim], len(out))
    a, b = (_signed(getattr(node, name, k), len(out)) for k, name in enumerate(("_saved_dim0", "_saved_dim1")))
    return {a: b, b: a}.get(dim, dim)


def _along(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    """Acts along some dimensions, and on all others alike."""
    whole = tuple(out) == tuple(given) and "Slice" in node.name()
    return dim if whole or dim not in _dims(node, len(out)) else None


def _reduced(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    dims = _dims(node, len(given))
    return dim if getattr(node, "_saved_keepdim", False) else [k for k in range(len(given)) if k not in dims][dim]


def _classes(node: Any, dim: int, out: Shape, given: Shape) -> int:
    return dim + (dim > 0)  # [N, classes, ...] to [N, ...]


def _selected(node: Any, dim: int, out: Shape, given: Shape) -> int:
    return dim + (dim >= _signed(node._saved_dim, len(given)))


def _stacked(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    at = _signed(node._saved_dim, len(out))
    return None if dim == at else dim - (dim > at)


def _normalised(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    return dim if dim < len(out) - len(node._saved_normalized_shape) else None


def _padded(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    return None if any(node._saved_pad[2 * (len(out) - 1 - dim) :][:2]) else dim


def _last_two(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    return dim if dim < len(out) - 2 else None


def _first(node: Any, dim: int, out: Shape, given: Shape) -> int | None:
    """Acts on each element of the first dimension alone."""
    return 0 if dim == 0 else None


def _product(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """`a @ b`, or something plus it: rows of the output are rows of a, columns are columns of b, the rest both have."""
    dim = place(out, inner, batch)
    *more, a, b = given
    inners = elementwise(node, out, inner, more, batch)
    if dim is None:
        return [*inners, None, None]
    rows, columns = len(out) - 2, len(out) - 1
    inners.append(MIXED if a is None or dim == columns else _moved(inner, out, dim, a, dim))
    inners.append(MIXED if b is None or dim == rows else _moved(inner, out, dim, b, dim))
    return inners


def _batch_norm(node: Any, out: Shape, inner: int, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    return [MIXED if node._saved_training else inner, *(MIXED for _ in given[1:])]


def back(node: Any, out: Shape, inner: int | Rows, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """`inner` of the inputs of a function from that of one of its outputs; None for all if the function is not known."""
    kind = kind_of(node)
    if kind is None:
        return [None] * len(given)
    if isinstance(inner, int) or kind in (_indexed, _added):
        return kind(node, out, inner, given, batch)  # type: ignore[arg-type]
    # A function that keeps K rows apart keeps samples apart, whichever sample a row belongs to.
    found = kind(node, out, inner.inner, given, len(inner.owners))
    return [Rows(k, inner.owners) if isinstance(k, int) and k != MIXED else k for k in found]


def owners_along(shape: Shape, dim: int, inner: int | Rows, batch: int) -> Tensor | None:
    """The sample of each place along the dimension that the samples' axis lies in; None if places have several."""
    if isinstance(inner, Rows):
        return inner.owners if len(inner.owners) == shape[dim] else None
    return torch.arange(shape[dim]) // (inner // math.prod(shape[dim + 1 :])) % batch


def join(a: Inner, b: Inner, shape: Shape, batch: int) -> Inner:
    """`inner` of a tensor that gradients come to by two ways; None if they disagree."""
    if not isinstance(a, Rows) and not isinstance(b, Rows):
        return a if a == b else None
    if not a or not b:
        return None
    first, second = (_rows(x, shape, batch) for x in (a, b))
    if first is None or second is None or first.inner != second.inner or len(first.owners) != len(second.owners):
        return None
    known = (first.owners >= 0) & (second.owners >= 0)
    if bool((first.owners != second.owners)[known].any()):
        return None
    return Rows(first.inner, torch.maximum(first.owners, second.owners))


def _rows(inner: int | Rows, shape: Shape, batch: int) -> Rows | None:
    if isinstance(inner, Rows):
        return inner
    dim = place(shape, inner, batch)
    owners = None if dim is None else owners_along(shape, dim, inner, batch)
    return None if owners is None or dim is None else Rows(math.prod(shape[dim + 1 :]), owners)


def regular(inner: Inner, batch: int) -> Inner:
    """`inner` as a number, if the samples follow each other, with equal numbers of rows."""
    if isinstance(inner, Rows) and len(inner.owners) % batch == 0:
        each = len(inner.owners) // batch
        wanted = torch.arange(len(inner.owners)) // each
        if bool(((inner.owners == wanted) | (inner.owners < 0)).all()):
            return each * inner.inner
    return inner


def _indexed(node: Any, out: Shape, inner: int | Rows, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """Picks by ids: fine along other dimensions; along the samples', the ids say whose rows they are."""
    shape = given[0]
    dim = place_of(out, inner, batch)
    if hasattr(node, "_saved_index"):
        picked = {_signed(node._saved_dim, len(shape or ())): node._saved_index}
    else:
        picked = dict(enumerate(node._saved_indices))
    picked = {k: v for k, v in picked.items() if v is not None and v.numel()}
    whole = all(v.dtype in (torch.int64, torch.int32) for v in picked.values())
    if shape is None or dim is None or not picked or not whole:
        return [None]
    rank = max(v.dim() for v in picked.values())
    at = min(picked) if max(picked) - min(picked) == len(picked) - 1 else 0  # where the picked dimensions go
    if not at <= dim < at + rank:
        others = [k for k in range(len(shape)) if k not in picked]
        return [_moved_axis(inner, out, dim, shape, others[dim if dim < at else dim - rank])]
    first, block = min(picked), tuple(out[at : at + rank])
    if isinstance(inner, Rows):
        if rank > 1 or len(inner.owners) != block[0]:
            return [None]
        want = inner.owners
    else:
        want = torch.arange(math.prod(block)).view(block) // (inner // math.prod(out[at + rank :])) % batch
    ids = picked[first].cpu().expand(block) % shape[first]
    owners = torch.full((shape[first],), -1)
    owners[ids] = want
    if bool((owners[ids] != want).any()):
        return [None]  # a row of several samples
    return [Rows(math.prod(shape[first + 1 :]), owners)]


def _added(node: Any, out: Shape, inner: int | Rows, given: Sequence[Shape | None], batch: int) -> list[Inner]:
    """`x.index_add(dim, ids, source)` and `x[ids] = source`: row k of the source belongs to the sample of row `ids[k]`."""
    dim = place_of(out, inner, batch)
    source = given[1]
    if hasattr(node, "_saved_index"):
        at, ids = _signed(node._saved_dim, len(out)), node._saved_index
    else:
        at, ids = 0, node._saved_indices[0] if len(node._saved_indices) == 1 else None
    owners = None if dim is None else owners_along(out, dim, inner, batch)
    if (
        source is None
        or dim is None
        or len(source) != len(out)
        or ids is None
        or ids.dtype is torch.bool
        or ids.dim() != 1
    ):
        return [inner, None]
    if dim != at:
        return [inner, _moved_axis(inner, out, dim, source, dim)]
    if owners is None or source[at] != len(ids):
        return [inner, None]
    return [inner, Rows(math.prod(source[at + 1 :]), owners[ids.cpu()])]


_NAMES: dict[Kind, str] = {
    elementwise: """
        Add Sub Rsub Mul Div Neg Exp Exp2 Expm1 Log Log2 Log10 Log1P Tanh Sigmoid LogSigmoid Relu Relu6 Gelu
        Silu Mish Softplus Elu Selu Celu LeakyRelu Hardtanh Hardsigmoid Hardswish Hardshrink Softshrink
        Threshold Pow Sqrt Rsqrt Reciprocal Square Sin Cos Tan Sinh Cosh Asin Acos Atan Atan2 Erf Erfc Abs Sgn
        Sign Clamp ClampMin ClampMax Where MaskedFill Clone ToCopy Alias Maximum Minimum Addcmul Addcdiv Lerp
        NativeDropout NanToNum BinaryCrossEntropyWithLogits BinaryCrossEntropy MseLoss SmoothL1Loss HuberLoss
        KlDiv Expand Xlogy Lgamma Round Fmod
    """,
    reshape: "View UnsafeView ReshapeAlias Unsqueeze Squeeze",
    _by_dim(_permuted): "Transpose Permute T",
    _by_dim(_along): """
        Softmax LogSoftmax Cumsum Cumprod Logcumsumexp Slice Split SplitWithSizes Cat Flip Roll Gather Sort
        Topk Scatter ScatterAdd Glu
    """,
    _by_dim(_reduced): "Sum Mean Var Std VarMean StdMean Amax Amin Logsumexp LinalgVectorNorm Norm Prod Max Min",
    _by_dim(_classes): "NllLoss NllLoss2D",
    _by_dim(_selected): "Select Unbind",
    _by_dim(_stacked): "Stack",
    _data_alone(_by_dim(_normalised)): "NativeLayerNorm FusedRmsNorm",
    _data_alone(_by_dim(_first)): "Convolution MkldnnConvolution NativeGroupNorm GroupedMm",
    _by_dim(_padded): "ConstantPadNd",
    _by_dim(_last_two): "Tril Triu",
    _by_dim(_first): """
        ScaledDotProductFlashAttentionForCpu
        ScaledDotProductFlashAttention ScaledDotProductEfficientAttention ScaledDotProductCudnnAttention
        MaxPool2DWithIndices MaxPool3DWithIndices AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D
        AdaptiveMaxPool2D UpsampleNearest1D UpsampleNearest2D UpsampleLinear1D UpsampleBilinear2D
        UpsampleBicubic2D Im2Col Col2Im ReflectionPad1D ReflectionPad2D ReplicationPad1D ReplicationPad2D
        PixelShuffle GridSampler2D
    """,
    _product: "Mm Bmm Addmm Baddbmm",
    _batch_norm: "NativeBatchNorm CudnnBatchNorm",
    _indexed: "Index IndexSelect",
    _added: "IndexAdd IndexPut",
}
KINDS: dict[str, Kind] = {f"{name}Backward": kind for kind, names in _NAMES.items() for name in names.split()}
_FIRST = KINDS["GridSampler2DBackward"]


def kind_of(node: Any) -> Kind | None:
    """What is known of a function. A custom `autograd.Function` is trusted if it says `samples_first = True`."""
    name = node.name()
    custom = getattr(node, "_forward_cls", None)
    if custom is not None:
        return _FIRST if getattr(custom, "samples_first", False) else None
    return KINDS.get(name.rstrip("0123456789"))
