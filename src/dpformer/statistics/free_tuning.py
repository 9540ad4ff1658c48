"""Settings of the post-processing, chosen on released values: this costs no privacy, and nobody's data is looked at again.

A release Y = x + N(0, V) is split into two, with Z ~ N(0, V) of a fixed seed:

    Y_1 = Y + a Z       Y_2 = Y - Z / a       Cov(Y_1, Y_2) = V - V = 0.

Both are Gaussian about x, so they are independent. A ranking is made from Y_1, and judged on Y_2 by a function that is linear in
the counts: its expected value is that on x, whatever the ranking is. It sees one item of the history at a time, so it compares
score matrices, and not ways to add up several items. The variance of a cell that was asked about more than once depends
on the first answer, so there the two are independent only approximately.
"""

from dataclasses import replace

import numpy as np

from dpformer.statistics.combine import Measured

# a: the first part has 1 + a^2 = 1.25 times the variance of the release, the second 1 + 1 / a^2 = 5 times.
_A = 0.5
_CUTOFF = 10
_SEED = 1


def split(measured: Measured) -> tuple[Measured, np.ndarray]:
    """What was measured with more noise, and independent counts [P, P], to judge by."""
    asked = np.isfinite(measured.variance)
    Z = np.random.Generator(np.random.PCG64(_SEED)).standard_normal(measured.counts.shape)
    Z *= np.sqrt(np.where(asked, measured.variance, 0.0))
    first = replace(measured, counts=measured.counts + _A * Z, variance=measured.variance * (1 + _A**2))
    return first, np.where(asked, measured.counts - Z / _A, 0.0)


def discounted_gain(scores: np.ndarray, counts: np.ndarray) -> float:
    """The sum over rows i of counts[i, j] / log2(1 + rank of j), over the ten best j of the row's scores, without i itself.

    Divided by all counts, this is NDCG@10 for histories of one item.
    """
    ranked = scores.copy()
    np.fill_diagonal(ranked, -np.inf)
    k = min(_CUTOFF, len(scores) - 1)
    best = np.argpartition(-ranked, k - 1, axis=1)[:, :k]
    order = np.argsort(-np.take_along_axis(ranked, best, 1), axis=1, kind="stable")
    top = np.take_along_axis(best, order, 1)
    return float((np.take_along_axis(counts, top, 1) / np.log2(np.arange(2, k + 2))).sum())
