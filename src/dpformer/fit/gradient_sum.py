"""The clipped sum of a step, as a query.

    sum over the people drawn of c_i g_i        in whole steps of the grid

The sum is in groups of people by place; see `training.groups` for its sensitivity.

The shape in which a person is computed, in a micro-batch and in a tile of the head, depends on that person's length alone
(`data.batches`, `clipping.tiles`). Else a long person who leaves would change the padding of others; those who are alike would
all round the same other way, and their differences would add up. Which worker or process has a group is a matter of speed alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dpformer.clipping.tiles import row_budget
from dpformer.data import MicroBatch, Sequences, micro_batches
from dpformer.fit.workers import Team
from dpformer.models import Network
from dpformer.models.dropout import is_random
from dpformer.privacy import Sample
from dpformer.privacy.plan import GRADIENTS
from dpformer.training.groups import Groups, check_dropout, check_precision, check_room, whole_sums
from dpformer.training.masks import PersonMasks
from dpformer.training.module_sum import Report


@dataclass(frozen=True)
class Budget:
    """How much a micro-batch may hold: items of a history, positions with padding, rows of the head, columns of the table."""

    max_length: int
    tokens: int
    rows: int
    columns: int


class GradientSum:
    """The clipped sum of a network's gradients over the people drawn. See `privacy.query.Query`.

    `team` has the network and, unless it trains without privacy, its clipping.
    """

    name = GRADIENTS
    processes = 1  # that share the groups of a batch

    def __init__(self, team: Team, groups: Groups, max_length: int, token_budget: int) -> None:
        self.team, self.groups = team, groups
        self._max_length, self._token_budget = max_length + 1, token_budget
        self._numbered: tuple[Sequences, Sequences] | None = None
        self.report = Report()

    @property
    def model(self) -> Network:
        """The network."""
        return self.team.first.model

    @property
    def bound(self) -> float:
        """The clipping norm C; 1 without clipping, where no noise is added."""
        clipping = self.team.first.clipping
        return 1.0 if clipping is None else clipping.clip.max_norm

    @property
    def numbers(self) -> int:
        """How many numbers the network learns."""
        return sum(p.numel() for p in self.model.parameters())

    def sensitivity(self, grid: float) -> float:
        """C / g (1 + 1e-6 + m 2^-21) + sqrt(d); see `training.groups`."""
        return self.groups.sensitivity(self.bound, self.numbers, grid)

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """int64 sums by the parameters' names."""
        return self.sum_groups(people, self.groups.split(sample.drawn), grid, sample.key)

    def sum_groups(
        self, people: Sequences, groups: Mapping[int, np.ndarray], grid: float, key: bytes
    ) -> dict[str, np.ndarray]:
        """The sum over some groups of people, by their numbers."""
        check_precision(self.model)
        check_dropout(self.model)
        users = sum(len(part) for part in groups.values())
        if self.team.first.clipping is not None:
            check_room(users, self.bound, grid)
        rows = self._rows(people)
        budget = self._budget()
        # Which worker has a group depends on its number alone.
        parts: list[list[Iterator[MicroBatch]]] = [[] for _ in range(self.team.size)]
        for number, part in groups.items():
            # A person with less than a pair of items adds nothing, and is drawn all the same.
            paired = part[rows.lengths[part] > 1]
            if len(paired):
                parts[number // self.processes % self.team.size].append(_cut(rows, paired, budget))
        masks = (lambda users: PersonMasks(key, users)) if is_random(self.model) else None
        totals, loss, nonfinite = self.team.sum(parts, grid, masks)
        self.report = Report(users, loss, nonfinite)
        return whole_sums([name for name, _ in self.model.named_parameters()], totals)

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

    def _budget(self) -> Budget:
        # The head keeps a row of the catalogue's width for each token; of a long person one for each column of the table.
        rows = row_budget(len(self.model.table), self._token_budget)
        size = self.team.size
        return Budget(
            self._max_length, max(1, self._token_budget // size), max(1, rows // size), self.model.table.shape[1]
        )


def _cut(rows: Sequences, users: np.ndarray, budget: Budget) -> Iterator[MicroBatch]:
    return micro_batches(
        rows,
        users,
        max_length=budget.max_length,
        token_budget=budget.tokens,
        row_budget=budget.rows,
        longest=budget.columns,
    )
