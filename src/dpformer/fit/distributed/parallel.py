"""The clipped sum of a step, computed by several processes: rank 0 asks, and the others follow.

    rank 0                                              the others (`follow`)
    is asked by the Curator for the sum of a sample
    tells grid and key, deals the people out         -> each sums the groups that are its own
    compares weights, data and settings of all       <- send theirs
    adds up all sums, as whole numbers               <- send theirs

Which process has a group depends on the group's number alone, and whole numbers add up to the same in any order: so a run may go
on with another number of processes. The Curator with its noise and ledger is rank 0's; the others hold people's data, and hand
out sums to rank 0 only.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpformer.data import Sequences
from dpformer.errors import RankError
from dpformer.fit.distributed.ranks import Ranks
from dpformer.fit.gradient_sum import GradientSum, Report
from dpformer.privacy import Sample


class ParallelGradientSum(GradientSum):
    """A `GradientSum` whose groups are shared out over the ranks. `about` must be the same on all of them."""

    def __init__(self, inner: GradientSum, ranks: Ranks, about: str) -> None:
        self.__dict__.update(inner.__dict__)
        self.ranks, self.processes, self._about = ranks, ranks.size, about

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """On rank 0: the sum of all ranks."""
        self.ranks.broadcast_bytes(struct.pack("<d", grid) + sample.key)
        owner = sample.drawn // self.groups.block % self.ranks.size
        mine = self.ranks.deal([sample.drawn[owner == rank] for rank in range(self.ranks.size)])
        return self._sum_over_ranks(people, mine, grid, sample.key)

    def follow(self, people: Sequences) -> None:
        """On the others: take part in one sum of rank 0's."""
        header = self.ranks.broadcast_bytes()
        self._sum_over_ranks(people, self.ranks.deal(), struct.unpack("<d", header[:8])[0], header[8:])

    def _sum_over_ranks(self, people: Sequences, mine: np.ndarray, grid: float, key: bytes) -> dict[str, np.ndarray]:
        sums = self.sum_groups(people, self.groups.split(mine), grid, key)
        seen = self.report
        # Here rank 0 waits for the slowest; then all parts of the sum are complete.
        said = self.ranks.gather([self._about, self._weights(), seen.users, seen.loss, seen.nonfinite])
        _check_alike(said)
        if said:
            self.report = Report(*(sum(one[k] for one in said) for k in (2, 3, 4)))
        tensors = {name: torch.from_numpy(value).to(self.ranks.device) for name, value in sums.items()}
        self.ranks.sum_to_first_(list(tensors.values()))
        return {name: value.cpu().numpy() for name, value in tensors.items()}

    def _weights(self) -> str:
        return digest(*(value.detach().cpu().numpy() for value in self.model.state_dict().values()))


def _check_alike(said: list[list[Any]]) -> None:
    """All processes must be at the same step of the same training, before anything is charged."""
    for rank, other in enumerate(said):
        for what, mine, theirs in zip(("data or settings", "weights"), said[0], other, strict=False):
            if mine != theirs:
                raise RankError(
                    f"Rank {rank} and rank 0 have different {what}; the step was not made or charged. Install the same dpformer "
                    "and torch on all machines"
                )


def digest(*arrays: np.ndarray) -> str:
    """A SHA-256 over arrays, their shapes and types."""
    result = hashlib.sha256()
    for array in arrays:
        result.update(str((array.shape, array.dtype.str)).encode())
        result.update(np.ascontiguousarray(array).reshape(-1).data)
    return result.hexdigest()
