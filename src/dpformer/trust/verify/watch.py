"""Watch a Curator: whom it asked, the sum before noise, and the answer. And Curators to watch, whose answers nobody sees."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.privacy import Answer, Curator, Keys, PrivacyPlan, Query, Sample, create_ledger
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.plan import GRADIENTS

Draw = Callable[[bytes, int, float], np.ndarray]


class Delegate:
    """A query that is another one but for what a subclass changes."""

    def __init__(self, query: Query[Any]) -> None:
        self.query = query

    @property
    def name(self) -> str:
        """As the query's."""
        return self.query.name

    @property
    def bound(self) -> float:
        """As the query's."""
        return self.query.bound

    @property
    def numbers(self) -> int:
        """As the query's."""
        return self.query.numbers

    def sensitivity(self, grid: float) -> float:
        """As the query's."""
        return self.query.sensitivity(grid)

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """As the query's."""
        return self.query.sum(people, sample, grid)


class _Kept(Delegate):
    """Keeps the sample and a copy of the sum."""

    sample: Sample
    sums: dict[str, np.ndarray]

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        sums = self.query.sum(people, sample, grid)
        self.sample, self.sums = sample, {name: value.copy() for name, value in sums.items()}
        return sums


class Blank:
    """A query that looks at nobody: its sum is 0, so its answer is noise alone."""

    bound = 1.0

    def __init__(self, name: str = GRADIENTS, shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.name, self._shapes = name, {"nothing": (1,)} if shapes is None else shapes

    @property
    def numbers(self) -> int:
        """How many numbers an answer has."""
        return sum(math.prod(shape) for shape in self._shapes.values())

    def sensitivity(self, grid: float) -> float:
        """That of a sum of vectors of norm 1."""
        return self.bound / grid

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """Zeros."""
        return {name: np.zeros(shape, dtype=np.int64) for name, shape in self._shapes.items()}


@dataclass(frozen=True)
class Asked:
    """One answer with all that belongs to it. key: of the draw of users. std: of its noise by the plan, in grid steps."""

    query: Query[Any]
    key: bytes
    sample: Sample
    sums: Mapping[str, np.ndarray]
    answer: Answer
    std: float

    @property
    def noise(self) -> dict[str, np.ndarray]:
        """What was added to the sum, in units of the plan's standard deviation."""
        grid = self.answer.grid
        return {name: (self.answer.values[name] / grid - value) / self.std for name, value in self.sums.items()}

    @property
    def on_grid(self) -> bool:
        """Is every number of the answer a whole multiple of the grid? Exact: the grid is a power of 2."""
        steps = [value / self.answer.grid for value in self.answer.values.values()]
        return all(bool((value == np.rint(value)).all()) for value in steps)


class Watched:
    """Hands queries to a Curator, and keeps what was asked and answered."""

    def __init__(self, curator: Curator[Any]) -> None:
        self.curator = curator
        self.asked: list[Asked] = []

    def ask(self, query: Query[Any]) -> Answer:
        """The Curator's answer."""
        key = self.curator.keys.sample()
        planned = self.curator.plan.planned(self.curator.keys.place)
        kept = _Kept(query)
        answer = self.curator.ask(kept)
        std = planned.noise_multiplier * query.sensitivity(answer.grid)
        self.asked.append(Asked(query, key, kept.sample, kept.sums, answer, std))
        return answer

    @property
    def last(self) -> Asked:
        """The newest answer."""
        return self.asked[-1]

    @property
    def charged(self) -> list[str]:
        """The names in the Curator's ledger."""
        ledger = self.curator.ledger
        return [] if ledger is None else [entry.name for entry in ledger.account().entries]


class Curators:
    """Makes Curators of some people and a plan, each with a ledger and keys of its own. seed: for figures to repeat."""

    def __init__(self, people: Any, plan: PrivacyPlan, folder: Path, seed: int | None = None) -> None:
        self.people, self.plan = people, plan
        self._folder, self._seed = folder, seed
        self._ledgers: list[Ledger] = []

    def new(self, draw: Draw | None = None) -> Curator[Any]:
        """A Curator that has answered nothing yet."""
        number = len(self._ledgers)
        self._ledgers.append(create_ledger(self._folder / f"ledger-{number}", self.plan))
        return self.make(self._ledgers[-1], Keys(None if self._seed is None else self._seed + number), draw)

    def make(self, ledger: Ledger, keys: Keys, draw: Draw | None) -> Curator[Any]:
        """The product's Curator, with its own sampler unless one is given. A test that plants a defect makes another one."""
        options = {} if draw is None else {"draw": draw}
        return Curator(self.people, self.plan, ledger, keys, **options)

    def at_the_steps(self, draw: Draw | None = None) -> Watched:
        """A watched Curator whose next answer is the first step's: all before it was asked of nobody."""
        curator = self.new(draw)
        for release in self.plan.releases:
            curator.ask(Blank(release.name))
        return Watched(curator)

    def close(self) -> None:
        """Close all ledgers."""
        for ledger in self._ledgers:
            ledger.close()
