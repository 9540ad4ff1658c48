"""Norms and weighted sums of one parameter's per-sample gradients, by the cheaper of two routes.

    gram     the pairs of terms: sum_{t,u} <rows_t, rows_u> <cols_t, cols_u> + ...; work 2 B T^2 (R + C)
    formed   G_i itself, a few samples at a time, then its norm;                    work 2 B T R C

By their work alone, short sequences want the first and long ones the second, from about T = R C / (R + C) on. But products of
T x T are slow to start: for layers of a few thousand weights the second is quicker for short sequences too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dpformer.clipping.algebra import (
    Dense,
    Form,
    Outer,
    Sparse,
    Summed,
    add_up,
    add_weighted_rows,
    inner,
    merge,
    norms_of_pieces,
    squared_norms,
)
from dpformer.clipping.workspace import Workspace

Route = Literal["gram", "formed"]

# Elements of per-sample gradients that are formed at once (16 MB of float32).
FORMED_ELEMENTS = 2**22
# What starting one small matrix product costs, in operations of a large one, and how much slower products of tokens are.
START, SLOWER = 200_000, 4


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """`(R, C)` of a parameter: its last dimension and all others; a vector is a column.

    >>> matrix_shape(torch.Size([5, 3])), matrix_shape(torch.Size([1, 5, 3])), matrix_shape(torch.Size([4]))
    ((5, 3), (5, 3), (4, 1))
    """
    if len(shape) < 2:
        return shape.numel(), 1
    return shape[:-1].numel(), shape[-1]


class ParameterGradient:
    """The gradients of `parameter` for `B` samples, as the sum of the forms that its uses gave."""

    def __init__(self, parameter: nn.Parameter, forms: list[Form], batch: int, route: Route | None = None) -> None:
        self.parameter = parameter
        self.batch = batch
        self.shape = matrix_shape(parameter.shape)
        self.forms = merge(forms)
        self.summed: Summed | None = None
        self.route = route or self._cheaper_route()

    def measure(self) -> tuple[Tensor, Tensor]:
        """`|G_i|^2` and the square of the bound `K_i` on it (the sum of the sizes of all terms), each `[B]`, float64."""
        bound = self.bound()
        return self.squared(bound), bound.square()

    def squared(self, bound: Tensor) -> Tensor:
        """`|G_i|^2` `[B]`, float64, for whoever has the bound already."""
        return self._formed(bound) if self.route == "formed" else self._gram()

    def bound(self) -> Tensor:
        """`K_i`, the sum of the sizes of all terms, `[B]`, float64."""
        bound = torch.zeros(self.batch, dtype=torch.float64, device=self.parameter.device)
        for form in self.forms:
            bound += form.bound()
        return bound

    def add_weighted_sum(self, weights: Tensor) -> None:
        """Add `sum_i weights[i] G_i` to the parameter's `.grad`."""
        assert self.parameter.grad is not None
        out, weights = self.parameter.grad.view(self.shape), weights.to(self.parameter.dtype)
        for form in self.forms:
            part = self.summed if isinstance(form, Sparse) and self.summed is not None else form
            part.add_weighted(weights, out)

    def forget(self, samples: Tensor) -> None:
        """Take the marked samples (`[B]`, bool) out."""
        for form in self.forms:
            form.forget(samples)
        if self.summed is not None:
            self.summed.forget(samples)

    @property
    def replaces(self) -> bool:
        """Whether the formed gradients replace the forms: where they are no larger, and the weighted sum is then one product."""
        few = self.batch * self.parameter.numel() <= FORMED_ELEMENTS // 4
        return self.route == "formed" and (self.compact or few)

    def shortened(self) -> Formed | None:
        """The gradients themselves, if they are of one linear use, are to be formed and are no larger than its factors."""
        if (
            len(self.forms) == 1
            and isinstance(form := self.forms[0], Outer)
            and self.route == "formed"
            and self.compact
        ):
            return Formed.of(form)
        return None

    @property
    def compact(self) -> bool:
        """Whether gradients are no larger than the factors they are made of."""
        factors = sum(f.rows.numel() + f.cols.numel() for f in self.forms if isinstance(f, Outer))
        return self.batch * self.parameter.numel() <= factors

    def _cheaper_route(self) -> Route:
        R, C = self.shape
        gram = formed = 0
        T = {type(form): form.rows.shape[1] if isinstance(form, Outer) else 0 for form in self.forms}
        for form in self.forms:
            match form:
                case Outer():
                    t = T[Outer]
                    gram += 2 * START + SLOWER * 2 * t * t * (R + C)
                    formed += START + 2 * t * R * C + 2 * R * C
                case Sparse():
                    t = form.index.shape[1]
                    gram += 2 * t * C + 2 * t * T.get(Outer, 0) * C
                    formed += 2 * t * C + R * C
                case Dense():
                    gram += 2 * R * C + 2 * T.get(Outer, 0) * R * C
                    formed += 2 * R * C
        return "gram" if gram <= formed else "formed"

    def _gram(self) -> Tensor:
        total = torch.zeros(self.batch, dtype=torch.float64, device=self.parameter.device)
        hidden = torch.zeros_like(total)
        for k, form in enumerate(self.forms):
            if isinstance(form, Sparse):
                self.summed = add_up(form, self.shape[0])
                total += self.summed.squared_norms()
            else:
                total += inner(form, form)
            if isinstance(form, Outer):
                hidden = form.hidden()
            for other in self.forms[k + 1 :]:
                total += 2 * inner(form, other)
        return (total.clamp_min(0).sqrt() + hidden).square()

    def _formed(self, bound: Tensor) -> Tensor:
        R, C = self.shape
        replace = self.replaces
        chunk = self.batch if replace else min(self.batch, max(1, FORMED_ELEMENTS // (R * C)))
        buffer = self.parameter.new_empty(chunk, R, C, requires_grad=False)
        squares = []
        for start in range(0, self.batch, chunk):
            stop = min(start + chunk, self.batch)
            part = buffer[: stop - start]
            if len(self.forms) == 1 and isinstance(form := self.forms[0], Outer):
                form.form(part, slice(start, stop))
            else:
                part.zero_()
                for form in self.forms:
                    form.form_into(part, slice(start, stop))
            squares.append(squared_norms(part))
        if replace:
            self.forms = [Dense(buffer, bound)]
        return torch.cat(squares)


@dataclass(frozen=True)
class Formed:
    """The gradients of a linear use themselves, `[B, R C]`, the norms of their pieces `[B, pieces]`, and `Outer.factors`."""

    gradients: Tensor
    norms: Tensor
    sizes: tuple[Tensor, Tensor]

    @classmethod
    def of(cls, form: Outer) -> Formed:
        """From the factors, which are no longer needed then."""
        gradients = torch.bmm(form.rows.transpose(1, 2), form.cols).flatten(1)
        return cls(gradients, norms_of_pieces(gradients), form.factors())


class FormedGradients:
    """The gradients of several parameters with a linear use each that are no larger than the factors they are made of."""

    def __init__(self, formed: list[tuple[nn.Parameter, Formed]]) -> None:
        self.formed = formed

    def measure(self) -> tuple[Tensor, Tensor]:
        """As `ParameterGradient.measure`."""
        norms = torch.cat([one.norms for _, one in self.formed], 1)
        return norms.double().square().sum(1), _bound([one.sizes for _, one in self.formed])

    def add_weighted_sum(self, weights: Tensor) -> None:
        """As `ParameterGradient.add_weighted_sum`."""
        weights = weights.to(self.formed[0][1].gradients.dtype)
        for p, one in self.formed:
            assert p.grad is not None
            add_weighted_rows(p.grad.view(-1), one.gradients, weights)

    def forget(self, samples: Tensor) -> None:
        """As `ParameterGradient.forget`."""
        for _, one in self.formed:
            one.gradients.masked_fill_(samples[:, None], 0)


class OuterGradients:
    """The gradients of several parameters of one shape with a linear use each that are larger than the factors they are made of:
    formed one after the other in the same memory, and added up from the factors.
    """

    def __init__(self, parameters: list[ParameterGradient], workspace: Workspace) -> None:
        self.parameters = [found.parameter for found in parameters]
        self.forms = [form for found in parameters for form in found.forms if isinstance(form, Outer)]
        self.shape = R, C = parameters[0].shape
        self.place = workspace.take(f"formed {R} {C}", parameters[0].batch, R * C, self.forms[0].rows).view(-1, R, C)

    def measure(self) -> tuple[Tensor, Tensor]:
        """As `ParameterGradient.measure`."""
        norms = []
        for form in self.forms:
            form.form(self.place)
            norms.append(norms_of_pieces(self.place))
        return torch.stack(norms).double().square().sum((0, 2)), _bound([form.factors() for form in self.forms])

    def add_weighted_sum(self, weights: Tensor) -> None:
        """As `ParameterGradient.add_weighted_sum`."""
        weights = weights.to(self.place.dtype)
        for p, form in zip(self.parameters, self.forms, strict=True):
            assert p.grad is not None
            form.add_weighted(weights, p.grad.view(self.shape))

    def forget(self, samples: Tensor) -> None:
        """As `ParameterGradient.forget`."""
        for form in self.forms:
            form.forget(samples)


def _bound(factors: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The sum of the squared bounds of linear uses `[B]`, from `Outer.factors` of each."""
    return torch.stack([(rows.double() * cols).sum(1) for rows, cols in factors]).square().sum(0)


class DenseGradients:
    """The gradients of several parameters that are small (biases, scales) and known per sample: joined, as if they were one."""

    def __init__(self, parameters: list[nn.Parameter], forms: list[Dense]) -> None:
        self.parameters = parameters
        self.gradient = torch.cat([form.gradient.flatten(1) for form in forms], dim=1)
        self.bound = torch.stack([form.bound() for form in forms]).double()

    def measure(self) -> tuple[Tensor, Tensor]:
        """As `ParameterGradient.measure`."""
        return squared_norms(self.gradient), self.bound.square().sum(0)

    def add_weighted_sum(self, weights: Tensor) -> None:
        """As `ParameterGradient.add_weighted_sum`."""
        total = self.gradient.new_zeros(self.gradient.shape[1])
        add_weighted_rows(total, self.gradient, weights.to(self.gradient.dtype))
        assert all(p.grad is not None for p in self.parameters)
        sums = [p.grad.view(-1) for p in self.parameters if p.grad is not None]
        torch._foreach_add_(sums, total.split([p.numel() for p in self.parameters]))

    def forget(self, samples: Tensor) -> None:
        """As `ParameterGradient.forget`."""
        self.gradient = self.gradient.masked_fill(samples[:, None], 0)
