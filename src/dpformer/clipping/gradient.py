"""The gradients of a parameter for all samples of a batch: one protocol, and the ways to their norms.

    Pairs    inner products of all pairs of terms: sum_{t,u} <rows_t, rows_u> <cols_t, cols_u> + ...;   work 2 B T^2 (R + C)
    Formed   G_i itself, for a few samples at a time, and its norm;                                    work 2 B T R C

By work alone, pairs are cheaper up to about T = R C / (R + C). But products of T x T are slow to start: for layers of a few
thousand weights the second way is faster for short sequences too. `TiedGradient` (tied.py) uses both ways.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from dpformer.clipping.algebra import Dense, Form, Lazy, Outer, Sparse, inner
from dpformer.clipping.sums import add_weighted_rows, norms_of_pieces, squared_norms
from dpformer.clipping.workspace import Workspace

Route = Literal["gram", "formed"]

# Elements of per-sample gradients that are formed at once (16 MB of float32).
FORMED_ELEMENTS = 2**22
# The cost of starting one small matrix product, in operations of a large one; how much slower products of tokens are.
START, SLOWER = 200_000, 4


class Gradient(Protocol):
    """Per-sample gradients `G_i`, i = 1 .. B, of one parameter or of several."""

    def measure(self) -> tuple[Tensor, Tensor]:
        """`|G_i|^2`, and the square of the bound `K_i`, the sum of the norms of all terms (see `Clip`); `[B]` float64 each."""

    def add(self, weights: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to `.grad`; `measure` comes first."""

    def drop(self, samples: Tensor) -> None:
        """Make `G_i` zero for the marked samples (`[B]`, bool), whatever it was."""


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """`(R, C)` of a parameter: its last dimension and all others; a vector is a column.

    >>> matrix_shape(torch.Size([5, 3])), matrix_shape(torch.Size([1, 5, 3])), matrix_shape(torch.Size([4]))
    ((5, 3), (5, 3), (4, 1))
    """
    if len(shape) < 2:
        return shape.numel(), 1
    return shape[:-1].numel(), shape[-1]


class Pairs:
    """The gradient as a sum of forms; `|G|^2` is the sum of the inner products of all pairs of forms. See `Gradient`."""

    def __init__(self, parameter: nn.Parameter, forms: list[Form], batch: int) -> None:
        self.parameter, self.forms, self.batch = parameter, forms, batch
        self.shape = matrix_shape(parameter.shape)

    def measure(self) -> tuple[Tensor, Tensor]:
        bound = self.bound()
        return self.squared(), bound.square()

    def bound(self) -> Tensor:
        """`K_i` `[B]`, float64."""
        if not self.forms:
            return torch.zeros(self.batch, dtype=torch.float64, device=self.parameter.device)
        return functools.reduce(torch.add, (form.bound().double() for form in self.forms))

    def squared(self) -> Tensor:
        """`|G_i|^2` `[B]`, float64."""
        total = torch.zeros(self.batch, dtype=torch.float64, device=self.parameter.device)
        hidden = torch.zeros_like(total)
        for k, form in enumerate(self.forms):
            total += form.squared_norms(self.shape[0]) if isinstance(form, Sparse) else inner(form, form)
            if isinstance(form, Outer):
                hidden = form.hidden()
            for other in self.forms[k + 1 :]:
                total += 2 * inner(form, other)
        return (total.clamp_min(0).sqrt() + hidden).square()

    def add(self, weights: Tensor) -> None:
        assert self.parameter.grad is not None
        out, weights = self.parameter.grad.view(self.shape), weights.to(self.parameter.dtype)
        for form in self.forms:
            form.add_weighted(weights, out)

    def drop(self, samples: Tensor) -> None:
        for form in self.forms:
            form.drop(samples)


