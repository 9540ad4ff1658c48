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


def flat(sums: Sums) -> np.ndarray:
    """All arrays as one vector in float64, in the order of their names."""
    return np.concatenate([sums[name].ravel().astype(np.float64) for name in sorted(sums)])


def residual(answer: Answer, sums: Sums, std: float, place: int) -> dict[str, np.ndarray]:
    """(answer - sums) / std by label, flat."""
    return {
        f"{answer.name} {place} {name}": ((value / answer.grid - sums[name]) / std).ravel()
        for name, value in answer.values.items()
    }


def described(query: Query[Any], answer: Answer) -> tuple[object, ...]:
    """All of a query that may depend on earlier answers alone."""
    shapes = tuple(sorted((name, value.shape) for name, value in answer.values.items()))
    return query.name, query.bound, query.sensitivity(answer.grid), answer.grid, answer.noise_std, shapes


@dataclass(frozen=True)
class Asked:
    """One answer with all that was measured of it. sums: without noise. D, std, moved, beyond, nobody: in steps of the grid.

    D: the query's sensitivity. std: of the noise by the plan. left: how many people left in turn.
    """

    query: Query[Any]
    place: int
    key: bytes
    drawn: np.ndarray
    sums: Sums
    answer: Answer
    D: float
    std: float
    moved: float
    beyond: float
    nobody: float
    left: int

    @property
    def name(self) -> str:
        """Of the query."""
        return self.query.name

    @property
    def numbers(self) -> int:
        """How many the answer has."""
        return sum(value.size for value in self.sums.values())


class Watched:
    """Stands where a run has its Curator, and passes queries on to it."""

    def __init__(self, make: MakeCurator, people: Sequences, plan: PrivacyPlan, ledger: Ledger, keys: Keys) -> None:
        self._make, self._people = make, people
        self.curator, self.plan, self.ledger, self.keys = make(people, plan, ledger, keys), plan, ledger, keys

    @property
    def keep(self) -> Any:
        """See `Curator.keep`."""
        return self.curator.keep

    @keep.setter
    def keep(self, keep: Any) -> None:
        self.curator.keep = keep

    def ask(self, query: Query[Any]) -> Answer:
        """The Curator's answer."""
        return self.curator.ask(query)


class Recorder(Watched):
    """Measures each query before the next one is asked."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.asked: list[Asked] = []

    def ask(self, query: Query[Any]) -> Answer:
        """The Curator's answer."""
        state, place = self.keys.state(), self.keys.place
        key, delegate = self.keys.sample(), Delegate(query)
        answer = self.curator.ask(delegate)
        drawn, report = delegate.sample.drawn, getattr(query, "report", None)

        def frozen(people: Sequences) -> Sums:
            ledger, keys = ledger_at(self.plan, place), Keys.restored(state)
            curator = self._make(people, self.plan, ledger, keys, noise=no_noise, draw=lambda *_: drawn)
            return {name: value / answer.grid for name, value in curator.ask(query).values.items()}

        sums, everybody = frozen(self._people), np.arange(len(self._people))
        # All people for a statistic. A third of those drawn for a step, another third for the next one.
        leaving = drawn[place % 3 :: 3] if query.name == GRADIENTS else drawn
        moved, beyond = [0.0], [0.0]
        for person in leaving:
            change = flat(sums) - flat(frozen(emptied(self._people, [person])))
            alone = flat(frozen(emptied(self._people, np.delete(everybody, person))))
            moved.append(float(np.linalg.norm(change)))
            beyond.append(float(np.linalg.norm(change - alone)))
        nobody = float(np.linalg.norm(flat(frozen(emptied(self._people, everybody)))))
        if report is not None:
            query.report = report  # of the run's own sum
        D = query.sensitivity(answer.grid)
        std = self.plan.planned(place).noise_multiplier * D
        measured = (float(np.max(moved)), float(np.max(beyond)), nobody, len(leaving))
        self.asked.append(Asked(query, place, key, drawn, sums, answer, D, std, *measured))
        return answer

    def draws(self, wanted: int) -> Iterator[dict[str, np.ndarray]]:
        """The noise of all answers over its planned size; of statistics with few numbers, also of more answers."""
        for asked in self.asked:
            yield residual(asked.answer, asked.sums, asked.std, asked.place)
            for again in range(0 if asked.name == GRADIENTS else math.ceil(wanted / asked.numbers) - 1):
                ledger, keys = ledger_at(self.plan, asked.place), keys_at(asked.place)
                answer = self._make(self._people, self.plan, ledger, keys).ask(asked.query)
                noise = residual(answer, asked.sums, asked.std, asked.place)
                yield {f"{name} again {again}": value for name, value in noise.items()}


class Repeating(Watched):
    """Sums over its people as the run does, and gives the answers of another recording."""

    def __init__(self, recorded: list[Asked], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers = iter([asked.answer for asked in recorded])
        self.described: list[tuple[object, ...]] = []

    def ask(self, query: Query[Any]) -> Answer:
        """The recorded answer."""
        self.described.append(described(query, super().ask(query)))
        return next(self._answers)
