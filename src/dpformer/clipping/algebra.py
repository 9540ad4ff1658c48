"""Per-sample gradients of a parameter as the factors they are made of, and the inner product of every pair.

A parameter is seen as a matrix `R x C` (last dimension `C`, all others `R`; a vector is `R x 1`). What one use of it adds to
the gradient of sample `i` is one of four forms:

    Outer   G_i = sum_t rows[i,t] (x) cols[i,t]               linear maps: rows = output gradient, cols = input
    Sparse  G_i = sum_t onehot(index[i,t]) (x) values[i,t]    embeddings, positions
    Dense   G_i itself                                        biases and scales: small, already summed over time
    Lazy    G_i, computed for a few samples at a time         everything else: convolutions, functions of parameters

The gradient is the sum over all uses, so its squared norm has a term for every *pair* of uses. Without the pairs of different
uses (an embedding that is also the output layer, say) the norm is too small, and the clipped gradient above the bound.
`inner` has one formula per pair of forms.
"""

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.sums import add_to_rows, add_weighted_rows, lengths, norms_of_pieces, sizes, tiny
from dpformer.errors import ClippingError


class Form:
    """What a use adds to the gradients G_i of a parameter."""

    def bound(self) -> Tensor:
        """The sum of the norms of all terms, `[B]`, or slightly more: see `Clip`."""
        raise NotImplementedError

    def form_into(self, out: Tensor, samples: Any, transposed: bool = False) -> None:
        """Add G_i of `samples` to `out` `[b, R, C]`, or to `[b, C, R]`."""
        raise NotImplementedError

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `out` `[R, C]`."""
        raise NotImplementedError

    def drop(self, samples: Tensor) -> None:
        """Make G_i zero for the marked samples (`[B]`, bool), whatever it was."""
        raise NotImplementedError


@dataclass
class Outer(Form):
    """`G_i = sum_t rows[i,t] (x) cols[i,t]`; rows `[B, T, R]`, cols `[B, T, C]`; sizes: their norms `[B, T]`, if computed."""

    rows: Tensor
    cols: Tensor
    sizes: tuple[Tensor, Tensor] | None = None

    def bound(self) -> Tensor:
        # The product of two norms over all times would grow with padding: a clip factor would depend on the longest sample.
        rows, cols = self.sizes or (sizes(self.rows), sizes(self.cols))
        return (rows.double() * cols).sum(1)

    def hidden(self) -> Tensor:
        """The size, `[B]`, of the terms whose inner products are too small for their type, though the terms may not be."""
        r, c, least = lengths(self.rows), lengths(self.cols), tiny(self.rows)
        return torch.where((r.square() < least) | (c.square() < least), r * c, 0.0).sum(1)

    def form_into(self, out: Tensor, samples: Any, transposed: bool = False) -> None:
        rows, cols = (self.cols, self.rows) if transposed else (self.rows, self.cols)
        out.baddbmm_(rows[samples].transpose(1, 2), cols[samples])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        # Scale the narrower factor: it is the cheaper one to copy.
        rows, cols = self.rows, self.cols
        if rows.shape[-1] < cols.shape[-1]:
            rows = rows * weights[:, None, None]
        else:
            cols = cols * weights[:, None, None]
        out.addmm_(rows.flatten(0, 1).T, cols.flatten(0, 1))

    def drop(self, samples: Tensor) -> None:
        self.rows = self.rows.masked_fill(samples[:, None, None], 0)
        self.cols = self.cols.masked_fill(samples[:, None, None], 0)


@dataclass
class Sparse(Form):
    """`G_i = sum_t onehot(index[i,t]) (x) values[i,t]`; index `[B, T]`, values `[B, T, C]`.

    summed: (sample, row, values), each `[K, ...]`: equal rows of a sample added up, by `squared_norms`.
    """

    index: Tensor
    values: Tensor
    summed: tuple[Tensor, Tensor, Tensor] | None = None

    def bound(self) -> Tensor:
        return sizes(self.values).sum(1, dtype=torch.float64)

    def squared_norms(self, R: int) -> Tensor:
        """`|G_i|^2` `[B]`: equal rows of a sample are added first, in `T log T`, where comparing all pairs would take `T^2`.

        `add_weighted` uses the same added rows, so that norm and sum round alike. Gradients 1 and 2 at one item give 9, not 5:

        >>> Sparse(torch.tensor([[7, 7, 3]]), torch.tensor([[[1.0], [2.0], [5.0]]])).squared_norms(R=10)
        tensor([34.], dtype=torch.float64)
        """
        B, T, C = self.values.shape
        sample = torch.arange(B, device=self.index.device)[:, None]
        if B > 1 and self.index.stride(0) == 0 and len(self.index[0].unique()) == T:
            # The same rows for all samples, each once (positions): nothing to add up.
            self.summed = sample.expand_as(self.index).flatten(), self.index.flatten(), self.values.flatten(0, 1)
        else:
            keys, place = torch.unique(self.index + sample * R, return_inverse=True)
            sums = self.values.new_zeros(len(keys), C).index_add_(0, place.flatten(), self.values.flatten(0, 1))
            self.summed = keys // R, keys % R, sums
        sample, _, sums = self.summed
        squares = torch.linalg.vector_norm(sums, dim=-1).double().square()
        return squares.new_zeros(B).index_add_(0, sample, squares)

    def form_into(self, out: Tensor, samples: Any, transposed: bool = False) -> None:
        index, values = self.index[samples], self.values[samples]
        if transposed:
            values = values.transpose(1, 2)
            out.scatter_add_(2, index[:, None].expand_as(values), values)
            return
        b, R, C = out.shape
        offsets = torch.arange(b, device=index.device)[:, None] * R
        out.view(b * R, C).index_add_(0, (index + offsets).flatten(), values.flatten(0, 1))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        if self.summed is None:
            add_to_rows(out, self.index.flatten(), (self.values * weights[:, None, None]).flatten(0, 1))
        else:
            sample, row, values = self.summed
            add_to_rows(out, row, values * weights[sample, None])

    def drop(self, samples: Tensor) -> None:
        self.values = self.values.masked_fill(samples[:, None, None], 0)
        if self.summed is not None:
            sample, row, values = self.summed
            self.summed = sample, row, values.masked_fill(samples[sample, None], 0)


@dataclass
class Dense(Form):
    """`G_i = gradient[i]`, `[B, R, C]`. `bound_` `[B]` is that of the terms it was summed from.

    norms `[B, pieces]`: those of its pieces, if they are measured already.
    """

    gradient: Tensor
    bound_: Tensor
    norms: Tensor | None = None

    def __post_init__(self) -> None:
        # A dimension too many would broadcast, and mix samples.
        if self.gradient.dim() != 3 or self.bound_.shape != self.gradient.shape[:1]:
            shapes = f"{self.gradient.shape} and {self.bound_.shape}"
            raise ClippingError(f"a dense form needs [B, R, C] and [B], not {shapes}")

    def bound(self) -> Tensor:
        return self.bound_

    def squared_norms(self) -> Tensor:
        """`|G_i|^2` `[B]`, float64."""
        norms = norms_of_pieces(self.gradient) if self.norms is None else self.norms
        return norms.double().square().sum(1)

    def form_into(self, out: Tensor, samples: Any, transposed: bool = False) -> None:
        own = self.gradient[samples]
        out.add_(own.transpose(1, 2) if transposed else own)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        add_weighted_rows(out.view(-1), self.gradient.flatten(1), weights)

    def drop(self, samples: Tensor) -> None:
        self.gradient = self.gradient.masked_fill(samples[:, None, None], 0)


@dataclass
class Lazy(Form):
    """`G_i = compute(samples)[i]`, `[b, R, C]`, computed whenever it is wanted; it is measured and added as it was computed.

    size: numbers that one sample takes while it is computed.
    """

    compute: Callable[[slice], Tensor]
    size: int
    dropped: Tensor | None = None

    def form_into(self, out: Tensor, samples: Any, transposed: bool = False) -> None:
        gradient = self.compute(samples).reshape(out.shape)
        if self.dropped is not None:
            gradient = gradient.masked_fill(self.dropped[samples, None, None], 0)
        out.add_(gradient)

    def drop(self, samples: Tensor) -> None:
        self.dropped = samples if self.dropped is None else self.dropped | samples


def inner(a: Form, b: Form) -> Tensor:
    """`<G_i^a, G_i^b>` for every sample, `[B]`, summed in float64.

    Outer, Outer:    sum_{t,u} <rows_t, rows'_u> <cols_t, cols'_u>
    Outer, Sparse:   sum_{t,u} rows_t[index_u] <cols_t, values_u>
    Outer, Dense:    sum_t rows_t' D cols_t
    Sparse, Sparse:  sum_{t,u} [index_t = index'_u] <values_t, values'_u>
    Sparse, Dense:   sum_t <D[index_t], values_t>
    """
    match a, b:
        case Outer(), Outer():
            return _sum((a.rows @ b.rows.transpose(1, 2)) * (a.cols @ b.cols.transpose(1, 2)))
        case Outer(), Sparse():
            picked = a.rows.gather(2, b.index[:, None, :].expand(-1, a.rows.shape[1], -1))
            return _sum(picked * (a.cols @ b.values.transpose(1, 2)))
        case Outer(), Dense():
            return _sum((a.rows @ b.gradient) * a.cols)
        case Sparse(), Sparse():
            same = a.index[:, :, None] == b.index[:, None, :]
            return _sum((a.values @ b.values.transpose(1, 2)) * same)
        case Sparse(), Dense():
            picked = b.gradient.gather(1, a.index[:, :, None].expand(-1, -1, a.values.shape[-1]))
            return _sum(picked * a.values)
        case Dense(), Dense():
            return _sum(a.gradient * b.gradient)
        case _:
            return inner(b, a)


def merge(forms: list[Form]) -> list[Form]:
    """At most one form of each kind but `Lazy`, with the same sum: uses are concatenated along time, dense gradients added.

    So a recurrent weight, used at each of `T` steps, is one linear use of `T` times.
    """
    outers = [f for f in forms if isinstance(f, Outer)]
    sparses = [f for f in forms if isinstance(f, Sparse)]
    denses = [f for f in forms if isinstance(f, Dense)]
    if len(outers) > 1:
        outers = [Outer(_cat(f.rows for f in outers), _cat(f.cols for f in outers))]
    if len(sparses) > 1:
        sparses = [Sparse(_cat(f.index for f in sparses), _cat(f.values for f in sparses))]
    if len(denses) > 1:
        denses = [functools.reduce(lambda a, b: Dense(a.gradient + b.gradient, a.bound_ + b.bound_), denses)]
    return [*outers, *sparses, *denses, *(f for f in forms if isinstance(f, Lazy))]


def _cat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(tensors), dim=1)


def _sum(x: Tensor) -> Tensor:
    """Sum over all dimensions but the first, accumulated in float64: terms of both signs may cancel."""
    return x.sum(dim=tuple(range(1, x.dim())), dtype=torch.float64)
