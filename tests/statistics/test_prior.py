"""Earlier answers as a prior: combined by precision, against the same sum done cell by cell."""

import numpy as np
import pytest

from dpformer.privacy.query import Answer
from dpformer.statistics.combine import Measured
from dpformer.statistics.prior import Prior


def measured(seed: int, items: int, head: list[int]) -> tuple[Measured, Answer]:
    random, size = np.random.default_rng(seed), len(head)
    histogram = np.concatenate([[0.0], random.uniform(1, 9, items)])
    variance = random.uniform(1, 4, (size, size))
    np.fill_diagonal(variance, np.inf)
    counts = random.normal(0, 3, (size, size))
    np.fill_diagonal(counts, 0)
    chosen = np.array(head)
    noise = float(random.uniform(1, 2))
    answer = Answer("histogram", {"histogram": histogram}, float(random.uniform(1, 2)), 2.0**-26)
    return Measured(histogram, chosen, histogram[chosen], counts, variance, noise, (1.0,)), answer


def test_it_is_the_combination_by_precision():
    old, old_answer = measured(0, 5, [2, 4, 5])
    new, new_answer = measured(1, 4, [1, 3, 4])
    numbers = np.array([0, 2, 1, 0, 3, 4])  # item 3 of the old catalogue is gone
    prior, r = Prior.of(300, old_answer, old, numbers, 4), 300 / 200
    histogram = prior.with_histogram(new_answer, 200).values["histogram"]
    for item, number in enumerate(numbers[1:], 1):
        if number:
            mine, theirs = new_answer.noise_std**-2, old_answer.noise_std**-2
            expected = new_answer.values["histogram"][number] * mine + r * old_answer.values["histogram"][item] * theirs
            assert histogram[number] == pytest.approx(expected / (mine + r * r * theirs))
    both = prior.with_counts(new, 200)
    for i in range(3):
        for j in range(3):
            a, b = (np.flatnonzero(numbers[old.head] == new.head[k]) for k in (i, j))
            if i == j:
                assert np.isinf(both.variance[i, j])
                continue
            precision, weighted = 1 / new.variance[i, j], new.counts[i, j] / new.variance[i, j]
            if len(a) and len(b):
                precision += r * r / old.variance[a[0], b[0]]
                weighted += r * old.counts[a[0], b[0]] / old.variance[a[0], b[0]]
            assert both.variance[i, j] == pytest.approx(1 / precision)
            assert both.counts[i, j] == pytest.approx(weighted / precision)
    assert both.noise < new.noise


def test_items_that_are_new_keep_the_new_answer():
    old, old_answer = measured(0, 2, [1, 2])
    _, new_answer = measured(1, 3, [1, 2, 3])
    prior = Prior.of(100, old_answer, old, np.array([0, 1, 2]), 3)
    assert prior.with_histogram(new_answer, 100).values["histogram"][3] == new_answer.values["histogram"][3]


def test_two_equal_halves_have_half_of_the_variance():
    one, answer = measured(3, 3, [1, 2, 3])
    both = Prior.of(100, answer, one, np.arange(4), 3).with_counts(one, 100)
    np.testing.assert_allclose(both.counts, one.counts)
    np.testing.assert_allclose(both.variance, one.variance / 2)
    assert Prior.of(100, answer, one, np.arange(4), 3).with_histogram(answer, 100).noise_std == pytest.approx(
        answer.noise_std / 2**0.5
    )
