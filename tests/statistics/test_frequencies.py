"""Item frequencies from the answer to a histogram: the estimate, its floor, and noise without end."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpformer.privacy import Answer, Curator, Keys, create_ledger, make_plan
from dpformer.privacy.query import Sample
from dpformer.statistics.histogram import HISTOGRAM, Histogram, frequencies, histogram_of, standing_out
from tests.people import people


def answer(values, noise_std: float) -> Answer:
    return Answer("h", {"h": np.array(values, dtype=float)}, noise_std, 2.0**-26)


def document_frequencies(log: list[list[int]], items: int) -> np.ndarray:
    """The share of people whose sequence holds each item, counted one by one."""
    counts = np.zeros(items + 1)
    for history in log:
        counts[list(set(history) - {0})] += 1
    return counts / len(log)


@pytest.fixture(scope="module")
def log() -> list[list[int]]:
    random = np.random.default_rng(0)
    popularity = 1 / np.arange(1, 201)
    popularity /= popularity.sum()
    return [(1 + random.choice(200, size=12, replace=False, p=popularity)).tolist() for _ in range(3000)]


def test_the_estimate_is_the_document_frequency(tmp_path, log):
    plan = make_plan(3000, 2.0, 1e-5, shares={HISTOGRAM: 0.05, "rest": 0.95})
    with create_ledger(tmp_path, plan) as ledger:
        noisy = Curator(people(log), plan, ledger, Keys(seed=1)).ask(Histogram(200))
    estimate = frequencies(noisy, 3000)
    sigma = plan.releases[0].noise_multiplier
    assert noisy.noise_std == pytest.approx(sigma, rel=1e-12)
    # With 12 distinct items each: h_i H / N^2 = n_i / N, and the noise of h_i times H / N^2 = sqrt(12) / N.
    expected = np.maximum(document_frequencies(log, 200), estimate.floor)
    expected[0] = 1.0
    np.testing.assert_allclose(estimate.probability, expected, rtol=0.03, atol=5 * estimate.floor)
    assert estimate.floor == pytest.approx(sigma * math.sqrt(12) / 3000, rel=0.1)
    assert (estimate.probability >= estimate.floor).all()
    assert (estimate.probability <= 1).all()
    # The control: without the scale it would be far off.
    assert not np.allclose(histogram_of(noisy) / 3000, expected, rtol=0.03, atol=5 * estimate.floor)


def test_without_noise_it_is_exact_up_to_the_floor(log):
    query = Histogram(200)
    exact = query.sum(people(log), Sample(np.arange(3000), bytes(32)), 2.0**-26)[query.name] * 2.0**-26
    estimate = frequencies(Answer("h", {"h": exact}, 0.0, 2.0**-26), 3000)
    assert estimate.floor == 1 / 3000
    expected = np.maximum(document_frequencies(log, 200), 1 / 3000)
    np.testing.assert_allclose(estimate.probability[1:], expected[1:], rtol=1e-5)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.floats(0, 1e4), st.integers(1, 10**6))
def test_whatever_the_noise_they_are_probabilities_with_a_floor(values, std, users):
    estimate = frequencies(answer(values, std), users)
    assert 1 / users <= estimate.floor <= 1
    assert np.isfinite(estimate.probability).all()
    assert (estimate.probability >= estimate.floor).all()
    assert (estimate.probability <= 1).all()
    assert estimate.probability[0] == 1


def test_the_noise_at_entry_0_is_dropped_and_the_answer_is_left_as_it_is():
    noisy = answer([7.0, 1.0, 2.0], 1.0)
    assert histogram_of(noisy).tolist() == [0, 1, 2]
    frequencies(noisy, 3)
    assert noisy.values["h"].tolist() == [7, 1, 2]


def test_noise_alone_stands_out_in_one_of_ten_answers_at_most():
    noise = np.random.default_rng(0).standard_normal((400, 1001)) * 7.0
    counts = [standing_out(answer(row, 7.0)) for row in noise]
    assert np.mean(counts) < 0.2  # expected: 0.09


def test_items_above_the_noise_stand_out():
    noise = np.random.default_rng(1).uniform(-10.0, 10.0, 1001)
    noise[[3, 50, 900]] += 100.0
    assert standing_out(answer(noise, 7.0)) == 3
    assert standing_out(answer([0.0, 2.0, 0.0, 1.0], 0.0)) == 2  # without noise
