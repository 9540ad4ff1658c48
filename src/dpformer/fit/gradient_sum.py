"""The clipped sum of a step of the recommender: micro-batches are cut out of the sequences of the people drawn.

The shape in which a person is computed, in a micro-batch and in a tile of the head, depends on that person's length alone
(`data.batches`, `clipping.tiles`). Else a long person who leaves would change the padding of others; those who are alike would
all round the same other way, and their differences would add up. Which worker or process has a group is a matter of speed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from dpformer.clipping.tiles import row_budget
from dpformer.data import MicroBatch, Sequences, micro_batches
from dpformer.fit.workers import Team
from dpformer.models import Network
from dpformer.privacy import Sample
from dpformer.training.clipped_sum import ClippedSum, Report
from dpformer.training.groups import Groups

# Positions that take about as long as the fixed cost of a micro-batch: classes of lengths with fewer are joined. Measured on
# Amazon Games with histories of 13: steps of 256 people take 0.6 of the time, steps of 1,024 the same.
FIXED_COST = 4096


class GradientSum(ClippedSum):
    """The clipped sum of a network's gradients over the people drawn, by `team`, which has the network and its clipping."""

    def __init__(self, team: Team, groups: Groups, max_length: int, token_budget: int) -> None:
        super().__init__(team.first.model, team.first.clipping, groups)
        self.team = team
        self._max_length, self._token_budget = max_length + 1, token_budget
        # A function of the number of people alone, which is public.
        self._narrowest = max(1, FIXED_COST // groups.most)
        self._numbered: tuple[Sequences, Sequences] | None = None

    @property
    def model(self) -> Network:
        """The network."""
        return self.team.first.model

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names; on rank 0, of all processes."""
        mine = self.order(sample, grid)
        return self.collect(self.sum_groups(people, self.groups.split(mine.drawn), grid, mine.key))

    def take_part(self, people: Sequences, order: Mapping[str, Any], stop: bool) -> None:
        """On the other processes: sum the groups that are this one's, and send it to rank 0."""
        mine, grid = self.follow(order)
        self.model.train()
        self.collect(self.sum_groups(people, self.groups.split(mine.drawn), grid, mine.key), stop)

    def sum_groups(
        self, people: Sequences, groups: Mapping[int, np.ndarray], grid: float, key: bytes
    ) -> dict[str, np.ndarray]:
        """The sum over some groups of people, by their numbers."""
        users = sum(len(part) for part in groups.values())
        self.check(users, grid)
        rows = self._rows(people)
        # Which worker has a group depends on its number alone.
        parts: list[list[Iterator[MicroBatch]]] = [[] for _ in range(self.team.size)]
        for number, part in groups.items():
            # A person with less than a pair of items adds nothing, and is drawn all the same.
            paired = part[rows.lengths[part] > 1]
            if len(paired):
                parts[number // self.ranks.size % self.team.size].append(self._cut(rows, paired))
        totals, loss, nonfinite = self.team.sum(parts, grid, self.masks(key))
        self.report = Report(users, loss, nonfinite)
        return self.whole(totals)

    def _rows(self, people: Sequences) -> Sequences:
        """Each person's items that the network knows, by their rows: a matter of each person alone."""
        if self.model.chosen is None:
            return people
        if self._numbered is None or self._numbered[0] is not people:
            self._numbered = (people, people.renumbered(self.model.places().numpy()))
        return self._numbered[1]

    def forget_vocabulary(self) -> None:
        """The network has chosen another vocabulary."""
        self._numbered = None

    def _cut(self, rows: Sequences, users: np.ndarray) -> Iterator[MicroBatch]:
        """The micro-batches of some people: a worker's part of the tokens, and of the rows of the head, at a time."""
        # The head keeps a row of the catalogue's width for each token; of a long person one for each column of the table.
        items, columns = self.model.table.shape
        tokens, size = self._token_budget, self.team.size
        return micro_batches(
            rows,
            users,
            max_length=self._max_length,
            token_budget=max(1, tokens // size),
            row_budget=max(1, row_budget(items, tokens) // size),
            longest=columns,
            narrowest=self._narrowest,
        )
