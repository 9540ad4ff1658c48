"""Record what a run asks of its Curator, and measure every query through Curators whose noise and draw are frozen.

    moved    |A(people) - A(neighbour)|               for one person after the other, noise 0, the same draw, the same masks
    beyond   |A(people) - A(neighbour) - A(alone)|    what a person's leaving changes for others: 0 for statistics

A(.) is the answer of the Curator that the run has, so a defect in it or in the query shows. Ledgers are in memory, and nothing
is released. The idea is that of Re:cord-play (arXiv 2602.17454).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpformer.data import Sequences
from dpformer.privacy import Answer, Curator, Keys, PrivacyPlan, Query, Sample
from dpformer.privacy.chain import Chain, Line, Position
from dpformer.privacy.ledger import Entry, Ledger
from dpformer.privacy.plan import GRADIENTS
from dpformer.trust.verify.people import emptied

MakeCurator = Callable[..., Curator[Any]]
Sums = Mapping[str, np.ndarray]


class Delegate:
    """A query that is another one but for what a subclass changes."""

    def __init__(self, query: Query[Any]) -> None:
        self.query = query

    def __getattr__(self, name: str) -> Any:
        return getattr(self.query, name)

    def sum(self, people: Any, sample: Sample, grid: float) -> Sums:
        """As the query's, in whole steps; keeps the sample."""
        self.sample = sample
        return self.query.sum(people, sample, grid)


class InMemory(Chain):
    """The chain of a ledger that is not written anywhere: nothing that it charges is released."""

    def __init__(self) -> None:
        self.position = Position(0, "")

    def append(self, fields: Line) -> None:
        """Count a line."""
        self.position = Position(self.position.entries + 1, "")

    def close(self) -> None:
        """There is nothing to close."""


def ledger_at(plan: PrivacyPlan, place: int) -> Ledger:
    """A ledger in memory in which all before `place` is charged."""
    return Ledger(InMemory(), "in memory", plan, [Entry(plan.planned(k).name, "") for k in range(place)])


def keys_at(place: int) -> Keys:
    """New keys at a place."""
    return Keys.restored({"secret": secrets.token_hex(32), "place": place, "seeded": False})


def no_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    """Frozen noise."""
    return np.zeros(shape, dtype=np.int64)


@dataclass(frozen=True)
class Asked:
    """One answer with all that was measured of it. sums: without noise. D, moved, beyond, nobody: in steps of the grid."""

    name: str
    place: int
    key: bytes
    drawn: np.ndarray
    sums: Sums
    answer: Answer
    multiplier: float
    D: float
    bound: float
    moved: float
    beyond: float
    nobody: float
    left: int

    @property
    def std(self) -> float:
        """Of the noise by the plan, in steps of the grid."""
        return self.multiplier * self.D

    @property
    def noise(self) -> dict[str, np.ndarray]:
        """What was added to the sum, in units of the plan's standard deviation, by label."""
        return residual(self.answer, self.sums, self.std, self.place)

    @property
    def described(self) -> tuple[object, ...]:
        """All of the query that may depend on answers alone."""
        shapes = tuple(sorted((name, value.shape) for name, value in self.answer.values.items()))
        return self.name, self.bound, self.D, self.answer.grid, self.answer.noise_std, shapes


def residual(answer: Answer, sums: Sums, std: float, place: int) -> dict[str, np.ndarray]:
    """(answer - sums) / std by label, flat."""
    return {
        f"{answer.name} {place} {name}": ((value / answer.grid - sums[name]) / std).ravel()
        for name, value in answer.values.items()
    }


class Recorder:
    """A Curator of a run that is recorded. neighbours: whether each query is measured on people who leave."""

    neighbours = True

    def __init__(
        self,
        make: MakeCurator,
        people: Sequences,
        plan: PrivacyPlan,
        ledger: Ledger,
        keys: Keys,
    ) -> None:
        self._make, self._people = make, people
        self.curator, self.plan, self.ledger, self.keys = make(people, plan, ledger, keys), plan, ledger, keys
        self.asked: list[Asked] = []
        self._queries: list[Query[Any]] = []

    @property
    def keep(self) -> Any:
        """See `Curator.keep`."""
        return self.curator.keep

    @keep.setter
    def keep(self, keep: Any) -> None:
        self.curator.keep = keep

    def ask(self, query: Query[Any]) -> Answer:
        """The Curator's answer; the query is measured before the next one is asked."""
        state, place, planned = self.keys.state(), self.keys.place, self.plan.planned(self.keys.place)
        key, delegate = self.keys.sample(), Delegate(query)
        answer = self.curator.ask(delegate)
        report = getattr(query, "report", None)

        def frozen(people: Sequences) -> Sums:
            ledger, keys = ledger_at(self.plan, place), Keys.restored(state)
            drawn = delegate.sample.drawn
            curator = self._make(people, self.plan, ledger, keys, noise=no_noise, draw=lambda *_: drawn)
            return {name: value / answer.grid for name, value in curator.ask(query).values.items()}

        sums = frozen(self._people)
        moved, beyond, left = 0.0, 0.0, self._leaving(query.name, place, delegate.sample.drawn)
        everybody = np.arange(len(self._people))
        for person in left:
            change = difference(sums, frozen(emptied(self._people, [person])))
            moved = max(moved, norm(change))
            beyond = max(beyond, norm(difference(change, frozen(emptied(self._people, np.delete(everybody, person))))))
        nobody = norm(frozen(emptied(self._people, everybody))) if self.neighbours else 0.0
        if report is not None:
            query.report = report  # of the run's own sum
        D = query.sensitivity(answer.grid)
        self.asked.append(
            Asked(
                *(query.name, place, key, delegate.sample.drawn, sums, answer, planned.noise_multiplier),
                *(D, query.bound, moved, beyond, nobody, len(left)),
            )
        )
        self._queries.append(query)
        return answer

    def _leaving(self, name: str, place: int, drawn: np.ndarray) -> list[int]:
        """All people for a statistic. A third of those drawn for a step, another third for the next one."""
        if not self.neighbours:
            return []
        return [int(k) for k in (drawn[place % 3 :: 3] if name == GRADIENTS else drawn)]

    def draws(self, wanted: int) -> Iterator[dict[str, np.ndarray]]:
        """The noise of all answers; of statistics with few numbers, from more answers with other keys."""
        for asked, query in zip(self.asked, self._queries, strict=True):
            yield asked.noise
            numbers = sum(value.size for value in asked.sums.values())
            for again in range(0 if query.name == GRADIENTS else math.ceil(wanted / numbers) - 1):
                ledger, keys = ledger_at(self.plan, asked.place), keys_at(asked.place)
                answer = self._make(self._people, self.plan, ledger, keys).ask(query)
                noise = residual(answer, asked.sums, asked.std, asked.place)
                yield {f"{name} again {again}": value for name, value in noise.items()}


class Repeating(Recorder):
    """Sums over its people as the run does, and gives the answers of another recording."""

    neighbours = False

    def __init__(self, recorded: list[Asked], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._recorded = iter(recorded)

    def ask(self, query: Query[Any]) -> Answer:
        """The recorded answer."""
        super().ask(query)
        return next(self._recorded).answer


def difference(a: Sums, b: Sums) -> Sums:
    """a - b, by name."""
    return {name: a[name] - b[name] for name in a}


def norm(steps: Sums) -> float:
    """L2 over all arrays."""
    return math.sqrt(sum(float(np.sum(np.square(value.astype(np.float64)))) for value in steps.values()))
