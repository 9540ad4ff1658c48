"""The gradient of a table that is a catalogue's output layer, and perhaps its input layer too: Phantom Clipping proper.

With s: tokens looked up, x: gradient at what was looked up, D: gradient at the logits, H: input of the head, for one sample

    |G|^2 = sum_{t,u} [s_t = s_u] <x_t, x_u>  +  <H H', D D'>  +  2 sum_{t,u} D[u, s_t] <x_t, H_u>

(the paper's claim, with its first term unsquared). Nothing of size M x M or B x M x d is built. Where a sample has about
as many tokens as the table has columns, or more, the products of D with itself cost more than `G = D'H + onehot(s)'x`,
which is then formed for a few samples at a time in memory that is used again, and added to the sum straight away. Gradients are
formed and summed transposed, `[d, M]`: H'D runs over D in the order it lies in memory, and is up to twice as fast as D'H.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dpformer.clipping.forms import Form, Outer, Sparse, inner, squared_norms
from dpformer.clipping.gradient import ParameterGradient, Route
from dpformer.clipping.head import HeadPass, Tile

# From samples, their squared norms and squared bounds, each [b], to their weights in the sum, [b].
Weigh = Callable[[Tensor, Tensor, Tensor], Tensor]
Settle = Callable[[Tensor, Tensor], Tensor | None]

# Elements of gradients that are formed at once: 4 MB of float32, or one sample's.
FORMED_ELEMENTS = 2**20


@dataclass
class Head:
    """The form of a table's use as output layer; `upstream` `[B]` is the gradient at the losses."""

    head: HeadPass
    upstream: Tensor


class StreamedGradient:
    """Per-sample gradients of a table with one use as output layer and any other uses."""

    def __init__(
        self, parameter: nn.Parameter, head: Head, others: list[Form], batch: int, route: Route | None = None
    ) -> None:
        self.parameter = parameter
        self.head, self.upstream = head.head, head.upstream.to(parameter.dtype)
        self.others = ParameterGradient(parameter, others, batch, route)
        self.route = route

    def measure(self) -> tuple[Tensor, Tensor]:
        """As `ParameterGradient.measure`."""
        return self.clip(None)

    def add_weighted_sum(self, weights: Tensor) -> None:
        """As `ParameterGradient.add_weighted_sum`."""
        self.clip(lambda samples, squared, bound: weights[samples])

    def forget(self, samples: Tensor) -> None:
        """As `ParameterGradient.forget`."""
        self.upstream = self.upstream.masked_fill(samples, 0)
        self.others.forget(samples)

    def clip(self, weigh: Weigh | None) -> tuple[Tensor, Tensor]:
        """Squared norms and squared bounds `[B]`; and, if `weigh` is given, the weighted sum in the same pass over D."""
        others, bound = self.others.measure()
        bound = (bound.sqrt() + self.head.bound.double() * self.upstream.abs().double()).square()
        squared = others.clone()
        # Weights of the other uses' forms, which are added at the end; 0 where they went into a formed gradient.
        pending = torch.zeros_like(others)

        def settle(samples: Tensor, found: Tensor) -> Tensor | None:
            squared[samples] = found
            if weigh is None:
                return None
            return torch.where(found.isfinite(), weigh(samples, found, bound[samples]), 0.0)

        forms = self.others.forms
        sparse = forms[0] if len(forms) == 1 and isinstance(forms[0], Sparse) else None
        total = self._take("sum", 1)[0].zero_() if weigh is not None else None
        for tile in self.head.tiles():
            if (
                self.route != "formed"
                and tile.whole
                and (sparse or not forms)
                and (self.route or _gram_is_cheaper(tile))
            ):
                self._gram(tile, sparse, others, settle, pending, total)
            else:
                self._formed(tile, settle, total)
        if total is not None and weigh is not None:
            assert self.parameter.grad is not None
            self.parameter.grad.add_(total.T)
            pending[self.head.empty] = weigh(self.head.empty, squared[self.head.empty], bound[self.head.empty]).double()
            if (lost := ~squared.isfinite()).any():
                self.others.forget(lost)
            self.others.add_weighted_sum(pending)
        return squared, bound

    def _take(self, name: str, samples: int) -> Tensor:
        """Memory for transposed gradients, `[samples, d, M]`."""
        M, d = self.parameter.shape
        return self.head.workspace.take(name, samples * d, M, self.head.H).view(samples, d, M)

    def _gram(
        self, tile: Tile, sparse: Sparse | None, others: Tensor, settle: Settle, pending: Tensor, total: Tensor | None
    ) -> None:
        samples = tile.samples
        own = Outer(tile.D, tile.H * self.upstream[samples, None, None])
        squared = others[samples] + inner(own, own)
        if sparse is not None:
            squared += 2 * inner(own, Sparse(sparse.index[samples], sparse.values[samples]))
        weights = settle(samples, squared)
        if weights is not None and total is not None:
            if (lost := ~squared.isfinite()).any():
                own.forget(lost)
            H = own.cols * weights.to(own.cols.dtype)[:, None, None]
            total.addmm_(H.flatten(0, 1).T, own.rows.flatten(0, 1))
            pending[samples] = weights.double()

    def _formed(self, tile: Tile, settle: Settle, total: Tensor | None) -> None:
        M, d = self.parameter.shape
        # A sample in several tiles is alone in them; its gradient stays in memory from the first to the last.
        step = max(1, FORMED_ELEMENTS // (M * d))
        for k in range(0, len(tile.samples), step):
            samples = tile.samples[k : k + step]
            D, H = tile.D[k : k + step], tile.H[k : k + step] * self.upstream[samples, None, None]
            buffer = self._take("formed", len(samples))
            if tile.first:
                torch.bmm(H.transpose(1, 2), D, out=buffer)
            else:
                buffer.baddbmm_(H.transpose(1, 2), D)
            if not tile.last:
                continue
            for form in self.others.forms:
                form.form_transposed_into(buffer, samples)
            squared = squared_norms(buffer.view(len(samples), M, d))  # in any order, a few numbers at a time
            weights = settle(samples, squared)
            if weights is not None and total is not None:
                if not bool(squared.isfinite().all()):
                    buffer.masked_fill_(~squared.isfinite()[:, None, None], 0)
                total.view(-1).addmv_(buffer.view(len(samples), -1).T, weights.to(buffer.dtype))


def _gram_is_cheaper(tile: Tile) -> bool:
    """Both routes need D'H. Gram also needs D D', T products an element of D; formed, a few passes over d / T elements for it.

    Measured, a pass over a gradient costs about as much as a dozen of these short products.
    """
    _, length, width = tile.H.shape
    return length**2 < 12 * width
