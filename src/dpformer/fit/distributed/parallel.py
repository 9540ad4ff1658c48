"""The clipped sum of a step, computed by several processes: rank 0 asks, and the others follow.

    rank 0                                              the others (`follow`)
    is asked by the Curator for the sum of a sample
    sends grid, key and weights, deals the people out -> each sums the groups that are its own
    adds up all sums, as whole numbers                <- send theirs

Which process has a group depends on the group's number alone, and whole numbers add up to the same in any order: so a run may go
on with another number of processes. The Curator with its noise and ledger is rank 0's; the others hold people's data, and send
sums to rank 0 only. They keep nothing from step to step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpformer.data import Sequences
from dpformer.fit.distributed.ranks import Ranks
from dpformer.fit.gradient_sum import GradientSum
from dpformer.privacy import Sample
from dpformer.training.module_sum import Report


class ParallelGradientSum(GradientSum):
    """A `GradientSum` whose groups are shared out over the ranks."""

    def __init__(self, inner: GradientSum, ranks: Ranks) -> None:
        self.__dict__.update(inner.__dict__)
        self.ranks, self.processes = ranks, ranks.size

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """On rank 0: the sum of all ranks."""
        order = {"grid": grid, "key": sample.key.hex()}
        self.ranks.broadcast(order)
        owner = sample.drawn // self.groups.block % self.ranks.size
        parts = [sample.drawn[owner == rank] for rank in range(self.ranks.size)]
        return self._sum_over_ranks(people, self.ranks.deal(parts), order)

    def follow(self, people: Sequences, order: Mapping[str, Any], stop: bool) -> None:
        """On the others: take part in the sum that rank 0 has ordered. stop: was this process asked to stop?"""
        self._sum_over_ranks(people, self.ranks.deal(), order, stop)

    def _sum_over_ranks(
        self, people: Sequences, mine: np.ndarray, order: Mapping[str, Any], stop: bool = False
    ) -> dict[str, np.ndarray]:
        buffers = [
            buffer for buffer in self.model.buffers() if buffer.is_floating_point()
        ]  # tracked variances change too
        self.ranks.share_([*(p.data for p in self.model.parameters()), *buffers])
        self.model.train()
        sums = self.sum_groups(people, self.groups.split(mine), order["grid"], bytes.fromhex(order["key"]))
        own = self.report
        # Here rank 0 waits for the slowest; then all parts of the sum are complete.
        reports = self.ranks.gather([own.users, own.loss, own.nonfinite, stop])
        if reports:
            users, loss, nonfinite, stops = (sum(values) for values in zip(*reports, strict=True))
            self.report = Report(users, loss, nonfinite, stops > 0)
        tensors = {name: torch.from_numpy(value) for name, value in sums.items()}
        self.ranks.sum_to_first_(list(tensors.values()))
        return {name: value.numpy() for name, value in tensors.items()}
