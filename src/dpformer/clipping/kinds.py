"""The functions that are known to keep samples apart, and where samples lie in their inputs, given where they lie in the output.

`KINDS` has a rule for each function by the name of its node in the autograd graph (`guard.py` goes through the graph). Each is
true of rows of any kind (`Axis`): a function that keeps rows apart keeps samples apart, whichever sample a row belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dpformer.clipping.axis import MIXED, Axis, Shape

# An input's axis of samples; None where it is not known; `MIXED` where its gradient is a sum over samples.
Inner = Axis | None
Shapes = Sequence[Shape | None]
# From a node, the shape and axis of its output, and the shapes of its inputs to the axis of each input.
Kind = Callable[[Any, Shape, Axis, Shapes], list[Inner]]
_WHOLE = (torch.int64, torch.int32)


def _signed(dim: int, rank: int) -> int:
    """A dimension as autograd saves it, counted from the front: -1 is saved as 2**64 - 1."""
    dim = dim - 2**64 if dim >= 2**63 else dim
    return dim + rank if dim < 0 else dim


def _dims(node: Any, rank: int) -> set[int]:
    saved = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    saved = (saved,) if isinstance(saved, int) else saved
    return {_signed(dim, rank) for dim in saved} if saved else set(range(rank))


def elementwise(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    """Inputs of the output's shape, or broadcast to it."""
    dim = axis.place(out)

    def at(shape: Shape | None) -> Inner:
        if shape is None or shape == out:
            return axis
        return None if dim is None else axis.moved(out, dim, shape, dim + len(shape) - len(out))

    return [at(shape) for shape in given]


def reshape(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    """The same elements in the same order."""
    return [axis]


def _by_dim(to: Callable[[Any, int, Shape, Shape], int | None]) -> Kind:
    """A kind from a function (node, samples' dimension in the output, output's shape, input's shape) to that in the input."""

    def kind(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
        dim = axis.place(out)

        def at(shape: Shape | None) -> Inner:
            where = None if dim is None or shape is None else to(node, dim, out, shape)
            return None if where is None or dim is None or shape is None else axis.moved(out, dim, shape, where)

        return [at(shape) for shape in given]

    return kind


def _data_alone(kind: Kind) -> Kind:
    """The first input is data; weight and bias are shared by all samples, whatever their shapes."""
    return lambda node, out, axis, given: [kind(node, out, axis, given[:1])[0], *(MIXED for _ in given[1:])]


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


def _product(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    """`a @ b`, or something plus it: rows of the output are rows of a, columns are columns of b, the rest both have."""
    dim, rank = axis.place(out), len(out)
    *more, a, b = given
    axes = elementwise(node, out, axis, more)
    if dim is None:
        return [*axes, None, None]
    axes.append(MIXED if a is None or dim == rank - 1 else axis.moved(out, dim, a, dim))
    axes.append(MIXED if b is None or dim == rank - 2 else axis.moved(out, dim, b, dim))
    return axes


def _batch_norm(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    return [MIXED if node._saved_training else axis, *(MIXED for _ in given[1:])]


def _ids(node: Any, rank: int) -> dict[int, Any]:
    """The ids of a look-up by the dimension that they pick from."""
    if hasattr(node, "_saved_index"):
        return {_signed(node._saved_dim, rank): node._saved_index}
    return {k: ids for k, ids in enumerate(node._saved_indices) if ids is not None and ids.numel()}


def _indexed(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    """`x[ids, ...]`: fine along other dimensions; along the samples', what is picked for a sample is that sample's."""
    shape, dim = given[0], axis.place(out)
    picked = _ids(node, len(shape or ()))
    if shape is None or dim is None or not picked or any(v.dtype not in _WHOLE for v in picked.values()):
        return [None]
    rank, first = max(v.dim() for v in picked.values()), min(picked)
    at = first if max(picked) - first == len(picked) - 1 else 0  # where the picked dimensions go
    if not at <= dim < at + rank:
        others = [k for k in range(len(shape)) if k not in picked]
        return [axis.moved(out, dim, shape, others[dim if dim < at else dim - rank])]
    block, behind = tuple(out[at : at + rank]), math.prod(out[at + rank :])
    wanted = axis.owners[torch.arange(math.prod(block)).view(block) // (axis.inner // behind) % len(axis.owners)]
    ids, owners = picked[first].cpu().expand(block) % shape[first], torch.full((shape[first],), -1)
    owners[ids] = wanted
    if bool((owners[ids] != wanted).any()):
        return [None]  # a row of several samples
    return [Axis(math.prod(shape[first + 1 :]), owners)]


def _added(node: Any, out: Shape, axis: Axis, given: Shapes) -> list[Inner]:
    """`x.index_add(dim, ids, source)` and `x[ids] = source`: row k of the source belongs to the sample of row `ids[k]`."""
    source, dim, picked = given[1], axis.place(out), _ids(node, len(out))
    if source is None or dim is None or len(source) != len(out) or len(picked) != 1:
        return [axis, None]
    ((at, ids),) = picked.items()
    if ids.dtype not in _WHOLE or ids.dim() != 1 or source[at] != len(ids):
        return [axis, None]
    if dim != at:
        return [axis, axis.moved(out, dim, source, dim)]
    return [axis, Axis(math.prod(source[at + 1 :]), axis.owners_along(out, dim)[ids.cpu()])]


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