class Formed(Pairs):
    """The gradient formed for a few samples at a time in reused memory, and measured there.

    The sum is computed from the forms; where the gradients themselves are small, from them. With a `Lazy` form what is added is
    what was measured, kept or computed anew: so the norm is that of the sum's own terms, and there is no other bound on their
    rounding. parts: parameters that are parts of this one (`join`).
    """

    def __init__(self, parameter: nn.Parameter, forms: list[Form], batch: int, workspace: Workspace) -> None:
        super().__init__(parameter, forms, batch)
        self.workspace, self.parts = workspace, tuple[nn.Parameter, ...]()
        self._lazy = [form.size for form in forms if isinstance(form, Lazy)]

    @classmethod
    def join(cls, parts: tuple[nn.Parameter, ...], forms: tuple[Dense, ...]) -> Formed:
        """The gradient of several small parameters (biases, scales) as of one column: fewer and larger operations."""
        bound = torch.linalg.vector_norm(torch.stack([form.bound() for form in forms]).double(), dim=0)
        dense = Dense(torch.cat([form.gradient.flatten(1) for form in forms], dim=1)[..., None], bound)
        whole = nn.Parameter(dense.gradient.new_zeros(dense.gradient.shape[1]))
        joined = cls(whole, [dense], len(bound), Workspace())
        joined.parts = parts
        return joined

    def measure(self) -> tuple[Tensor, Tensor]:
        if not self._lazy:
            return super().measure()
        squared = self.squared()
        underflow = math.sqrt(2 * torch.finfo(self.parameter.dtype).tiny * self.parameter.numel())  # of the squares
        return squared, (squared.sqrt() + underflow).square()

    def squared(self) -> Tensor:
        one = self.forms[0] if len(self.forms) == 1 else None
        if isinstance(one, Dense):
            return one.squared_norms()
        R, C = self.shape
        size = max(R * C, *self._lazy, 1)
        few = self.batch * size <= (FORMED_ELEMENTS if self._lazy else FORMED_ELEMENTS // 4)
        keep = not isinstance(one, Outer) and (few or (not self._lazy and is_compact(self.parameter, self.forms)))
        self._chunk = self.batch if keep else min(self.batch, max(1, FORMED_ELEMENTS // size))
        like = self.parameter.detach()
        take = self.workspace.take
        buffer = like.new_empty(self._chunk, R * C) if keep else take("formed", self._chunk, R * C, like)
        squares = [squared_norms(part) for _, part in self._formed(buffer.view(-1, R, C))]
        if keep:
            self.forms = [Dense(buffer.view(-1, R, C), like.new_zeros(self.batch) if self._lazy else self.bound())]
        return torch.cat(squares)

    def _formed(self, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """The gradients of a few samples after the other, in the same memory."""
        for start in range(0, self.batch, self._chunk):
            samples = slice(start, min(start + self._chunk, self.batch))
            part = buffer[: samples.stop - start]
            if len(self.forms) == 1 and isinstance(one := self.forms[0], Outer):
                torch.bmm(one.rows[samples].transpose(1, 2), one.cols[samples], out=part)
            else:
                part.zero_()
                for form in self.forms:
                    form.form_into(part, samples)
            yield samples, part

    def add(self, weights: Tensor) -> None:
        if self.parts:
            self.parameter.grad = torch.zeros_like(self.parameter)
        if not any(isinstance(form, Lazy) for form in self.forms):
            super().add(weights)
        else:
            assert self.parameter.grad is not None
            total = self.parameter.grad.view(-1).double()
            buffer = self.parameter.new_empty(self._chunk, *self.shape, requires_grad=False)
            for samples, part in self._formed(buffer):
                add_weighted_rows(total, part.flatten(1).double(), weights[samples])
            self.parameter.grad.view(-1).copy_(total)
        if self.parts and self.parameter.grad is not None:
            sums = [p.grad.view(-1) for p in self.parts if p.grad is not None]
            torch._foreach_add_(sums, self.parameter.grad.split([p.numel() for p in self.parts]))


def gradient_of(
    parameter: nn.Parameter, forms: list[Form], batch: int, route: Route | None, workspace: Workspace
) -> Pairs:
    """The gradient of a parameter from its forms, at most one of each kind (`merge`), by the cheaper way or by `route`."""
    if any(isinstance(form, Lazy) or (isinstance(form, Dense) and form.norms is not None) for form in forms):
        route = "formed"  # it will be, or it is
    if (route or cheaper_route(parameter, forms)) == "gram":
        return Pairs(parameter, forms, batch)
    return Formed(parameter, forms, batch, workspace)


def cheaper_route(parameter: nn.Parameter, forms: list[Form]) -> Route:
    """The way that takes less time, by counted operations."""
    R, C = matrix_shape(parameter.shape)
    gram = formed = 0
    T = max((form.rows.shape[1] for form in forms if isinstance(form, Outer)), default=0)
    for form in forms:
        match form:
            case Outer():
                gram += 2 * START + SLOWER * 2 * T * T * (R + C)
                formed += START + 2 * T * R * C + 2 * R * C
            case Sparse():
                t = form.index.shape[1]
                gram += 2 * t * C + 2 * t * T * C
                formed += 2 * t * C + R * C
            case Dense():
                gram += 2 * R * C + 2 * T * R * C
                formed += 2 * R * C
    return "gram" if gram <= formed else "formed"


def shorten(parameter: nn.Parameter, form: Form, route: Route | None) -> Form:
    """A parameter's only form; of a linear use, the gradients themselves where they are to be formed and are no larger."""
    if not isinstance(form, Outer) or not is_compact(parameter, [form]):
        return form
    if (route or cheaper_route(parameter, [form])) == "gram":
        return form
    gradient = torch.bmm(form.rows.transpose(1, 2), form.cols)
    return Dense(gradient, form.bound(), norms_of_pieces(gradient))  # measured while it is in the processor's cache


def is_compact(parameter: nn.Parameter, forms: list[Form]) -> bool:
    """Whether the gradients are no larger than the factors they are made of."""
    outers = [form for form in forms if isinstance(form, Outer)]
    factors = sum(form.rows.numel() + form.cols.numel() for form in outers)
    return bool(outers) and len(outers[0].rows) * parameter.numel() <= factors
