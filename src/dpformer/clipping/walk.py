"""Prove on the autograd graph that the loss of a sample sends gradients to that sample's part of each use alone.

The walk goes from the losses `[B]` back to the uses; at each node it needs the rule of its function (`kinds.py`). A function
without a rule is not trusted: it makes its batch be checked by a second backward pass (`guard.check_apart`), every time. What
carries no gradient (masks, ids, the data) is not in the graph, and costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dpformer.clipping.kinds import MIXED, Inner, Shape, kind_of
from dpformer.errors import ClippingError


@dataclass(frozen=True)
class Layout:
    """Where the samples of a tensor lie: along dimension `dim`, of `before * batch * behind` elements."""

    batch: int
    dim: int = 0
    before: int = 1

    def first(self, x: Tensor) -> Tensor:
        """x `[..., before * batch * behind, ...]` as `[batch, ..., before, behind, ...]`; where samples are first, as it is."""
        if self.is_first:
            return x
        return x.unflatten(self.dim, (self.before, self.batch, -1)).movedim(self.dim + 1, 0)

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

    def aligned(self, shape: Shape) -> tuple[int, ...]:
        """The shape that `first` gives to what was broadcast over the samples, without its first dimension."""
        return tuple(shape[1:]) if self.is_first else (*shape[: self.dim], 1, 1, *shape[self.dim + 1 :])

    def demand_first(self, name: str) -> None:
        """Raise if samples are not first, for a parameter with a part for each of them."""
        if not self.is_first:
            raise ClippingError(
                f"parameter {name!r} has a part for each sample, and samples are not first: move them there"
            )

    @property
    def is_first(self) -> bool:
        """Whether samples are the first dimension, or the outer part of it."""
        return self.dim == 0 and self.before == 1


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

    def arrive(self, output: int, inner: Inner, doubt: Doubt | None, function: str) -> None:
        before, earlier = self.arrived.get(output, (inner, doubt))
        if before != inner:
            doubt = doubt or Doubt(function, mixes=False)
        self.arrived[output] = before, earlier or doubt


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
        arrived, edges = nodes.pop(node).arrived, node.next_functions
        shapes = [None if n is None else tuple(n._input_metadata[k].shape) for n, k in edges]
        if hasattr(node, "use"):
            ends[node] = arrived.get(0, (None, None))
            edges, results = edges[:1], [([inner], doubt) for inner, doubt in arrived.values()]
        else:
            results = [_back(node, output, inner, shapes, batch, doubt) for output, (inner, doubt) in arrived.items()]
        for k, (following, output) in enumerate(edges):
            if following is None:
                continue
            shape = shapes[k]
            if results and shape is not None and 0 not in shape:
                values = {parts[k] for parts, _ in results}
                inner = values.pop() if len(values) == 1 else None
                doubt = next((doubt for _, doubt in results if doubt is not None), None)
                if not inner:
                    doubt = doubt or Doubt(node.name(), mixes=inner == MIXED)
                    inner = math.prod(shape) // batch if shape and shape[0] % batch == 0 else None
                nodes[following].arrive(output, inner, doubt, node.name())
            nodes[following].users -= 1
            if not nodes[following].users:
                ready.append(following)
    return ends


def _back(
    node: Any, output: int, inner: Inner, shapes: Sequence[Shape | None], batch: int, doubt: Doubt | None
) -> tuple[list[Inner], Doubt | None]:
    """`inner` of the inputs of a function from that of one of its outputs."""
    kind = kind_of(node)
    if kind is None or inner is None:
        return [None] * len(shapes), doubt
    return kind(node, tuple(node._input_metadata[output].shape), inner, shapes, batch), doubt
