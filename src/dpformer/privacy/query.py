"""What is asked of people's data, and what leaves it.

A query is a sum over people in whole steps of a public grid. Neighbours: the number of people stays, and one person's events
are replaced by none. `sensitivity` is how far that moves the sum at most, in grid steps (L2).

There are two kinds. A `Statistic` is a sum of one vector for each person. It is summed here in whole numbers, so that its
sensitivity is exact: no person's value depends on other people to the last bit. Clipped gradients exist only as float32 sums of
several people; their sensitivity has a slack for that (see `fit.gradient_sum`).
"""

import abc
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol, TypeVar

import numpy as np

from dpformer.errors import PrivacyError

GRID_BITS = 26
# Above this many numbers in an answer the grid has one bit more for each factor of 4: rounding adds sqrt(numbers) steps.
_MANY = 2**24
# A norm of 1 in float64 may be off by 2^-52; scaled by this, no vector's whole steps can exceed the bound by rounding.
SCALE = 1 - 2.0**-40

P_contra = TypeVar("P_contra", contravariant=True)
Vectors = Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Sample:
    """Who is asked: places of the people drawn, int64, ascending; and a key for a query that needs randomness."""

    drawn: np.ndarray
    key: bytes


class Query(Protocol[P_contra]):
    """A sum over people. Replacing one person's events by none moves it by at most `sensitivity(grid)` steps (L2).

    bound: the largest norm of one person's part, C. numbers: how many numbers an answer has.
    sum: int64 arrays by name, in steps of `grid`, over the people of the sample. Only a Curator calls it.
    """

    @property
    def name(self) -> str: ...
    @property
    def bound(self) -> float: ...
    @property
    def numbers(self) -> int: ...
    def sensitivity(self, grid: float) -> float: ...
    def sum(self, people: P_contra, sample: Sample, grid: float) -> Mapping[str, np.ndarray]: ...


@dataclass(frozen=True)
class Answer:
    """All that leaves: whole multiples of `grid`, noise included. noise_std: of each number; 0 only with epsilon inf.

    labels: of the numbers of a selection, whose cells are not public (see `selection`); else empty.
    """

    name: str
    values: Mapping[str, np.ndarray]
    noise_std: float
    grid: float
    labels: tuple[Any, ...] = ()

    @property
    def numbers(self) -> int:
        """How many numbers it has."""
        return sum(value.size for value in self.values.values())


class Asker(Protocol):
    """Something that answers queries: a Curator, or a recording of one."""

    def ask(self, query: Query[Any]) -> Answer: ...


def grid_step(bound: float, numbers: int) -> float:
    """The public grid: 2^-26 of the largest power of 2 up to `bound`, finer above 2^24 numbers.

    >>> grid_step(1.0, 1000) == 2.0**-26, grid_step(1.5, 1000) == 2.0**-26, grid_step(0.3, 2**26) == 2.0**-29
    (True, True, True)
    """
    more = math.ceil(math.log(numbers / _MANY, 4)) if numbers > _MANY else 0
    return math.ldexp(1.0, math.frexp(bound)[1] - 1 - GRID_BITS - more)


class Statistic(abc.ABC):
    """A sum of one vector for each person, of norm `bound` at most, with coordinates 0 .. prod(shape) - 1."""

    name: str
    shape: tuple[int, ...]
    bound: float = 1.0

    @property
    def numbers(self) -> int:
        """How many numbers the answer has."""
        return math.prod(self.shape)

    def sensitivity(self, grid: float) -> float:
        """bound / grid: each value is cut towards 0 on the grid, so no norm grows."""
        return self.bound / grid

    @abc.abstractmethod
    def vectors(self, people: Any) -> Vectors:
        """(person, cell, value) of all people in pieces: sorted by person and cell, each pair once, a person in one piece.

        A value may depend on this person's events and on earlier answers, and on no other person to the last bit.
        """

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """The sum in whole steps; see `sum_on_grid`, which checks every person's vector."""
        if len(sample.drawn) != len(people):
            raise PrivacyError(f"statistic {self.name!r} is over all people; it cannot be asked of a sample")
        total = sum_on_grid(self.name, self.checked(people, grid), len(people), self.numbers, self.bound, grid)
        return {self.name: total.reshape(self.shape)}

    def checked(self, people: Any, grid: float) -> Vectors:
        """The vectors, after the checks that a kind of statistic makes beside those of `sum_on_grid`."""
        return self.vectors(people)


def sum_on_grid(name: str, vectors: Vectors, people: int, cells: int, bound: float, grid: float) -> np.ndarray:
    """int64 [cells]: the sum of all vectors, each value divided by `grid` and cut towards 0.

    Refuses a person whose squares sum to more than (bound / grid)^2, counted in whole numbers; and pieces that are not sorted
    or hold a pair twice, whose squares would be counted separately.
    """
    most = bound / grid
    if most * people >= 2.0**53 or most >= 2.0**30:
        raise PrivacyError(f"{people:,} people make sums of {name!r} too large to be exact; nothing was released")
    largest = math.floor(Fraction(bound) ** 2 / Fraction(grid) ** 2)
    total = np.zeros(cells)  # whole numbers below 2^53: exact in float64, in any order
    last = -1
    for person, cell, value in vectors:
        if not len(person):
            continue
        if not _in_order(person, cell, last, people, cells):
            raise PrivacyError(
                f"the vectors of {name!r} are not sorted, each cell of a person once; nothing was released"
            )
        last = int(person[-1])
        steps = np.trunc(value * (1 / grid))
        if not np.isfinite(steps).all():
            raise PrivacyError(f"a person's vector of {name!r} is not finite; nothing was released")
        norm = _largest_squared_norm(person, steps, 2 * most * most)
        if norm > largest:
            much = f"norm {math.sqrt(norm) * grid:.6g}, above its bound {bound:g}"
            raise PrivacyError(f"a person's vector of {name!r} has {much}; nothing was released")
        total += np.bincount(cell, weights=steps, minlength=cells)
    return total.astype(np.int64)


def _largest_squared_norm(person: np.ndarray, steps: np.ndarray, far: float) -> float:
    """The largest sum of squares of one person. Exact, in whole numbers, unless it is above `far`, which is below 2^63."""
    rough = float(np.bincount(person - person[0], weights=steps * steps).max())
    if rough > far:
        return rough
    starts = np.flatnonzero(np.concatenate([[True], person[1:] != person[:-1]]))
    return int(np.add.reduceat(steps.astype(np.int64) ** 2, starts).max())


def _in_order(person: np.ndarray, cell: np.ndarray, last: int, people: int, cells: int) -> bool:
    """Whether a piece is sorted by person and cell, each pair once, after person `last`, and inside of its ranges."""
    step = np.diff(person)
    sorted_pairs = bool(((step > 0) | ((step == 0) & (np.diff(cell) > 0))).all())
    return sorted_pairs and last < person[0] and person[-1] < people and cell.min() >= 0 and cell.max() < cells
