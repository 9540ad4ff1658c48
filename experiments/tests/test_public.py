"""Public facts beside released counts: classes of pairs, and what they are worth."""

import numpy as np
import pytest

from dpformer.statistics.combine import Measured
from dpformer_experiments.reproduce.public_facts import Facts, class_log_lift, facts, pair_classes


def measured(counts, h, noise=0.1):
    size = len(h)
    variance = np.full((size, size), noise**2)
    np.fill_diagonal(variance, np.inf)
    np.fill_diagonal(counts, 0.0)
    return Measured(np.zeros(size + 1), np.arange(1, size + 1), h, counts, variance, noise, (1.0,))


def test_facts_of_titles():
    assert facts("From Dusk Till Dawn (1996)", ["Action"]).words == {"dusk", "till", "dawn"}
    assert facts("Heat", []) == Facts(None, frozenset(), frozenset({"heat"}))


def test_classes_tell_likeness_years_and_words_apart():
    known = [
        facts("Star One (1980)", ["A", "B"]),
        facts("Star Two (1981)", ["A", "B"]),
        facts("Other (1981)", ["C"]),
        facts("Nameless", ["A", "B"]),
    ]
    found = pair_classes(known)
    assert found[0, 1] != found[1, 0], "a year forward is not a year back"
    assert len({found[0, 1], found[0, 2], found[0, 3]}) == 3
    assert found[0, 1] % 2 == 1, "they share a word"
    assert found[0, 2] % 2 == 0


@pytest.mark.parametrize("factor", [0.5, 3.0])
def test_the_lift_of_a_class_is_found_under_noise(factor):
    random = np.random.default_rng(0)
    h = random.uniform(50, 100, 60)
    classes = random.integers(0, 2, (60, 60))
    expected = np.outer(h, h) / h.sum() ** 2 * 20000
    counts = expected * np.where(classes == 1, factor, 1.0)
    off = ~np.eye(60, dtype=bool)
    found = class_log_lift(measured(counts + random.standard_normal(counts.shape), h, noise=1.0), classes)
    # Relative to popularity, which both classes make up together.
    assert found[off & (classes == 1)][0] - found[off & (classes == 0)][0] == pytest.approx(np.log(factor), abs=0.1)
    assert not found[~off].any()


def test_without_any_signal_nothing_is_added():
    assert not class_log_lift(measured(np.zeros((3, 3)), np.ones(3)), np.zeros((3, 3), dtype=np.int64)).any()
