"""The gradients of a parameter for all samples of a batch: one protocol, and the ways to their norms.

    Pairs    inner products of all pairs of terms: sum_{t,u} <rows_t, rows_u> <cols_t, cols_u> + ...;   work 2 B T^2 (R + C)
    Formed   G_i itself, for a few samples at a time, and its norm;                                    work 2 B T R C

By work alone, pairs are cheaper for short sequences, up to about T = R C / (R + C). But products of T x T are slow to start:
for layers of a few thousand weights the second way is faster for short sequences too. `TiedGradient` (tied.py) is the
gradient of a table that is also the output layer; it uses both ways.
"""

from __future__ import annotations

import functools
import math
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from dpformer.clipping.algebra import Dense, Factored, Form, Lazy, Outer, Sparse, inner
from dpformer.clipping.sums import add_weighted_rows, norms_of_pieces, squared_norms
from dpformer.clipping.workspace import Workspace

Route = Literal["gram", "formed"]

# Elements of per-sample gradients that are formed at once (16 MB of float32).
FORMED_ELEMENTS = 2**22
# The cost of starting one small matrix product, in operations of a large one; how much slower products of tokens are.
START, SLOWER = 200_000, 4


class Gradient(Protocol):
    """Per-sample gradients `G_i`, i = 1 .. B, of one parameter, or of several as one."""

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

    def __init__(self, parameter: nn.Parameter, forms: list[Factored], batch: int) -> None:
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

    The sum is computed from the forms. Gradients of several forms are kept where they are small, and the sum computed from them.
    """

    # Parameters that are parts of this one: see `join`.
    parts: tuple[nn.Parameter, ...] = ()

    def __init__(self, parameter: nn.Parameter, forms: list[Factored], batch: int, workspace: Workspace) -> None:
        super().__init__(parameter, forms, batch)
        self.workspace = workspace

    @classmethod
    def join(cls, parts: tuple[nn.Parameter, ...], forms: tuple[Dense, ...]) -> Formed:
        """The gradient of several small parameters (biases, scales) as of one column: fewer and larger operations."""
        bound = torch.linalg.vector_norm(torch.stack([form.bound() for form in forms]).double(), dim=0)
        dense = Dense(torch.cat([form.gradient.flatten(1) for form in forms], dim=1)[..., None], bound)
        whole = nn.Parameter(dense.gradient.new_zeros(dense.gradient.shape[1]))
        joined = cls(whole, [dense], len(bound), Workspace())
        joined.parts = parts
        return joined

    def squared(self) -> Tensor:
        """`|G_i|^2` `[B]`, float64."""
        one = self.forms[0] if len(self.forms) == 1 else None
        if isinstance(one, Dense):
            return one.squared_norms()
        R, C = self.shape
        few = self.batch * R * C <= FORMED_ELEMENTS // 4
        keep = not isinstance(one, Outer) and (few or is_compact(self.parameter, self.forms))
        chunk = self.batch if keep else min(self.batch, max(1, FORMED_ELEMENTS // (R * C)))
        like = self.parameter.detach()
        buffer = like.new_empty(chunk, R * C) if keep else self.workspace.take("formed", chunk, R * C, like)
        buffer = buffer.view(chunk, R, C)
        squares = []
        for start in range(0, self.batch, chunk):
            samples = slice(start, min(start + chunk, self.batch))
            part = buffer[: samples.stop - start]
            if isinstance(one, Outer):
                torch.bmm(one.rows[samples].transpose(1, 2), one.cols[samples], out=part)
            else:
                part.zero_()
                for form in self.forms:
                    form.form_into(part, samples)
            squares.append(squared_norms(part))
        if keep:
            self.forms = [Dense(buffer, self.bound())]
        return torch.cat(squares)

    def add(self, weights: Tensor) -> None:
        if not self.parts:
            return super().add(weights)
        self.parameter.grad = torch.zeros_like(self.parameter)
        super().add(weights)
        sums = [p.grad.view(-1) for p in self.parts if p.grad is not None]
        torch._foreach_add_(sums, self.parameter.grad.split([p.numel() for p in self.parts]))


class Computed:
    """The gradient of forms of which one is `Lazy`, computed for a few samples at a time. See `Gradient`.

    What is added is what was measured: kept if it is small, else computed anew. So the norm is that of the sum's own terms, and
    there is no other bound on their rounding.
    """

    def __init__(self, parameter: nn.Parameter, forms: list[Form], batch: int) -> None:
        self.parameter, self.forms, self.batch = parameter, forms, batch
        sizes = [parameter.numel(), *(form.size for form in forms if isinstance(form, Lazy))]
        self._chunk = max(1, min(batch, FORMED_ELEMENTS // max(sizes)))
        self._kept: Tensor | None = None

    def measure(self) -> tuple[Tensor, Tensor]:
        parts = []
        for samples in self._samples():
            gradient = self._compute(samples)
            parts.append(squared_norms(gradient))
            if self._chunk == self.batch:
                self._kept = gradient
        squared = torch.cat(parts)
        underflow = math.sqrt(2 * torch.finfo(self.parameter.dtype).tiny * self.parameter.numel())  # of the squares
        return squared, (squared.sqrt() + underflow).square()

    def add(self, weights: Tensor) -> None:
        assert self.parameter.grad is not None
        out = self.parameter.grad.view(-1)
        total = out if self._chunk == self.batch else out.double()
        for samples in self._samples():
            gradient = self._compute(samples) if self._kept is None else self._kept
            add_weighted_rows(total, gradient.flatten(1).to(total), weights[samples].to(total))
        out.copy_(total)

    def drop(self, samples: Tensor) -> None:
        for form in self.forms:
            form.drop(samples)
        if self._kept is not None:
            self._kept = self._kept.masked_fill(samples[:, None, None], 0)

    def _samples(self) -> list[slice]:
        return [slice(k, min(k + self._chunk, self.batch)) for k in range(0, self.batch, self._chunk)]

    def _compute(self, samples: slice) -> Tensor:
        gradient = self.parameter.new_zeros(samples.stop - samples.start, *matrix_shape(self.parameter.shape))
        for form in self.forms:
            form.form_into(gradient, samples)
        return gradient


def gradient_of(
    parameter: nn.Parameter, forms: list[Factored], batch: int, route: Route | None, workspace: Workspace
) -> Pairs:
    """The gradient of a parameter from its forms, at most one of each kind (`merge`), by the cheaper way or by `route`."""
    if any(isinstance(form, Dense) and form.norms is not None for form in forms):
        route = "formed"  # it is
    if (route or cheaper_route(parameter, forms)) == "gram":
        return Pairs(parameter, forms, batch)
    return Formed(parameter, forms, batch, workspace)


def cheaper_route(parameter: nn.Parameter, forms: list[Factored]) -> Route:
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


def is_compact(parameter: nn.Parameter, forms: list[Factored]) -> bool:
    """Whether the gradients are no larger than the factors they are made of."""
    outers = [form for form in forms if isinstance(form, Outer)]
    factors = sum(form.rows.numel() + form.cols.numel() for form in outers)
    return bool(outers) and len(outers[0].rows) * parameter.numel() <= factors
