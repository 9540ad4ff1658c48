"""The gradient of one parameter for every sample of a batch, kept as the factors it is made of.

A parameter is looked at as a matrix of `R x C` (last dimension `C`, all others `R`; a vector is `R x 1`). What a use of
it adds to the gradient of sample `i` is one of three forms:

    Outer   G_i = sum_t rows[i,t] (x) cols[i,t]               linear maps: rows = output gradient, cols = input
    Sparse  G_i = sum_t onehot(index[i,t]) (x) values[i,t]    embeddings, positions
    Dense   G_i itself                                        biases and scales: small, already summed over time

The gradient is the sum over all uses, so its squared norm has a term for every *pair* of uses. Leaving out the pairs of
different uses (an embedding that is also the output head, say) gives a norm that is too small, and so a bound that is
no bound. `inner` has one formula per pair of forms.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.errors import ClippingError

# Numbers whose squares are added up in their own type, at most.
SQUARES = 1024
# Samples, or tiles of them, whose gradients are added up in their own type, at most; longer sums are made of blocks, in float64.
BLOCK = 64


@dataclass
class Outer:
    """`G_i = sum_t rows[i,t] (x) cols[i,t]`; rows `[B, T, R]`, cols `[B, T, C]`; sizes: their norms `[B, T]`, if known."""

    rows: Tensor
    cols: Tensor
    sizes: tuple[Tensor, Tensor] | None = None

    def bound(self) -> Tensor:
        """`sum_t |rows_t| |cols_t|` `[B]`, the sizes of all terms. Padding adds nothing: its rows are 0.

        A product of two norms over all times would do as a bound, and would not do here: it grows with the padding, so a sample's
        factor would depend on the longest sample beside it.
        """
        rows, cols = self.factors()
        return (rows.double() * cols).sum(1)

    def factors(self) -> tuple[Tensor, Tensor]:
        """The sizes of each sample's rows and cols, `[B, T]` each."""
        return self.sizes or (sizes(self.rows), sizes(self.cols))

    def hidden(self) -> Tensor:
        """The size, `[B]`, of the terms whose inner products are too small for their type, though the terms may not be."""
        r, c, tiny = lengths(self.rows), lengths(self.cols), _tiny(self.rows)
        return torch.where((r.square() < tiny) | (c.square() < tiny), r * c, 0.0).sum(1)

    def form(self, out: Tensor, samples: slice = slice(None)) -> None:
        """Write the gradients of `samples` to `out` `[b, R, C]`."""
        torch.bmm(self.rows[samples].transpose(1, 2), self.cols[samples], out=out)

    def form_into(self, out: Tensor, samples: slice) -> None:
        """Add the gradients of `samples` to `out` `[b, R, C]`."""
        out.baddbmm_(self.rows[samples].transpose(1, 2), self.cols[samples])

    def form_transposed_into(self, out: Tensor, samples: Tensor | slice) -> None:
        """Add the gradients of `samples` to `out` `[b, C, R]`."""
        out.baddbmm_(self.cols[samples].transpose(1, 2), self.rows[samples])

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `out` `[R, C]`."""
        # Scale the narrower factor: it is the cheaper one to copy.
        rows, cols = self.rows, self.cols
        if rows.shape[-1] < cols.shape[-1]:
            rows = rows * weights[:, None, None]
        else:
            cols = cols * weights[:, None, None]
        out.addmm_(rows.flatten(0, 1).T, cols.flatten(0, 1))

    def forget(self, samples: Tensor) -> None:
        """Make the gradient of the marked samples (`[B]`, bool) zero, whatever it was."""
        self.rows = self.rows.masked_fill(samples[:, None, None], 0)
        self.cols = self.cols.masked_fill(samples[:, None, None], 0)


@dataclass
class Sparse:
    """`G_i = sum_t onehot(index[i,t]) (x) values[i,t]`; index `[B, T]`, values `[B, T, C]`."""

    index: Tensor
    values: Tensor

    def bound(self) -> Tensor:
        """`sum_t |values_t|` `[B]`, or a little more."""
        return sizes(self.values).sum(1, dtype=torch.float64)

    def form_into(self, out: Tensor, samples: slice) -> None:
        """Add the gradients of `samples` to `out` `[b, R, C]`."""
        index, values = self.index[samples], self.values[samples]
        b, R, C = out.shape
        offsets = torch.arange(b, device=index.device)[:, None] * R
        out.view(b * R, C).index_add_(0, (index + offsets).flatten(), values.flatten(0, 1))

    def form_transposed_into(self, out: Tensor, samples: Tensor | slice) -> None:
        """Add the gradients of `samples` to `out` `[b, C, R]`."""
        index, values = self.index[samples], self.values[samples].transpose(1, 2)
        out.scatter_add_(2, index[:, None].expand_as(values), values)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `out` `[R, C]`."""
        add_to_rows(out, self.index.flatten(), (self.values * weights[:, None, None]).flatten(0, 1))

    def forget(self, samples: Tensor) -> None:
        """Make the gradient of the marked samples (`[B]`, bool) zero, whatever it was."""
        self.values = self.values.masked_fill(samples[:, None, None], 0)


