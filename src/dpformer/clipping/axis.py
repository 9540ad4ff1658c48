"""Where the samples of a tensor lie.

Samples lie along one axis of a tensor. In row-major order `inner` is the number of elements behind that axis: the element at flat
position n belongs to row `(n // inner) % K` of K rows. Row k is sample k; or, where tokens are picked by ids (experts), a row of
sample `owners[k]`. A reshape keeps `inner`, a transpose moves the axis.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dpformer.errors import ClippingError

Shape = Sequence[int]


@dataclass(frozen=True, eq=False)
class Axis:
    """The samples' axis of a tensor; owners `[K]`: the sample of each row, -1 for a row that no gradient comes to."""

    inner: int
    owners: Tensor

    def place(self, shape: Shape) -> int | None:
        """The dimension that the axis lies in; None if it lies across two."""
        return place(shape, self.inner, len(self.owners))

    def owners_along(self, shape: Shape, dim: int) -> Tensor:
        """The sample of each place along the dimension that the axis lies in."""
        ids = torch.arange(shape[dim]) // (self.inner // math.prod(shape[dim + 1 :])) % len(self.owners)
        return self.owners[ids]

    def moved(self, out: Shape, dim: int, given: Shape, to: int) -> Axis | None:
        """The axis in a tensor of shape `given` whose dimension `to` is the dimension `dim` of `out`, where it lies here."""
        if not 0 <= to < len(given) or given[to] != out[dim]:
            return MIXED if not 0 <= to < len(given) or given[to] == 1 else None
        return Axis(self.inner // math.prod(out[dim + 1 :]) * math.prod(given[to + 1 :]), self.owners)

    def join(self, other: Axis) -> Axis | None:
        """The axis of a tensor that gradients come to by two ways; None if they disagree."""
        if self.inner == other.inner and self.owners is other.owners:
            return self
        fine, coarse = (self, other) if self.inner <= other.inner else (other, self)
        K, count = len(fine.owners), len(coarse.owners)
        if not fine.inner or coarse.inner % fine.inner or fine.inner * K % (coarse.inner * count):
            return None
        a, b = fine.owners, coarse.owners[torch.arange(K) * fine.inner // coarse.inner % count]
        return None if bool(((a != b) & (a >= 0) & (b >= 0)).any()) else Axis(fine.inner, torch.maximum(a, b))

    def regular(self, samples: Tensor) -> Axis:
        """The axis of `samples` (0 to B - 1) themselves, if they follow each other here, with equal numbers of rows."""
        if self.owners is samples or len(self.owners) % len(samples):
            return self
        each = len(self.owners) // len(samples)
        fits = (self.owners == samples.repeat_interleave(each)) | (self.owners < 0)
        return Axis(each * self.inner, samples) if bool(fits.all()) else self


# The axis of a tensor whose gradient is a sum over samples.
MIXED = Axis(0, torch.zeros(0, dtype=torch.int64))


def place(shape: Shape, inner: int, count: int) -> int | None:
    """The dimension that an axis of `count` rows lies in; None if it lies across two.

    >>> place((5, 4, 3), 3, 4), place((20, 3), 3, 4), place((20, 3), 15, 4), place((2, 2, 3), 3, 4)
    (1, 0, 0, None)
    """
    behind = 1
    for dim in range(len(shape) - 1, -1, -1):
        size = behind * shape[dim]
        if size >= inner * count:
            return dim if inner % behind == 0 and size % (inner * count) == 0 else None
        behind = size
    return None


@dataclass(frozen=True)
class Layout:
    """Where the samples lie for a rule: along dimension `dim`, of `before * batch * behind` elements.

    owners: where the rows along `dim` are in any order, the sample of each; -1: of none.
    """

    batch: int
    dim: int = 0
    before: int = 1
    owners: Tensor | None = None

    @property
    def is_first(self) -> bool:
        """Whether samples are the first dimension, or the outer part of it."""
        return self.dim == 0 and self.before == 1 and self.owners is None

    def first(self, x: Tensor) -> Tensor:
        """x `[..., before * batch * behind, ...]` as `[batch, ..., before, behind, ...]`; where samples are first, as it is.

        With owners: as `[batch, T, ...]`, the rows of a sample in their order and then zeros.
        """
        if self.is_first:
            return x
        if self.owners is None:
            return x.unflatten(self.dim, (self.before, self.batch, -1)).movedim(self.dim + 1, 0)
        x, owners = x.movedim(self.dim, 0), self.owners.to(x.device)
        own = owners[:, None] == torch.arange(self.batch, device=x.device)  # [K, batch]
        place = own.cumsum(0).sub_(1)[own]  # of each row that has an owner: how many rows of its owner come before it
        out = x.new_zeros(self.batch, int(own.sum(0).amax()), *x.shape[1:])
        out[owners[owners >= 0], place] = x[owners >= 0]
        return out

    def owners_of(self, x: Tensor) -> Tensor:
        """The sample that each row of x belongs to, where the rows are its first dimension."""
        if self.dim:
            raise ClippingError("experts with samples in another dimension than the first: move them there")
        if self.owners is not None:
            return self.owners
        return torch.arange(len(x)) // (len(x) // (self.before * self.batch)) % self.batch

    def apart(self, x: Tensor, dim: int) -> Tensor:
        """x with samples along `dim`, split as here, as `[batch, ...]`, where `dim` holds a sample's own elements."""
        return x.unflatten(dim, (self.before, self.batch, -1)).movedim(dim + 1, 0).flatten(dim + 1, dim + 2)

    def scattered(self, parts: Tensor, samples: slice, like: Tensor, dim: int) -> Tensor:
        """The parts of some samples, as `apart` makes them, in tensors like `like` for each of them that are 0 elsewhere."""
        out = parts.new_zeros(len(parts), *like.shape)
        split = out.unflatten(dim + 1, (self.before, self.batch, -1)).movedim(dim + 2, 1)
        each = torch.arange(len(parts), device=out.device)
        split[each, each + samples.start] = parts.unflatten(dim + 1, (self.before, -1))
        return out

    def aligned(self, shape: Shape, ndim: int) -> tuple[int, ...]:
        """What was broadcast over the samples, `shape`, in the dimensions that `first` makes of a tensor: `ndim` of them."""
        more = 0 if self.is_first else 2 if self.owners is None else 1
        full = (1,) * (ndim - more - len(shape)) + tuple(shape)
        if self.is_first:
            return full
        before, behind = full[: self.dim], full[self.dim + 1 :]
        rest = (*before, 1, 1, *behind) if self.owners is None else (1, *before, *behind)
        return (full[self.dim], *rest)

    def demand_first(self, name: str) -> None:
        """Raise if samples are not first, for a parameter with a part for each of them."""
        if not self.is_first:
            raise ClippingError(
                f"parameter {name!r} has a part for each sample, and samples are not first: move them there"
            )
