"""Planted defects, as objects that are handed to a run or to `verify` in place of the sound part."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from dpformer.privacy import Answer, Curator, Query
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import grid_step
from dpformer.trust.audit.game import Exact, Scaled  # noqa: F401
from dpformer.trust.verify.recorder import Delegate, keys_at, ledger_at, no_noise  # noqa: F401


class OnlyAnswer:
    """Wrong noise in one answer of several; the others are sound. It counts its calls."""

    def __init__(self, number: int, noise: Any) -> None:
        self.number, self.noise, self.calls = number, noise, 0

    def __call__(self, key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        self.calls += 1
        return self.noise(key, shape, std) if self.calls - 1 == self.number else rounded_gaussian(key, shape, std)


def the_same_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rounded_gaussian(bytes(32), shape, std)


def shifted_noise(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rounded_gaussian(key, shape, std) + round(0.3 * std)


def noise_between_the_steps(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
    return rounded_gaussian(key, shape, std) + 0.5


class FixedSize:
    """Another sampler: batches of a fixed size."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)

    def __call__(self, key: bytes, users: int, rate: float) -> np.ndarray:
        return np.sort(self.random.permutation(users)[: round(users * rate)])


class Longer(Delegate):
    """Vectors of norm 1.3, past the check of each person's norm."""

    def sum(self, people, sample, grid):
        sums = super().sum(people, sample, grid)
        return {name: np.rint(1.3 * value).astype(np.int64) for name, value in sums.items()}


class Coupled(Delegate):
    """Everybody's last bit depends on how many events there are in all."""

    def sum(self, people, sample, grid):
        return {name: value + len(people.items) for name, value in super().sum(people, sample, grid).items()}


class Understated(Delegate):
    """Says that a person moves the sum by half as much."""

    def sensitivity(self, grid):
        return self.query.sensitivity(grid) / 2


class Asking(Curator[Any]):
    """Every query is changed before it is answered."""

    def __init__(self, change: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._change = change

    def ask(self, query: Query[Any]) -> Answer:
        return super().ask(self._change(query))


class Twice(Curator[Any]):
    """Answers twice and charges once; the mean of both leaves."""

    def ask(self, query: Query[Any]) -> Answer:
        place = self.keys.place
        second = Curator(self._people, self.plan, ledger_at(self.plan, place), keys_at(place), draw=self._draw)
        other, answer = second.ask(query), super().ask(query)
        mean = {
            name: np.rint((value + other.values[name]) / 2 / answer.grid) * answer.grid
            for name, value in answer.values.items()
        }
        return _kept(self, place, Answer(answer.name, mean, answer.noise_std, answer.grid))


class ExactAndKept(Exact):
    """The same, and the exact sum is kept as if it were the answer."""

    def ask(self, query: Query[Any]) -> Answer:
        place = self.keys.place
        return _kept(self, place, super().ask(query))


class Finer(Curator[Any]):
    """Keeps and hands out answers on a grid that is finer than the public one."""

    def ask(self, query: Query[Any]) -> Answer:
        place = self.keys.place
        return _kept(self, place, replace(super().ask(query), grid=grid_step(query.bound, query.numbers) / 4))


class Uncharged(Curator[Any]):
    """The second answer is not charged: its entry is written for the first again."""

    def ask(self, query: Query[Any]) -> Answer:
        if self.keys.place != 1:
            return super().ask(query)
        real, self.ledger = self.ledger, ledger_at(self.plan, 1)
        try:
            return super().ask(query)
        finally:
            self.ledger = real


class Peeking(Curator[Any]):
    """The second query has one number more if a certain person has events: the shape tells."""

    def ask(self, query: Query[Any]) -> Answer:
        if self.keys.place == 1 and self._people.lengths.max() > 1000:
            query = _Renamed(query)
        return super().ask(query)


class _Renamed(Delegate):
    bound = 0.5


def _kept(curator: Curator[Any], place: int, answer: Answer) -> Answer:
    if curator.keep is not None:
        curator.keep(place, answer, curator.plan)
    return answer


def noise(maker: Any) -> Any:
    """A Curator with this noise."""
    return partial(Curator, noise=maker)