@dataclass
class Dense:
    """`G_i = gradient[i]`, `[B, R, C]`. `bound_` `[B]` is that of the terms it was summed from."""

    gradient: Tensor
    bound_: Tensor

    def __post_init__(self) -> None:
        # A dimension too many would broadcast, and mix samples.
        if self.gradient.dim() != 3 or self.bound_.shape != self.gradient.shape[:1]:
            raise ClippingError(
                f"a dense form needs [B, R, C] and [B], not {self.gradient.shape} and {self.bound_.shape}"
            )

    def bound(self) -> Tensor:
        """The bound on the norm of what was summed, `[B]`."""
        return self.bound_

    def form_into(self, out: Tensor, samples: slice) -> None:
        """Add the gradients of `samples` to `out` `[b, R, C]`."""
        out.add_(self.gradient[samples])

    def form_transposed_into(self, out: Tensor, samples: Tensor | slice) -> None:
        """Add the gradients of `samples` to `out` `[b, C, R]`."""
        out.add_(self.gradient[samples].transpose(1, 2))

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `out` `[R, C]`."""
        add_weighted_rows(out.view(-1), self.gradient.flatten(1), weights)

    def forget(self, samples: Tensor) -> None:
        """Make the gradient of the marked samples (`[B]`, bool) zero, whatever it was."""
        self.gradient = self.gradient.masked_fill(samples[:, None, None], 0)


Form = Outer | Sparse | Dense


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


@dataclass
class Summed:
    """A sparse form with equal rows of a sample added up: `G[sample[k], row[k]] = values[k]`; values `[K, C]`.

    Its norm and its weighted sum come from the same added rows, so the order of that addition cannot set them apart: with one
    item thousands of times in a sequence, float32 would.
    """

    sample: Tensor
    row: Tensor
    values: Tensor
    batch: int

    def squared_norms(self) -> Tensor:
        """`|G_i|^2`, `[B]`."""
        squares = torch.linalg.vector_norm(self.values, dim=-1).double().square()
        return squares.new_zeros(self.batch).index_add_(0, self.sample, squares)

    def add_weighted(self, weights: Tensor, out: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `out` `[R, C]`."""
        add_to_rows(out, self.row, self.values * weights[self.sample, None])

    def forget(self, samples: Tensor) -> None:
        """Make the gradient of the marked samples (`[B]`, bool) zero, whatever it was."""
        self.values = self.values.masked_fill(samples[self.sample, None], 0)


