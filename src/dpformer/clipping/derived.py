"""Functions of parameters alone, before the batch comes in: `1 + w`, `softmax(p)`, weight norm, a table for relative positions.

The result is treated as a parameter of its own: it is used by the rules, and each sample's gradient G_i at it is formed there. A
vector-Jacobian product carries G_i to the parameters that it was computed from, for a few samples at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dpformer.clipping.algebra import Form, Lazy
from dpformer.clipping.gradient import matrix_shape


@dataclass(frozen=True)
class Derived:
    """`output` is a function of `sources`, with its autograd graph, which is apart from that of the losses."""

    output: Tensor
    sources: tuple[nn.Parameter, ...]

    def pull(self, at: nn.Parameter, forms: list[Form], batch: int) -> Iterator[tuple[nn.Parameter, Form]]:
        """What `forms`, the gradients at the output, add to the gradient of each source. at: the output as a parameter."""
        shape = matrix_shape(at.shape)

        def compute(source: nn.Parameter, samples: slice) -> Tensor:
            count = samples.stop - samples.start
            gradient = at.new_zeros(count, *shape)
            for form in forms:
                form.form_into(gradient, samples)
            pulled = self._product(source, gradient.view(count, *at.shape))
            return source.new_zeros(count, *source.shape) if pulled is None else pulled

        for source in self.sources:
            yield source, Lazy(partial(compute, source), 2 * at.numel() + source.numel())

    def _product(self, source: nn.Parameter, gradient: Tensor) -> Tensor | None:
        """`[b, *source.shape]` from `[b, *output.shape]`, or None if the output does not depend on the source."""
        rest = {"retain_graph": True, "allow_unused": True}
        if len(gradient) > 1:
            try:
                (pulled,) = torch.autograd.grad(self.output, source, gradient, is_grads_batched=True, **rest)
            except RuntimeError:  # a function that cannot be batched: one at a time
                pass
            else:
                return pulled
        each = [torch.autograd.grad(self.output, source, one, **rest)[0] for one in gradient]
        return None if each[0] is None else torch.stack(each)
