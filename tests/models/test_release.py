"""The releases: one user moves a sum by less than 1, the noise is what the shares say, and no more than the budget is spent."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.errors import DataError, PrivacyError
from dpformer.models.statistics import DPPopularity, DPTransitions, Release, Releaser, TransitionSettings, release
from dpformer.models.statistics.release import user_histogram, user_transitions
from dpformer.models.statistics.stages import measure
from dpformer.privacy.mechanisms import composed_multiplier, split_releases

ITEMS = 6


def flat(users: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    items = np.array(list(itertools.chain.from_iterable(users)), dtype=np.int32)
    return items, np.cumsum([0, *map(len, users)])


def brute_histogram(users, last, unit=True):
    total = np.zeros(ITEMS + 1)
    for sequence in users:
        v = np.zeros(ITEMS + 1)
        # Padding is no event: it is dropped before the last events are taken.
        v[list(set([item for item in sequence if item][-last:]))] = 1
        total += v / np.linalg.norm(v) if unit and v.any() else v
    return total


def brute_transitions(users, weights, last, lags, power, norm="cells"):
    """One user and one pair at a time. norm "pairs" is the mistake of squaring every pair where a cell has several."""
    P = len(weights)
    total = np.zeros((P, P))
    for sequence in users:
        s = [place for place in sequence if place >= 0][-last:]
        v, squares = np.zeros((P, P)), 0.0
        for t in range(len(s)):
            for k in range(1, min(lags, len(s) - 1 - t) + 1):
                value = weights[s[t], s[t + k]] * k**-power
                v[s[t], s[t + k]] += value
                squares += value**2
        size = {"cells": np.linalg.norm(v), "pairs": math.sqrt(squares), "none": 1.0}[norm]
        total += v / size if size > 0 else v
    return total


def largest_influence(total, users) -> float:
    """How far the sum moves, in L2, when one user is left out: the largest over users."""
    whole = total(users)
    return max(np.linalg.norm(whole - total(users[:n] + users[n + 1 :])) for n in range(len(users)))


histories = st.lists(st.lists(st.integers(0, ITEMS), max_size=12), min_size=1, max_size=5)
places = st.lists(st.lists(st.integers(-1, ITEMS - 1), max_size=12), min_size=1, max_size=5)
weights = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), min_size=ITEMS * ITEMS, max_size=ITEMS * ITEMS).map(
    lambda values: np.array(values).reshape(ITEMS, ITEMS)
)
windows = st.integers(1, 14)


@given(histories, windows)
def test_one_user_moves_the_histogram_by_less_than_1(users, last):
    def total(chosen):
        return user_histogram(*flat(chosen), ITEMS, last)

    assert largest_influence(total, users) < 1
    np.testing.assert_allclose(total(users), brute_histogram(users, last), rtol=2e-6, atol=1e-12)


@given(places, weights, windows, st.integers(1, 5), st.floats(0, 3))
def test_one_user_moves_the_transitions_by_less_than_1_whatever_the_cells(users, weights, last, lags, power):
    def total(chosen):
        places, offsets = flat(chosen)
        return user_transitions(places, offsets, weights, last=last, lags=lags, lag_power=power)

    assert largest_influence(total, users) < 1


@given(places, st.integers(0, 2**32 - 1), windows, st.integers(1, 5), st.floats(0, 3))
def test_transitions_are_what_the_formula_says(users, seed, last, lags, power):
    random = np.random.default_rng(seed)
    weights = random.random((ITEMS, ITEMS)) * (random.random((ITEMS, ITEMS)) < 0.6)
    given = user_transitions(*flat(users), weights, last=last, lags=lags, lag_power=power)
    np.testing.assert_allclose(given, brute_transitions(users, weights, last, lags, power), rtol=2e-6, atol=1e-12)


@pytest.mark.parametrize("norm", ["none", "pairs"])
def test_a_sum_without_the_norm_over_cells_is_caught(norm):
    """The negative control: the check above turns red for sums that are not normalised, or not by the norm of the cells."""
    users = [[0, 1, 0, 1, 0, 1, 0, 1], [2, 3]]
    ones = np.ones((ITEMS, ITEMS))
    assert largest_influence(lambda chosen: brute_transitions(chosen, ones, 99, 3, 0.8, norm), users) > 1.5
    assert largest_influence(lambda chosen: brute_histogram(chosen, 99, unit=False), [[1, 2, 3, 4, 5]]) > 1.5


class Watched(Releaser):
    """A releaser that keeps its questions, and the un-noised answers."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.questions = []

    def transitions(self, name, share, weights, head, **lags):
        self.questions.append((weights.copy(), head.copy(), lags))
        return super().transitions(name, share, weights, head, **lags)


@settings(max_examples=25, deadline=None)
@given(histories, st.integers(0, 2**32 - 1), st.floats(0.05, 2))
def test_given_the_same_earlier_answers_every_stage_of_a_fit_moves_by_less_than_1(users, seed, sigma):
    """The cells that a real fit selects, from noise and all, asked of both neighbours."""
    random = np.random.default_rng(seed)
    watched = Watched(*flat(users), ITEMS, sigma, lambda shape, std: std * random.standard_normal(shape))
    measure(watched, TransitionSettings(head=4))
    assert len(watched.questions) == 3
    for cells, head, lags in watched.questions:
        place = np.full(ITEMS + 1, -1)
        place[head] = np.arange(len(head))

        def total(chosen, cells=cells, place=place, lags=lags):
            items, offsets = flat(chosen)
            return user_transitions(place[items], offsets, cells, **lags)

        assert largest_influence(total, users) < 1


