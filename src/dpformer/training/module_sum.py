"""The clipped sum of any PyTorch module, as a query that is computed micro-batch by micro-batch before it is asked.

sample, grid = curator.upcoming(query)
for places in query.start(sample, grid):      # the people of one micro-batch
    query.add(lambda: losses of these people)
answer = curator.ask(query)                   # refused unless exactly these people were added
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.models.dropout import is_random, use_masks
from dpformer.privacy import Sample
from dpformer.privacy.plan import GRADIENTS
from dpformer.training.groups import (
    Groups,
    add_rounded,
    check_dropout,
    check_precision,
    check_room,
    whole_sums,
)
from dpformer.training.masks import PersonMasks
from dpformer.training.randomness import random_states, same_states

Losses = Callable[[], Tensor]


@dataclass
class Report:
    """What the last sum tells the one who runs it. Computed on private data without noise: never released.

    stop: another process that took part was asked to stop.
    """

    users: int = 0
    loss: float = 0.0
    nonfinite: int = 0
    stop: bool = False


class ModuleSum:
    """The sum of the clipped gradients of a module over the people drawn. See `privacy.query.Query`.

    The loss of a person may depend on that person and the parameters alone. clipping: None only for a plan with epsilon inf.
    micro_batch: people at a time, a matter of memory. No micro-batch has people of two groups.
    """

    name = GRADIENTS

    def __init__(self, module: nn.Module, clipping: PhantomClipping | None, groups: Groups, micro_batch: int) -> None:
        self.module, self.clipping, self.groups, self.micro_batch = module, clipping, groups, micro_batch
        self.report = Report()
        self._sample, self._grid = Sample(np.zeros(0, dtype=np.int64), b""), 1.0
        self._parts: list[tuple[int, np.ndarray]] = []
        self._added = 0
        self._own: list[Tensor] = []
        self._totals: list[Tensor] | None = None

    @property
    def bound(self) -> float:
        """The clipping norm C; 1 without clipping, where no noise is added."""
        return 1.0 if self.clipping is None else self.clipping.clip.max_norm

    @property
    def numbers(self) -> int:
        """How many numbers the module learns."""
        return sum(p.numel() for _, p in trainable(self.module))

    @property
    def missing(self) -> int:
        """How many micro-batches are not added yet."""
        return len(self._parts) - self._added

    def sensitivity(self, grid: float) -> float:
        """C / g (1 + 1e-6 + m 2^-21) + sqrt(d); see `training.groups`."""
        return self.groups.sensitivity(self.bound, self.numbers, grid)

    def start(self, sample: Sample, grid: float) -> list[np.ndarray]:
        """Begin the sum over a sample: the places of the people of each micro-batch, in the order in which `add` wants them."""
        check_precision(self.module)
        check_dropout(self.module)
        if self.clipping is not None:
            check_room(len(sample.drawn), self.bound, grid)
        self._sample, self._grid, self._added, self.report = sample, grid, 0, Report()
        self._parts = [
            (group, part)
            for group, drawn in self.groups.split(sample.drawn).items()
            for part in np.split(drawn, range(self.micro_batch, len(drawn), self.micro_batch))
        ]
        parameters = trainable(self.module)
        self._totals = [torch.zeros(p.shape, dtype=torch.float64, device=p.device) for _, p in parameters]
        self._own = [torch.zeros_like(total) for total in self._totals]
        return [part for _, part in self._parts]

    def add(self, compute_losses: Losses) -> None:
        """Add the clipped gradients of the next micro-batch; `compute_losses` returns one loss for each of its people."""
        if not self.missing or self._totals is None:
            raise PrivacyError("no micro-batch is left to add; start the next sum")
        group, places = self._parts[self._added]
        parameters = trainable(self.module)
        if used := [name for name, p in parameters if p.grad is not None]:
            raise PrivacyError(
                f"parameter {used[0]!r} has a gradient that was not made here; leave out backward(): it adds up gradients "
                "without clipping"
            )
        try:
            self._clip(compute_losses, places)
            # Micro-batches of a group are added in float64: rounding in a long float32 sum grows with its length.
            for (_, p), own in zip(parameters, self._own, strict=True):
                own += cast(Tensor, p.grad)
        finally:
            for _, p in parameters:
                p.grad = None
        self._added += 1
        if not self.missing or self._parts[self._added][0] != group:
            for own, total in zip(self._own, self._totals, strict=True):
                add_rounded(total, own, 1 / self._grid)
                own.zero_()

    def _clip(self, compute_losses: Losses, places: np.ndarray) -> None:
        """Put the clipped sum of a micro-batch into `.grad`."""
        random = random_states()
        values: list[Tensor] = []

        def losses() -> Tensor:
            found = compute_losses()
            if not isinstance(found, Tensor) or found.shape != (len(places),):
                shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
                raise PrivacyError(
                    f"the loss has shape {shape}, not [{len(places)}]: it must be one number for each person of the batch. Use "
                    "reduction='none' and average over each person's own positions"
                )
            values.append(found.detach())
            return found

        masks = PersonMasks(self._sample.key, places) if is_random(self.module) else None
        use_masks(self.module, masks)
        try:
            if self.clipping is not None:
                before = self.clipping.nonfinite
                self.clipping.backward(losses)
                self.report.nonfinite += self.clipping.nonfinite - before
            else:
                losses().sum().backward()
                for _, p in trainable(self.module):
                    p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        finally:
            use_masks(self.module, None)
        if not same_states(random, random_states()):
            raise PrivacyError(
                "the losses drew random numbers (dropout?): one person's leaving would change those of all others; "
                "nothing was released. Call eval() on the module, or draw none"
            )
        self.report.users += len(places)
        self.report.loss += float(torch.nan_to_num(values[0]).sum())

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names, of what was added; refused unless it is exactly this sample."""
        same = np.array_equal(sample.drawn, self._sample.drawn) and (sample.key, grid) == (self._sample.key, self._grid)
        if self._totals is None or self.missing or not same:
            raise PrivacyError("the sum is not over all of the people drawn; start it, and add each micro-batch once")
        totals, self._totals, self._own = self._totals, None, []
        return whole_sums([name for name, _ in trainable(self.module)], totals)


def trainable(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """The parameters that steps change, by name; a shared one once."""
    return [(name, p) for name, p in module.named_parameters() if p.requires_grad]
