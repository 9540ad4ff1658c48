"""Sums on the grid against exact rational arithmetic, and every vector that must be refused."""

import itertools
import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.errors import PrivacyError
from dpformer.privacy.query import Sample, Statistic, grid_step, sum_on_grid

GRID = 2.0**-26
CELLS = 7


def piece(*entries: tuple[int, int, float]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    person, cell, value = zip(*entries, strict=True) if entries else ((), (), ())
    return np.array(person, dtype=np.int64), np.array(cell, dtype=np.int64), np.array(value, dtype=np.float64)


def total(*pieces, people: int = 10, bound: float = 1.0, grid: float = GRID) -> np.ndarray:
    return sum_on_grid("s", iter(pieces), people, CELLS, bound, grid)


def random_people(seed: int, count: int, bound: float) -> list[tuple]:
    """Entries (person, cell, value) of random vectors, of norm `bound` and below, in order."""
    random = np.random.default_rng(seed)
    entries = []
    for person in range(count):
        cells = np.flatnonzero(random.random(CELLS) < 0.6)
        values = random.standard_normal(len(cells)) * 10.0 ** random.integers(-9, 1, len(cells))
        norm = np.linalg.norm(values)
        scale = random.choice([1.0, 0.3]) * bound * (1 - 2.0**-40) / norm if norm > 0 else 0.0
        entries += [(person, int(cell), float(value)) for cell, value in zip(cells, values * scale, strict=True)]
    return entries


@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.37, 1.9]), st.integers(1, 4))
def test_the_sum_is_that_of_exact_fractions(seed, bound, parts):
    entries, grid = random_people(seed, 12, bound), grid_step(bound, CELLS)
    exact = [0] * CELLS
    for _, cell, value in entries:
        exact[cell] += math.trunc(Fraction(value) / Fraction(grid))
    borders = [12 * n // parts for n in range(parts + 1)]
    pieces = [
        piece(*[entry for entry in entries if first <= entry[0] < last]) for first, last in itertools.pairwise(borders)
    ]
    found = total(*pieces, people=12, bound=bound, grid=grid)
    assert found.dtype == np.int64
    assert found.tolist() == exact


@given(st.floats(-1, 1), st.floats(-1, 1))
def test_a_vector_never_grows(x, y):
    size = math.hypot(x, y)
    x, y = (x / size * (1 - 2.0**-40), y / size * (1 - 2.0**-40)) if size > 1 else (x, y)
    steps = total(piece((0, 1, x), (0, 4, y)))
    for n, value in ((1, x), (4, y)):
        assert abs(Fraction(int(steps[n])) * Fraction(GRID)) <= abs(Fraction(value))
        assert abs(int(steps[n]) - Fraction(value) / Fraction(GRID)) < 1


def squares_of(number: int) -> list[int]:
    """Whole numbers whose squares sum to `number`."""
    parts = []
    while number:
        parts.append(math.isqrt(number))
        number -= parts[-1] ** 2
    return parts


@pytest.mark.parametrize("bound", [1.0, 0.3, 1.4143, 1.9])
@pytest.mark.parametrize("numbers", [CELLS, 2**26, 2**28])
def test_the_norm_is_checked_to_the_last_whole_step(bound, numbers):
    """A vector at the bound passes, one unit of squared steps more does not, also where float64 cannot tell them apart."""
    grid = grid_step(bound, numbers)
    largest = math.floor(Fraction(bound) ** 2 / Fraction(grid) ** 2)
    for squared, fits in ((largest, True), (largest + 1, False)):
        values = [steps * grid for steps in squares_of(squared)]
        entries = piece(*[(0, cell, value) for cell, value in enumerate(values)])
        if fits:
            sum_on_grid("s", iter([entries]), 10, 20, bound, grid)
        else:
            with pytest.raises(PrivacyError, match="above its bound"):
                sum_on_grid("s", iter([entries]), 10, 20, bound, grid)


REFUSED = {
    "norm 1.3": [piece((0, 0, 1.3))],
    "norm 1.3 over several cells": [piece(*[(0, cell, 1.3 / math.sqrt(5)) for cell in range(5)])],
    "norm 1.3 of the last person": [piece((0, 0, 1.0), (1, 0, 0.5), (2, 1, -1.3))],
    "a huge value": [piece((0, 0, 1e300))],
    "squares that wrap 64 bits": [piece((0, 0, 2.0**6), (0, 1, 2.0**6), (0, 2, 2.0**6), (0, 3, 2.0**6))],
    "a pair twice": [piece((0, 1, 0.9), (0, 1, 0.9))],
    "a pair twice, moving its cell by 1.4, with squares of 0.98": [piece((0, 1, 0.7), (0, 1, 0.7))],
    "cells not sorted": [piece((0, 2, 0.5), (0, 1, 0.5))],
    "people not sorted": [piece((1, 0, 0.5), (0, 0, 0.5))],
    "a person in two pieces": [piece((0, 0, 0.9), (1, 0, 0.9)), piece((1, 1, 0.9))],
    "a person again later": [piece((0, 0, 0.9)), piece((1, 0, 0.9)), piece((0, 1, 0.9))],
    "somebody who is not there": [piece((10, 0, 0.5))],
    "somebody before the first": [piece((-1, 0, 0.5))],
    "a cell that is not there": [piece((0, CELLS, 0.5))],
    "a cell before the first": [piece((0, -1, 0.5))],
    "not a number": [piece((0, 0, math.nan))],
    "infinite": [piece((0, 0, math.inf))],
    "infinite on the grid": [piece((0, 0, 1e308))],
}


@pytest.mark.parametrize("pieces", REFUSED.values(), ids=REFUSED.keys())
def test_vectors_that_break_the_bound_are_refused(pieces):
    with np.errstate(over="ignore"), pytest.raises(PrivacyError, match="nothing was released"):
        total(*pieces)


def test_vectors_within_the_bound_pass():
    """The control of the test above: the same shapes, within the bound."""
    assert total(
        piece((0, 0, 1.0)), piece(), piece((1, 0, 0.6), (1, 1, -0.8)), piece((9, CELLS - 1, 1.0))
    ).tolist() == [
        2**26 + math.trunc(0.6 * 2**26),
        math.trunc(-0.8 * 2**26),
        *[0] * (CELLS - 3),
        2**26,
    ]
    assert total().tolist() == [0] * CELLS


def test_too_many_people_for_exact_sums_are_refused():
    total(people=2**27 - 1)
    with pytest.raises(PrivacyError, match="too large to be exact"):
        total(people=2**27)
    with pytest.raises(PrivacyError, match="too large to be exact"):
        total(grid=2.0**-31)


@settings(max_examples=300)
@given(st.floats(1e-6, 1e6), st.integers(1, 2**32))
def test_the_grid_is_a_public_power_of_2(bound, numbers):
    grid = grid_step(bound, numbers)
    assert math.frexp(grid)[0] == 0.5
    assert bound / grid >= 2**26
    # One bit more for each factor of 4 above 2^24 numbers: sqrt(numbers) roundings of 1/2 stay small beside the bound.
    assert math.sqrt(numbers) * grid <= bound * 2**-14
    if numbers <= 2**24:
        assert bound / grid < 2**27


class Fixed(Statistic):
    """Everybody's vector is given."""

    def __init__(self, pieces: list, shape: tuple[int, ...] = (CELLS,), name: str = "fixed") -> None:
        self.pieces, self.shape, self.name = pieces, shape, name

    def vectors(self, people):
        yield from self.pieces


def test_a_statistic_is_over_everybody_and_has_its_shape():
    query = Fixed([piece((0, 0, 0.5), (2, 5, 1.0))], shape=(2, 3))
    assert query.numbers == 6
    assert query.sensitivity(GRID) == 2**26
    everybody = Sample(np.arange(3), bytes(32))
    assert query.sum([1, 2, 3], everybody, GRID)["fixed"].tolist() == [[2**25, 0, 0], [0, 0, 2**26]]
    with pytest.raises(PrivacyError, match="over all people"):
        query.sum([1, 2, 3], Sample(np.arange(2), bytes(32)), GRID)