def test_users_are_never_cut_in_two(monkeypatch):
    random = np.random.default_rng(0)
    users = [list(random.integers(-1, ITEMS, random.integers(0, 30))) for _ in range(50)]
    ones = np.ones((ITEMS, ITEMS))
    whole = user_transitions(*flat(users), ones, last=99, lags=4, lag_power=0.8)
    for pairs in (1, 40, 200):
        monkeypatch.setattr(release, "_PAIRS_AT_ONCE", pairs)
        parts = user_transitions(*flat(users), ones, last=99, lags=4, lag_power=0.8)
        np.testing.assert_allclose(parts, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("model", [DPPopularity(), DPTransitions(), DPTransitions(TransitionSettings.one_stage())])
def test_all_releases_together_are_one_gaussian_mechanism(model):
    """The noise asked for, in the order of the shares, and their closed-form composition; the privacy part agrees."""
    stds = []

    def gaussian(shape, std):
        stds.append(std)
        return np.zeros(shape)

    model.fit(*flat([[1, 2, 3], [2, 4]]), ITEMS, noise_multiplier=0.7, gaussian=gaussian)
    assert model.releases == tuple(Release(name, share) for name, share in model.shares.items())
    assert math.isclose(composed_multiplier(stds), 0.7, rel_tol=1e-12)
    np.testing.assert_allclose(stds, [part.noise_multiplier for part in split_releases(0.7, model.shares)])


def test_the_noise_that_is_added_has_the_std_of_the_share():
    """Monte Carlo: what is released less the exact sum is Gaussian noise of sigma / sqrt(share), in every cell alike."""
    random = np.random.default_rng(1)
    users = [list(random.integers(1, 201, 20)) for _ in range(100)]
    items, offsets = flat(users)
    drawn = Releaser(items, offsets, 200, 0.8, lambda shape, std: std * random.standard_normal(shape))
    head, ones = np.arange(1, 201), np.ones((200, 200))
    lags = {"last": 9, "lags": 3, "lag_power": 0.5}
    left = drawn.transitions("a", 0.25, ones, head, **lags) - user_transitions(items - 1, offsets, ones, **lags)
    # The standard error of a standard deviation from n values is std / sqrt(2 n).
    assert abs(left.std() / 1.6 - 1) < 4 / math.sqrt(2 * left.size)
    assert abs(left.mean()) < 4 * 1.6 / math.sqrt(left.size)
    assert abs(np.corrcoef(left[:, :-1].ravel(), left[:, 1:].ravel())[0, 1]) < 4 / math.sqrt(left.size)
    left = drawn.histogram(0.04, 2000)[1:] - user_histogram(items, offsets, 200, 2000)[1:]
    assert abs(left.std() / 4.0 - 1) < 4 / math.sqrt(2 * left.size)


def test_no_more_than_the_budget_is_released():
    drawn = Releaser(*flat([[1, 2]]), ITEMS, 1.0, lambda shape, std: np.zeros(shape))
    drawn.histogram(0.6, 10)
    with pytest.raises(PrivacyError, match="sum to 1 at most"):
        drawn.histogram(0.5, 10)
    assert drawn.releases == (Release("item histogram", 0.6),)


def test_a_release_that_fails_half_way_counts():
    def broken(shape, std):
        raise OSError("no entropy")

    drawn = Releaser(*flat([[1, 2]]), ITEMS, 1.0, broken)
    with pytest.raises(OSError, match="no entropy"):
        drawn.histogram(1.0, 10)
    with pytest.raises(PrivacyError):
        drawn.histogram(0.5, 10)


@pytest.mark.parametrize(
    ("log", "sigma", "error", "complaint"),
    [
        (([1], [0, 1], 3), 0.0, PrivacyError, "noise multiplier 0 is not above 0"),
        (([1], [0, 1], 3), math.nan, PrivacyError, "noise multiplier nan"),
        (([4], [0, 1], 3), 1.0, DataError, r"outside 0\.\.3"),
        (([-1], [0, 1], 3), 1.0, DataError, r"outside 0\.\.3"),
        (([1], [0, 2], 3), 1.0, DataError, "offsets must rise"),
        (([1], [], 3), 1.0, DataError, "offsets must rise"),
        (([], [0], 0), 1.0, DataError, "nothing to recommend"),
    ],
)
def test_what_cannot_be_right_is_refused(log, sigma, error, complaint):
    items, offsets, count = log
    with pytest.raises(error, match=complaint):
        DPTransitions().fit(
            np.array(items, dtype=np.int32),
            np.array(offsets),
            count,
            noise_multiplier=sigma,
            gaussian=lambda shape, std: np.zeros(shape),
        )


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_cell_weights_that_are_no_weights_are_refused(bad):
    cells = np.ones((2, 2))
    cells[0, 1] = bad
    with pytest.raises(PrivacyError, match="finite and at least 0"):
        user_transitions(*flat([[0, 1]]), cells, last=9, lags=1, lag_power=1.0)


@pytest.mark.parametrize("power", [300.0, -300.0, np.nan])
def test_lag_weights_whose_squares_would_vanish_are_refused(power):
    with pytest.raises(PrivacyError, match="lag_power"):
        user_transitions(*flat([[0, 1, 0]]), np.ones((2, 2)), last=9, lags=3, lag_power=power)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"head": 0}, "head = 0"),
        ({"folds": 1}, "folds = 1"),
        ({"cell_power": 7.0}, "cell_power = 7"),
        ({"histogram_share": 0.1}, "sum to 1"),
        ({"stage_shares": (1.0, -0.03), "thresholds": (0.4,)}, "above 0"),
        ({"thresholds": (0.4,)}, "need 2 thresholds"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, complaint):
    with pytest.raises(PrivacyError, match=complaint):
        TransitionSettings(**changes)