def add_up(form: Sparse, R: int) -> Summed:
    """A sparse form with equal rows added, in `T log T` where comparing all pairs would take `T^2`.

    Two events of one item, with gradients 1 and 2 in one dimension, give 9 and not 1 + 4:

    >>> form = Sparse(torch.tensor([[7, 7, 3]]), torch.tensor([[[1.0], [2.0], [5.0]]]))
    >>> add_up(form, R=10).squared_norms()
    tensor([34.], dtype=torch.float64)
    """
    sample = torch.arange(len(form.index), device=form.index.device)[:, None]
    if len(form.index) > 1 and form.index.stride(0) == 0 and len(form.index[0].unique()) == form.index.shape[1]:
        # The same rows for all samples, each once (positions): nothing to add up.
        return Summed(
            sample.expand_as(form.index).flatten(), form.index.flatten(), form.values.flatten(0, 1), len(form.index)
        )
    keys, place = torch.unique(form.index + sample * R, return_inverse=True)
    values = form.values.new_zeros(len(keys), form.values.shape[-1])
    values.index_add_(0, place.flatten(), form.values.flatten(0, 1))
    return Summed(keys // R, keys % R, values, len(form.index))


def merge(forms: list[Form]) -> list[Form]:
    """At most one form of each kind with the same sum: uses are concatenated along time, dense gradients added.

    So a recurrent weight, used at each of `T` steps, is one linear use of `T` times.
    """
    outers = [f for f in forms if isinstance(f, Outer)]
    sparses = [f for f in forms if isinstance(f, Sparse)]
    denses = [f for f in forms if isinstance(f, Dense)]
    merged: list[Form] = []
    if outers:
        merged.append(
            outers[0] if len(outers) == 1 else Outer(_cat(f.rows for f in outers), _cat(f.cols for f in outers))
        )
    if sparses:
        merged.append(
            sparses[0] if len(sparses) == 1 else Sparse(_cat(f.index for f in sparses), _cat(f.values for f in sparses))
        )
    if denses:
        gradient, bound = denses[0].gradient, denses[0].bound_
        for f in denses[1:]:
            gradient, bound = gradient + f.gradient, bound + f.bound_
        merged.append(Dense(gradient, bound))
    return merged


def squared_norms(gradients: Tensor) -> Tensor:
    """`|G_i|^2` of gradients `[B, ...]` themselves, `[B]`: pieces in their own type, their sum in float64."""
    return norms_of_pieces(gradients).double().square().sum(1)


def norms_of_pieces(gradients: Tensor) -> Tensor:
    """Of gradients `[B, ...]`, the norms of the pieces that each of them is cut into, `[B, pieces]`."""
    return torch.linalg.vector_norm(gradients.view(len(gradients), -1, _piece(gradients[0].numel())), dim=-1)


@functools.cache
def _piece(count: int) -> int:
    """Into pieces of how many to cut so many numbers, so that none is left: the longer, the quicker, and the less exact."""
    return max(k for k in range(1, SQUARES + 1) if count % k == 0)


def _cat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat(list(tensors), dim=1)


def add_to_rows(out: Tensor, rows: Tensor, values: Tensor) -> None:
    """`out[rows[k]] += values[k]`, added up in float64 first: a row that many samples share is a long sum, and rounding in it
    would grow with its length when samples agree.
    """
    if len(out) <= len(rows):
        out += out.new_zeros(out.shape, dtype=torch.float64).index_add_(0, rows, values.double())
        return
    distinct, place = rows.unique(return_inverse=True)  # of a large table: memory for the rows that occur
    sums = values.new_zeros(len(distinct), values.shape[1], dtype=torch.float64).index_add_(0, place, values.double())
    out.index_add_(0, distinct, sums.to(out.dtype))


def add_weighted_rows(out: Tensor, rows: Tensor, weights: Tensor) -> None:
    """`out += sum_i weights[i] rows[i]` for out `[N]`, rows `[B, N]`; blocks of a long sum are added up in float64."""
    if len(rows) <= BLOCK:
        out.addmv_(rows.T, weights)
        return
    total = torch.zeros(out.shape, dtype=torch.float64, device=out.device)
    for block, own in zip(rows.split(BLOCK), weights.split(BLOCK), strict=True):
        total += block.T @ own
    out += total


def sizes(x: Tensor) -> Tensor:
    """Norms over the last dimension, or a little more: no less than the norm where squares underflow."""
    lost = math.sqrt(2 * torch.finfo(x.dtype).tiny * x.shape[-1])
    return torch.linalg.vector_norm(x, dim=-1).add_(lost)


def lengths(x: Tensor) -> Tensor:
    """Norms over the last dimension, float64; where squares may underflow, computed in float64 too."""
    lengths = torch.linalg.vector_norm(x, dim=-1).double()
    small = lengths.square() < _tiny(x)
    if bool(small.any()):
        lengths[small] = torch.linalg.vector_norm(x[small].double(), dim=-1)
    return lengths


def _tiny(x: Tensor) -> float:
    return 1e8 * torch.finfo(x.dtype).tiny


def _sum(x: Tensor) -> Tensor:
    """Sum over all dimensions but the first, accumulated in float64: terms of both signs may cancel."""
    return x.sum(dim=tuple(range(1, x.dim())), dtype=torch.float64)
