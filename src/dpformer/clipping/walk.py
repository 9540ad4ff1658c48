"""Prove on the autograd graph that the loss of a sample sends gradients to that sample's part of each use alone.

The walk goes from the losses `[B]` back to the uses; at each node it needs the rule of its function (`kinds.py`). A function
without a rule is not trusted: it makes its batch be checked by a second backward pass (`guard.check_apart`), every time. What
carries no gradient (masks, ids, the data) is not in the graph, and costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.kinds import MIXED, Inner, Shape, back, join, regular
from dpformer.errors import ClippingError


@dataclass(frozen=True)
class Layout:
    """Where the samples of a tensor lie: along dimension `dim`, of `before * batch * behind` elements.

    owners: where the rows along `dim` are in any order (tokens of experts), the sample of each, `[K]`; -1: of none.
    """

    batch: int
    dim: int = 0
    before: int = 1
    owners: Tensor | None = None

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
        place = own.cumsum(0).sub_(1)[own]  # of those that have an owner, by row: the how-manieth of its owner
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
        split = x.unflatten(dim, (self.before, self.batch, -1)).movedim(dim + 1, 0)
        return split.flatten(dim + 1, dim + 2)

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
        rest = (*full[: self.dim], *full[self.dim + 1 :])
        if self.owners is not None:
            return (full[self.dim], 1, *rest)
        return (full[self.dim], *full[: self.dim], 1, 1, *full[self.dim + 1 :])

    def demand_first(self, name: str) -> None:
        """Raise if samples are not first, for a parameter with a part for each of them."""
        if not self.is_first:
            raise ClippingError(
                f"parameter {name!r} has a part for each sample, and samples are not first: move them there"
            )

    @property
    def is_first(self) -> bool:
        """Whether samples are the first dimension, or the outer part of it."""
        return self.dim == 0 and self.before == 1 and self.owners is None


@dataclass(frozen=True)
class Doubt:
    """Why samples are not sure to be apart: `function` is not known, or is sure to mix them."""

    function: str
    mixes: bool


@dataclass
class _Node:
    """A node of the graph on the walk: how many of its users are still to come, and what arrived at each of its outputs."""

    users: int
    arrived: dict[int, tuple[Inner, Doubt | None]]

    def arrive(self, output: int, inner: Inner, doubt: Doubt | None, function: str, shape: Shape, batch: int) -> None:
        if output in self.arrived:
            before, earlier = self.arrived[output]
            joined = join(before, inner, shape, batch)
            if joined is None:
                doubt = doubt or Doubt(function, mixes=False)
            inner, doubt = before if joined is None else joined, earlier or doubt
        self.arrived[output] = inner, doubt


def walk(losses: Tensor, users: dict[Any, int]) -> dict[Any, tuple[Inner, Doubt | None]]:
    """`inner` of every recorded use, and the doubt about it, if there is one.

    users: the nodes of the graph and how many edges lead to each. After a function that is not known samples are taken to be
    first. What has no elements has no part in it.
    """
    batch, ends = len(losses), {}
    nodes = {node: _Node(count, {}) for node, count in users.items()}
    assert losses.grad_fn is not None
    nodes[losses.grad_fn].arrived[losses.output_nr] = 1, None
    ready: list[Any] = [losses.grad_fn]
    while ready:
        node = ready.pop()
        arrived = {k: (regular(inner, batch), doubt) for k, (inner, doubt) in nodes.pop(node).arrived.items()}
        edges = node.next_functions
        shapes = [None if n is None else tuple(n._input_metadata[k].shape) for n, k in edges]
        if hasattr(node, "use"):
            ends[node] = arrived.get(0, (None, None))
            edges, results = edges[:1], [([inner], doubt) for inner, doubt in arrived.values()]
        else:
            results = []
            for output, (inner, doubt) in arrived.items():
                given = tuple(node._input_metadata[output].shape)
                results.append((back(node, given, inner, shapes, batch) if inner else [None] * len(shapes), doubt))
        for k, (following, output) in enumerate(edges):
            if following is None:
                continue
            shape = shapes[k]
            if results and shape is not None and 0 not in shape:
                inner, *others = (parts[k] for parts, _ in results)
                for other in others:
                    inner = join(inner, other, shape, batch)
                doubt = next((doubt for _, doubt in results if doubt is not None), None)
                if not inner:
                    doubt = doubt or Doubt(node.name(), mixes=inner == MIXED)
                    inner = math.prod(shape) // batch if shape and shape[0] % batch == 0 else None
                nodes[following].arrive(output, inner, doubt, node.name(), shape, batch)
            nodes[following].users -= 1
            if not nodes[following].users:
                ready.append(following)
    return ends
