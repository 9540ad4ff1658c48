"""Histogram and transitions as queries: what they count, how far one person moves them, and that nobody else moves at all."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.errors import DataError, PrivacyError
from dpformer.privacy.query import Sample
from dpformer.statistics import transitions as module
from dpformer.statistics.histogram import Histogram
from dpformer.statistics.transitions import Transitions
from tests.people import people, without

ITEMS, HEAD = 6, np.array([2, 5, 1, 6])
GRID = 2.0**-26

histories = st.lists(st.lists(st.integers(0, ITEMS), max_size=12), min_size=1, max_size=6)
cells = st.lists(st.one_of(st.just(0.0), st.floats(1e-12, 1e12)), min_size=16, max_size=16).map(
    lambda values: np.array(values).reshape(4, 4)
)
windows = st.integers(1, 14)


def transitions(weights=None, last=99, lags=4, power=0.8, kind=Transitions, items=ITEMS, head=HEAD):
    weights = np.ones((len(head), len(head))) if weights is None else weights
    return kind("transitions", items, head, weights, last, lags, power)


def on_grid(query, log) -> np.ndarray:
    return query.sum(people(log), Sample(np.arange(len(log)), bytes(32)), GRID)[query.name]


def vectors(query, log) -> dict[int, list[tuple[int, float]]]:
    """Each person's cells and values."""
    result: dict[int, list[tuple[int, float]]] = {}
    for person, cell, value in query.vectors(people(log)):
        for entry in zip(person.tolist(), cell.tolist(), value.tolist(), strict=True):
            result.setdefault(entry[0], []).append(entry[1:])
    return result


# --- one person, by the definition --------------------------------------------------------------------------------------


def brute_histogram(history, last):
    v = np.zeros(ITEMS + 1)
    # Padding is no event: it is dropped before the last events are taken.
    v[list(set([item for item in history if item][-last:]))] = 1
    return v / np.linalg.norm(v) if v.any() else v


def brute_transitions(history, weights, last, lags, power, norm="cells"):
    """One pair at a time. norm "pairs" is the mistake of squaring every pair where a cell has several."""
    s = [HEAD.tolist().index(item) for item in history if item in HEAD][-last:]
    v, squares = np.zeros((4, 4)), 0.0
    for t in range(len(s)):
        for k in range(1, min(lags, len(s) - 1 - t) + 1):
            value = weights[s[t], s[t + k]] * k**-power
            v[s[t], s[t + k]] += value
            squares += value**2
    size = {"cells": np.linalg.norm(v), "pairs": math.sqrt(squares)}[norm]
    return v / size if size > 0 else v


@given(histories, windows)
def test_the_histogram_is_what_the_formula_says(log, last):
    expected = sum(brute_histogram(history, last) for history in log)
    # Each value is cut by less than a step.
    np.testing.assert_allclose(
        on_grid(Histogram(ITEMS, last), log) * GRID, expected, rtol=0, atol=(len(log) + 1) * GRID
    )


@given(histories, st.integers(0, 2**32 - 1), windows, st.integers(1, 5), st.floats(0, 3))
def test_transitions_are_what_the_formula_says(log, seed, last, lags, power):
    random = np.random.default_rng(seed)
    weights = random.random((4, 4)) * (random.random((4, 4)) < 0.6)
    expected = sum(brute_transitions(history, weights, last, lags, power) for history in log)
    found = on_grid(transitions(weights, last, lags, power), log) * GRID
    np.testing.assert_allclose(found, expected, rtol=0, atol=(len(log) + 1) * GRID)


def test_a_vector_is_worked_out_by_hand():
    log = [[1, 1, 2, 0, 3, 4], [2], []]
    steps = [0, 2**25 - 1, 2**25 - 1 + 2**26 - 1, 2**25 - 1, 2**25 - 1, 0, 0]
    assert on_grid(Histogram(ITEMS), log).tolist() == steps, "1/2 and 1, a little below, cut towards 0"
    assert on_grid(Histogram(ITEMS, last=1), [[1, 2, 3], [4]]).tolist() == [0, 0, 0, 2**26 - 1, 2**26 - 1, 0, 0]


# --- how far one person moves the sum -----------------------------------------------------------------------------------


def largest_move(query, log) -> int:
    """The largest squared L2 move, in squared steps, over all neighbours; a Python integer, so exact."""
    whole = on_grid(query, log)
    moves = [whole - on_grid(query, without(log, person)) for person in range(len(log))]
    return max(sum(int(step) ** 2 for step in move.ravel()) for move in moves)


def same_for_others(query, log) -> bool:
    """Whether, without any one person, everybody else's vector is the same to the last bit."""
    whole = vectors(query, log)
    for person in range(len(log)):
        others = {n: vector for n, vector in whole.items() if n != person}
        if vectors(query, without(log, person)) != others:
            return False
    return True


