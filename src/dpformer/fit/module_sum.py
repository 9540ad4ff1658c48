"""The clipped sum of any PyTorch module, as a query: for a training loop of your own. See docs/guides/my-model.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.fit.gradient_sum import (
    Groups,
    check_dropout,
    check_precision,
    check_room,
    clipped_sensitivity,
    whole_sums,
)
from dpformer.fit.workers import add_rounded
from dpformer.privacy import PrivacyPlan, Sample
from dpformer.privacy.plan import GRADIENTS

# losses(people, drawn): one loss for each person drawn, `[len(drawn)]`; `drawn` are places of people.
Losses = Callable[[Any, Tensor], Tensor]


class ModuleGradientSum:
    """The sum of the clipped gradients of a module over the people drawn. See `privacy.query.Query`.

    losses(people, drawn): the loss of each person drawn, which may depend on that person and the parameters alone.
    micro_batch: people at a time, a matter of memory.
    """

    name = GRADIENTS

    def __init__(self, clipping: PhantomClipping, losses: Losses, plan: PrivacyPlan, micro_batch: int = 64) -> None:
        self.clipping, self.losses, self.micro_batch = clipping, losses, micro_batch
        self.groups = Groups.of(plan.users, plan.rate)

    @property
    def bound(self) -> float:
        """The clipping norm C."""
        return self.clipping.clip.max_norm

    @property
    def numbers(self) -> int:
        """How many numbers the module learns."""
        return sum(p.numel() for _, p in self._parameters())

    def sensitivity(self, grid: float) -> float:
        """As that of `GradientSum`."""
        return clipped_sensitivity(self.bound, self.groups.most, self.numbers, grid)

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names."""
        check_precision(self.clipping.module)
        check_dropout(self.clipping.module)
        check_room(len(sample.drawn), self.bound, grid)
        parameters = self._parameters()
        totals = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for _, p in parameters]
        random = torch.get_rng_state()
        for users in self.groups.split(sample.drawn).values():
            # The micro-batches of a group are added in float64: rounding in a long float32 sum grows with its length.
            sums = [torch.zeros_like(total) for total in totals]
            for drawn in torch.from_numpy(users).split(self.micro_batch):
                for _, p in parameters:
                    p.grad = torch.zeros_like(p)
                self.clipping.backward(partial(self.losses, people, drawn))
                for (_, p), own in zip(parameters, sums, strict=True):
                    own += cast(Tensor, p.grad)
            for own, total in zip(sums, totals, strict=True):
                add_rounded(total, own, 1 / grid)
        if not torch.equal(torch.get_rng_state(), random):
            raise PrivacyError(
                "the losses drew random numbers from torch (dropout?): one person's leaving would change those of all others; "
                "nothing was released. Call eval() on the module, or draw none"
            )
        return whole_sums([name for name, _ in parameters], totals)

    def _parameters(self) -> list[tuple[str, torch.nn.Parameter]]:
        return [(name, p) for name, p in self.clipping.module.named_parameters() if p.requires_grad]
