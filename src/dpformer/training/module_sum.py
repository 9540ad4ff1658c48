"""The clipped sum of any PyTorch module, computed micro-batch by micro-batch before it is asked.

sample, grid = curator.upcoming(query)
for places in query.start(sample, grid):      # the people of one micro-batch
    query.add(lambda: losses of these people)
answer = curator.ask(query)                   # refused unless exactly these people were added
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor, nn

from dpformer.clipping import PhantomClipping
from dpformer.errors import PrivacyError
from dpformer.privacy import Sample
from dpformer.training.clipped_sum import ClippedSum, GroupSums, Losses, Report, add_gradients, trainable
from dpformer.training.groups import Groups
from dpformer.training.randomness import random_states, same_states
from dpformer.training.ranks import SINGLE, Ranks

_INCOMPLETE = "the sum is not over all of the people drawn; start it, and add each micro-batch once"


class ModuleSum(ClippedSum):
    """The clipped sum of a module whose losses come from outside: the loss of a person may depend on that person and the
    parameters alone. micro_batch: people at a time, a matter of memory. No micro-batch has people of two groups.
    """

    def __init__(
        self,
        module: nn.Module,
        clipping: PhantomClipping | None,
        groups: Groups,
        micro_batch: int,
        ranks: Ranks = SINGLE,
    ) -> None:
        super().__init__(module, clipping, groups)
        self.micro_batch, self.ranks = micro_batch, ranks
        self._sample, self._grid = Sample(np.zeros(0, dtype=np.int64), b""), 1.0
        self._parts: list[tuple[int, np.ndarray]] = []
        self._added = 0
        self._sums: GroupSums | None = None

    @property
    def missing(self) -> int:
        """How many micro-batches are not added yet."""
        return len(self._parts) - self._added

    def start(self, sample: Sample, grid: float) -> list[np.ndarray]:
        """Begin the sum over a sample: the places of the people of each micro-batch, in the order in which `add` wants them.

        Of several processes rank 0 calls it, and gets its own part; the others call `start_part`.
        """
        if self.ranks.size > 1 and self._sums is not None:
            raise PrivacyError(
                "a step was left unfinished; under torchrun, leave the loop after `step` has returned True"
            )
        self._sample = sample
        return self._start(self.order(sample, grid).drawn, grid)

    def start_part(self, order: Mapping[str, Any]) -> tuple[list[np.ndarray], bytes]:
        """On the others: begin what rank 0 has ordered; returns the places, and the key of the step."""
        self._sample, grid = self.follow(order)
        return self._start(self._sample.drawn, grid), self._sample.key

    def _start(self, drawn: np.ndarray, grid: float) -> list[np.ndarray]:
        self.check(len(drawn), grid)
        self._grid, self._added, self.report = grid, 0, Report()
        self._parts = [
            (group, part)
            for group, drawn in self.groups.split(drawn).items()
            for part in np.split(drawn, range(self.micro_batch, len(drawn), self.micro_batch))
        ]
        self._sums = GroupSums()
        self._sums.start(self.module)
        return [part for _, part in self._parts]

    def add(self, compute_losses: Losses) -> None:
        """Add the clipped gradients of the next micro-batch; `compute_losses` returns one loss for each of its people."""
        if not self.missing or self._sums is None:
            raise PrivacyError("no micro-batch is left to add; start the next sum")
        group, places = self._parts[self._added]
        parameters = trainable(self.module)
        if used := [name for name, p in parameters if p.grad is not None]:
            raise PrivacyError(
                f"parameter {used[0]!r} has a gradient that was not made here; leave out backward(): it adds up gradients "
                "without clipping"
            )
        try:
            self._sums.attach(self.module)
            self._clip(compute_losses, places)
            self._sums.take()
        finally:
            for _, p in parameters:
                p.grad = None
        self._added += 1
        if not self.missing or self._parts[self._added][0] != group:
            self._sums.end_group(self._grid)

    def _clip(self, compute_losses: Losses, places: np.ndarray) -> None:
        """Put the clipped sum of a micro-batch into `.grad`."""

        def losses() -> Tensor:
            values = compute_losses()
            if not isinstance(values, Tensor) or values.shape != (len(places),):
                shape = tuple(values.shape) if isinstance(values, Tensor) else type(values).__name__
                raise PrivacyError(
                    f"the loss has shape {shape}, not [{len(places)}]: it must be one number for each person of the batch. Use "
                    "reduction='none' and average over each person's own positions"
                )
            return values

        masks = self.masks(self._sample.key)
        random, nonfinite = random_states(), 0 if self.clipping is None else self.clipping.nonfinite
        loss = add_gradients(self.module, self.clipping, losses, None if masks is None else masks(places))
        if not same_states(random, random_states()):
            raise PrivacyError(
                "the losses drew random numbers (dropout?): one person's leaving would change those of all others; "
                "nothing was released. Call eval() on the module, or draw none"
            )
        self.report.users += len(places)
        self.report.loss += loss
        self.report.nonfinite += 0 if self.clipping is None else self.clipping.nonfinite - nonfinite

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names, of what was added; refused unless it is exactly this sample."""
        same = np.array_equal(sample.drawn, self._sample.drawn) and (sample.key, grid) == (self._sample.key, self._grid)
        if not same:
            raise PrivacyError(_INCOMPLETE)
        return self.collected()

    def collected(self) -> dict[str, np.ndarray]:
        """What was added: of all processes on rank 0, and sent there by the others."""
        if self._sums is None or self.missing:
            raise PrivacyError(_INCOMPLETE)
        totals, self._sums = self._sums.totals, None
        return self.collect(self.whole(totals))
