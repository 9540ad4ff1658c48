"""Settings chosen on released values: the split is independent, the judgement unbiased, and the limit without noise exact."""

import numpy as np
import pytest

from dpformer.statistics.combine import Measured
from dpformer.statistics.free_tuning import discounted_gain, split
from dpformer.statistics.score_matrix import CONDITIONAL_WEIGHTS, Judge, score_matrix
from dpformer.statistics.settings import TransitionSettings

P = 60


def truth(seed: int = 100) -> np.ndarray:
    """Counts of transitions between items of very different popularity, and none to itself."""
    random = np.random.default_rng(seed)
    popularity = 1 / np.arange(1, P + 1)
    counts = np.outer(popularity, popularity) * np.exp(1.5 * random.standard_normal((P, P)))
    counts *= 2e4 / counts.sum()
    np.fill_diagonal(counts, 0.0)
    return counts


def measured(counts: np.ndarray, noise: float, seed: int = 10) -> Measured:
    """A release of the counts. The seeds of noise and counts are not that of the split, or they would be one draw."""
    variance = np.full((P, P), noise**2)
    np.fill_diagonal(variance, np.inf)
    noisy = counts + np.where(np.isfinite(variance), noise * np.random.default_rng(seed).standard_normal((P, P)), 0.0)
    h = counts.sum(0)
    return Measured(np.concatenate([[0.0], h]), 1 + np.arange(P), h, noisy, variance, noise, (1.0,))


def test_the_parts_of_a_split_are_independent_and_have_the_right_variances():
    first, second = split(measured(truth(), 2.0, seed=11))
    asked = ~np.eye(P, dtype=bool)
    a, b = (first.counts - truth())[asked] / 2, (second - truth())[asked] / 2
    cells = asked.sum()
    assert abs(np.corrcoef(a, b)[0, 1]) < 4 / np.sqrt(cells)
    assert a.var() == pytest.approx(1.25, rel=0.1)
    assert b.var() == pytest.approx(5, rel=0.1)
    np.testing.assert_allclose(first.variance[asked], 1.25 * 4)
    # The control: without the split, what a ranking is made of and what it is judged by are the same noise.
    whole = measured(truth(), 2.0, seed=11).counts - truth()
    assert np.corrcoef(whole[asked], a)[0, 1] > 0.5


def test_the_judgement_is_unbiased_and_that_on_the_same_counts_is_not():
    counts, noise = truth(), 8.0
    judged, exact, same = [], [], []
    for seed in range(10, 40):
        whole = measured(counts, noise, seed)
        first, second = split(whole)
        judged.append(discounted_gain(first.counts, second))
        exact.append(discounted_gain(first.counts, counts))
        same.append(discounted_gain(first.counts, whole.counts))
    error = np.array(judged) - exact
    assert abs(error.mean()) < 0.03 * np.mean(exact)
    assert np.mean(same) > 1.15 * np.mean(exact)


def test_the_gain_is_the_discounted_count_of_the_ten_best():
    scores, counts = np.random.default_rng(2).random((P, P)), truth()
    expected = 0.0
    for i in range(P):
        ranked = [j for j in np.argsort(-scores[i]) if j != i][:10]
        expected += sum(counts[i, j] / np.log2(2 + place) for place, j in enumerate(ranked))
    assert discounted_gain(scores, counts) == pytest.approx(expected)


def test_without_noise_the_order_is_that_of_conditional_probabilities():
    """A mixture of them over the last items of a history is what exact counts say about the next one."""
    counts = truth()
    conditional = counts / counts.sum(1, keepdims=True)
    M = score_matrix(measured(counts, 1e-3), TransitionSettings(conditional=CONDITIONAL_WEIGHTS[-1]))
    agree = np.mean([len(set(np.argsort(-M[i])[:5]) & set(np.argsort(-conditional[i])[:5])) for i in range(P)])
    lifts = score_matrix(measured(counts, 1e-3), TransitionSettings(conditional=0.0))
    control = np.mean([len(set(np.argsort(-lifts[i])[:5]) & set(np.argsort(-conditional[i])[:5])) for i in range(P)])
    assert agree > max(4.5, control)


def test_less_noise_never_means_a_smaller_weight_and_the_choice_is_made_again_alike():
    settings = TransitionSettings(folds=2)
    chosen = [Judge.of(measured(truth(), noise), settings).conditional_weight() for noise in (30.0, 3.0, 0.01)]
    assert chosen == sorted(chosen)
    assert chosen[0] < chosen[-1]
    assert chosen[1] == Judge.of(measured(truth(), 3.0), settings).conditional_weight()
