"""Released folders for the attacks: by the real path from prepared data to files, with the Curator handed in.

Some people are targets. A coin decides for each whether the person is in; the events of those who are out are replaced by none.
`OldNoise` is the control: everything is as in the product, but for the noise.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import binom

from dpformer.data import Sequences, load
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import start
from dpformer.privacy import Answer, Curator
from dpformer.privacy.query import SCALE
from dpformer.statistics.histogram import Histogram
from dpformer.trust.audit.game import OldNoise  # noqa: F401
from tests.attacks.support import Target


class Hearing(Curator[Sequences]):
    """The product, which tells all that it answers: to `answers`."""

    def __init__(self, answers: list[Answer], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._answers = answers

    def ask(self, query: Any) -> Answer:
        answer = super().ask(query)
        self._answers.append(answer)
        return answer


def emptied(people: Sequences, out: np.ndarray) -> Sequences:
    """The neighbour: the same people, and those in `out` (places) have no events."""
    kept = np.ones(len(people), dtype=bool)
    kept[out] = False
    lengths = np.where(kept, people.lengths, 0)
    return Sequences(
        people.users, people.items[np.repeat(kept, people.lengths)], np.concatenate([[0], np.cumsum(lengths)])
    )


def release(folder: Path, data: Path, recipe: Recipe, curator: Callable[..., Any]) -> Path:
    """A released folder, made as `dpformer fit` makes it; `curator` stands where `Curator` does: (people, plan, ledger, keys)."""
    assert start(folder, data, recipe, make_curator=curator).train()
    return folder


@dataclass(frozen=True)
class Game:
    """The people, the targets, and the coins: who of the targets is in."""

    people: Sequences
    items: int
    targets: np.ndarray
    member: np.ndarray

    @classmethod
    def of(cls, data: Path, targets: int, least: int, seed: int) -> Game:
        """Targets are drawn among people with at least `least` items."""
        dataset = load(data)
        people = dataset.train("validation")
        rng = np.random.default_rng(seed)
        long = np.flatnonzero(people.lengths >= least)
        chosen = np.sort(rng.choice(long, targets, replace=False))
        return cls(people, len(dataset.catalogue), chosen, rng.random(targets) < 0.5)

    @property
    def present(self) -> Sequences:
        """The data that the folder is made from."""
        return emptied(self.people, self.targets[~self.member])

    def curator(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        """A Curator of this kind that holds the people who are present."""
        return lambda people, plan, ledger, keys: kind(self.present, plan, ledger, keys)

    def target(self, k: int, total: np.ndarray, grid: float | None) -> Target:
        """What the attacker knows of target number k. total: the exact histogram of the present, which is not known."""
        place = int(self.targets[k])
        own = np.unique(self.people[place])
        value = SCALE / np.sqrt(len(own))
        value = value if grid is None else np.trunc(value / grid) * grid
        others = total.copy()
        others[own] -= value * self.member[k]
        return Target(own, value, others)

    def play(self, grid: float | None, attack: Callable[[Target], str]) -> Counter[tuple[str, str]]:
        """How often each (truth, verdict) comes about."""
        total = exact_histogram(self.present, self.items, grid)
        return Counter(
            ("in" if self.member[k] else "out", attack(self.target(k, total, grid))) for k in range(len(self.targets))
        )


def exact_histogram(people: Sequences, items: int, grid: float | None) -> np.ndarray:
    """What the histogram sums to without noise: in whole steps of a grid times the grid, or in float64."""
    total = np.zeros(items + 1)
    for _, cell, value in Histogram(items).vectors(people):
        total += np.bincount(cell, weights=value if grid is None else np.trunc(value / grid), minlength=items + 1)
    return total if grid is None else total * grid


def right(table: Counter[tuple[str, str]]) -> int:
    """Verdicts that are true."""
    return table["in", "in"] + table["out", "out"]


def wrong(table: Counter[tuple[str, str]]) -> int:
    """Verdicts that are false."""
    return table["in", "out"] + table["out", "in"]


def most_right(verdicts: int, chance: float, false_alarm: float = 1e-6) -> int:
    """The least number that a binomial count exceeds with a probability below `false_alarm`."""
    return int(binom.isf(false_alarm, verdicts, chance)) if verdicts else 0


def least_right(verdicts: int, chance: float, false_alarm: float = 1e-6) -> int:
    """The greatest number that a binomial count is below with a probability below `false_alarm`."""
    return verdicts - most_right(verdicts, 1 - chance, false_alarm)


def phi(x: float) -> float:
    """The standard Gaussian's distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
