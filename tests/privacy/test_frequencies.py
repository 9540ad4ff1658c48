"""DP item frequencies: sensitivity, noise, estimate, floors."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kstest, norm

from dpformer.errors import PrivacyError
from dpformer.privacy.frequencies import assume_public, noisy_histogram, public_frequencies, user_histogram
from dpformer.privacy.mechanisms import GaussianRelease
from dpformer.privacy.noise import noise_source


def flat(users: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = np.array([item for user in users for item in user], dtype=np.int32)
    return items, np.cumsum([0, *map(len, users)], dtype=np.int64)


def test_a_users_vector_is_worked_out_by_hand():
    items, offsets = flat([[1, 1, 2, 0, 3, 4], [2], []])
    expected = np.array([0, 0.5, 1.5, 0.5, 0.5, 0]) * (1 - 1e-6)
    np.testing.assert_allclose(user_histogram(items, offsets, 5), expected)


def test_only_the_last_events_count():
    items, offsets = flat([[1, 2, 3], [4]])
    np.testing.assert_allclose(user_histogram(items, offsets, 4, last=1), np.array([0, 0, 0, 1, 1]) * (1 - 1e-6))


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.integers(0, 9), max_size=30), min_size=1, max_size=8), st.data())
def test_adding_or_removing_any_user_moves_the_sum_by_less_than_one(users, data):
    gone = data.draw(st.integers(0, len(users) - 1))
    whole = user_histogram(*flat(users), 9)
    without = user_histogram(*flat(users[:gone] + users[gone + 1 :]), 9)
    assert np.linalg.norm(whole - without) < 1


def test_the_noise_is_that_of_the_release():
    items, offsets = flat([[1, 2, 3]] * 10)
    release = GaussianRelease("histogram", 4.0)
    found = noisy_histogram(items, offsets, 20_000, release, noise_source(), users=10)
    residual = (found.histogram - user_histogram(items, offsets, 20_000))[1:]
    assert kstest(residual, norm(0, 4.0).cdf).pvalue > 1e-6
    for wrong in (2 / 3, 3 / 2):
        assert kstest(residual, norm(0, 4.0 * wrong).cdf).pvalue < 1e-12


def test_the_estimate_is_the_document_frequency():
    random = np.random.default_rng(0)
    popularity = 1 / np.arange(1, 201)
    popularity /= popularity.sum()
    users = [list(1 + random.choice(200, size=12, replace=False, p=popularity)) for _ in range(3000)]
    items, offsets = flat(users)
    found = noisy_histogram(items, offsets, 200, GaussianRelease("h", 5.0), noise_source("seeded", 1), users=3000)
    exact = assume_public(items, offsets, 200, floor=1e-9).probability
    np.testing.assert_allclose(found.probability, exact, rtol=0.03, atol=5 * found.floor)
    assert found.source == "histogram"
    assert found.floor == pytest.approx(5 * np.sqrt(12) / 3000, rel=0.1)
    assert (found.probability >= found.floor).all()
    assert (found.probability <= 1).all()
    assert found.probability[0] == 1


def test_pure_noise_gives_floors_not_nonsense():
    found = noisy_histogram(*flat([[1]]), 50, GaussianRelease("h", 100.0), noise_source(), users=1)
    assert np.isfinite(found.probability).all()
    assert (found.probability > 0).all()
    assert (found.probability <= 1).all()


def test_public_and_assume_public_are_explicit():
    items, offsets = flat([[1, 1, 2], [2, 0]])
    assumed = assume_public(items, offsets, 3, floor=0.1)
    np.testing.assert_allclose(assumed.probability, [1, 0.5, 1.0, 0.1])
    assert assumed.source == "assume-public"
    given_ = public_frequencies(np.array([0, 0.3, 0.0]), floor=0.01)
    np.testing.assert_allclose(given_.probability, [1, 0.3, 0.01])
    assert given_.source == "public"


@pytest.mark.parametrize(
    ("call", "word"),
    [
        (lambda: user_histogram(np.array([5]), np.array([0, 1]), 4), "outside 0..4"),
        (lambda: user_histogram(np.array([-1]), np.array([0, 1]), 4), "outside 0..4"),
        (lambda: user_histogram(np.array([1]), np.array([0, 2]), 4), "offsets"),
        (lambda: user_histogram(np.array([1, 1]), np.array([0, 2, 1, 2]), 4), "offsets"),
        (lambda: public_frequencies(np.array([1, 1.2]), 0.1), "between 0 and 1"),
        (lambda: public_frequencies(np.array([1, np.nan]), 0.1), "finite"),
        (lambda: public_frequencies(np.array([1, 0.2]), 0.0), "floor 0"),
        (
            lambda: noisy_histogram(
                np.array([1]), np.array([0, 1]), 4, GaussianRelease("h", 0.0), noise_source(), users=1
            ),
            "no noise",
        ),
    ],
)
def test_bad_input_is_named(call, word):
    with pytest.raises(PrivacyError, match=word):
        call()