@given(histories, windows)
def test_one_person_moves_the_histogram_by_at_most_the_sensitivity(log, last):
    query = Histogram(ITEMS, last)
    assert largest_move(query, log) <= query.sensitivity(GRID) ** 2
    assert same_for_others(query, log)


@given(histories, cells, windows, st.integers(1, 5), st.floats(0, 3))
def test_one_person_moves_the_transitions_by_at_most_the_sensitivity_whatever_the_cells(
    log, weights, last, lags, power
):
    query = transitions(weights, last, lags, power)
    assert largest_move(query, log) <= query.sensitivity(GRID) ** 2
    assert same_for_others(query, log)


class PairsApart(Transitions):
    """The planted norm over pairs: every pair is squared, where a cell has several."""

    def _unit_vectors(self, user, place):
        owner, cell, _ = super()._unit_vectors(user, place)
        log = [HEAD[place[user == n]].tolist() for n in range(int(user[-1]) + 1)]
        by_pairs = {n: brute_transitions(h, np.ones((4, 4)), 99, 4, 0.8, "pairs").ravel() for n, h in enumerate(log)}
        return owner, cell, np.array([by_pairs[n][c] for n, c in zip(owner, cell, strict=True)])


def test_a_sum_without_the_norm_over_cells_is_refused():
    log = [[2, 5, 2, 5, 2, 5, 2, 5], [1, 6]]
    on_grid(transitions(), log)
    with pytest.raises(PrivacyError, match="above its bound"):
        on_grid(transitions(kind=PairsApart), log)


class Quick(Transitions):
    """The planted sort: numpy's default, which is not stable."""

    def _order(self, key):
        return np.argsort(key)


class ByLength(Transitions):
    """The planted sort: how ties are broken depends on how many pairs there are, those of other people included."""

    def _order(self, key):
        return np.lexsort((np.random.default_rng(len(key)).random(len(key)), key))


def long_log(people: int = 40) -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.choice(HEAD, random.integers(3, 30)).tolist() for _ in range(people)]


def test_an_unstable_sort_would_be_seen():
    log = long_log()
    assert same_for_others(transitions(lags=15), log)
    assert not same_for_others(transitions(lags=15, kind=ByLength), log)
    assert not same_for_others(transitions(lags=15, kind=Quick), log)


@pytest.mark.parametrize("pairs", [1, 5, 40, 200])
def test_people_are_never_cut_in_two(monkeypatch, pairs):
    """In pieces of any size everybody has the same vector, to the last bit."""
    log = [*long_log(), [], [1], [], *long_log(7)]
    query = transitions()
    whole, exact = vectors(query, log), on_grid(query, log)
    monkeypatch.setattr(module, "_PAIRS_AT_ONCE", pairs)
    if pairs >= query._lags:
        assert len(list(query.vectors(people(log)))) > 3
    assert vectors(query, log) == whole
    np.testing.assert_array_equal(on_grid(query, log), exact)


def test_many_people_are_summed_as_one_by_one():
    random = np.random.default_rng(0)
    log = [random.integers(0, ITEMS + 1, random.integers(0, 20)).tolist() for _ in range(300)]
    for query in (Histogram(ITEMS), transitions()):
        np.testing.assert_array_equal(on_grid(query, log), sum(on_grid(query, [history]) for history in log))


# --- refusals -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [np.nan, np.inf, -1.0])
def test_cell_weights_that_are_no_weights_are_refused(bad):
    weights = np.ones((4, 4))
    weights[0, 1] = bad
    with pytest.raises(PrivacyError, match="finite and at least 0"):
        transitions(weights)


@pytest.mark.parametrize("power", [300.0, -300.0, np.nan])
def test_lag_weights_whose_squares_would_vanish_are_refused(power):
    with pytest.raises(PrivacyError, match="lag_power"):
        transitions(power=power)


@pytest.mark.parametrize("query", [Histogram(4), transitions(items=4, head=np.array([1, 2]))])
@pytest.mark.parametrize(
    ("items", "offsets", "complaint"),
    [
        ([5], [0, 1], r"outside 0\.\.4"),
        ([-1], [0, 1], r"outside 0\.\.4"),
        ([1], [0, 2], "offsets"),
        ([1, 1], [0, 2, 1, 2], "offsets"),
        ([1], [], "offsets"),
        ([1], [1, 1], "offsets"),
    ],
)
def test_a_log_that_cannot_be_is_refused(query, items, offsets, complaint):
    log = people([])
    log = type(log)(log.users, np.array(items, dtype=np.int32), np.array(offsets))
    with pytest.raises(DataError, match=complaint):
        list(query.vectors(log))


def test_a_catalogue_without_items_is_refused():
    with pytest.raises(DataError, match="nothing to recommend"):
        list(Histogram(0).vectors(people([[]])))


@settings(max_examples=20)
@given(histories)
def test_a_person_without_events_has_no_vector(log):
    for query in (Histogram(ITEMS), transitions()):
        assert len(log) not in vectors(query, [*log, []])
