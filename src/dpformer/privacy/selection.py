"""Select cells that are not public, such as the items of a log, by noisy counts above a threshold.

A cell that only one person has must not be named. Let a person have n cells, 1 <= n <= `most`, each with the value 1 / sqrt(n),
and noise of standard deviation sigma on every cell of any person. Cells above the threshold t are named, all others are
dropped. A cell of no person, whose sum before noise is 0, is dropped whatever its noise: the list of labels may have cells that
the query does not count (an item among a person's older events), and a person may have any number of those. Then the
probability that any cell of this person alone is named is at most

    p = max over n <= most of  n Q((t - 1 / sqrt(n)) / sigma),        Q the upper tail of a standard Gaussian,

and t is chosen so that p <= threshold_delta.

All answers are then (epsilon, delta + p)-DP, where they are (epsilon, delta)-DP if the selection is counted as a Gaussian answer;
the best of K trials (see `tuning`) is (epsilon, delta + E[K] p)-DP. docs/proofs/selection.md has the proofs.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.special import log_ndtr

from dpformer.errors import PrivacyError
from dpformer.privacy.query import Statistic, Vectors


class Selection(Statistic):
    """A statistic whose cells are not public: an answer has the `labels` of the cells above the threshold, and their numbers.

    Each person's vector must have n equal values 1 / sqrt(n), n at most `most`; the Curator refuses any other.
    """

    labels: Sequence[Any]
    most: int

    def checked(self, people: Any, grid: float) -> Vectors:
        """The vectors, each with at most `most` cells, of 1 / sqrt(n) cut to the grid or one step less."""
        if len(self.labels) != self.numbers:
            raise PrivacyError(
                f"{self.name!r} has {len(self.labels)} labels for {self.numbers} cells; give one for each"
            )
        for person, cell, value in self.vectors(people):
            if len(person):
                self._check(person, value, grid)
            yield person, cell, value

    def _check(self, person: np.ndarray, value: np.ndarray, grid: float) -> None:
        _, which, count = np.unique(person, return_inverse=True, return_counts=True)
        if count.max() > self.most:
            raise PrivacyError(
                f"a person has {count.max()} cells of {self.name!r}, more than its threshold is made for, {self.most}; nothing "
                "was released. Give a larger `most`, or count fewer of a person's events"
            )
        # The largest whole k with k^2 n <= 1 / grid^2, exactly.
        steps = np.zeros(count.max() + 1)
        for n in np.unique(count):
            steps[n] = math.isqrt(math.floor(1 / Fraction(grid) ** 2 / int(n)))
        most = steps[count][which]
        least = np.maximum(most - 1, 1)
        cut = np.trunc(value * (1 / grid))
        if not ((cut >= least) & (cut <= most)).all():
            raise PrivacyError(
                f"the values of {self.name!r} of a person with n cells are not all 1 / sqrt(n); nothing was released"
            )


def threshold(noise_std: float, delta: float, most: int) -> float:
    """The smallest t for which a cell that only one person has is named with probability at most `delta`.

    noise_std: in units of the largest norm of a person's vector.
    """
    if not 0 < delta < 1:
        raise PrivacyError(f"the delta of the threshold, {delta:g}, is not in (0, 1); plan one")
    n = np.arange(1, most + 1)

    def excess(t: float) -> float:
        return float((np.log(n) + log_ndtr((1 / np.sqrt(n) - t) / noise_std)).max()) - math.log(delta)

    high = 1.0 + 10 * noise_std
    while excess(high) > 0:
        high *= 2
    t = float(brentq(excess, 0.0, high, xtol=1e-12)) if excess(0.0) > 0 else 0.0
    return t * (1 + 1e-9) + 1e-9  # above the root by more than the search rounds


@dataclass(frozen=True)
class Counts:
    """The cells of a selection in whole steps of `grid`: before noise, with noise of standard deviation `std` (in steps)."""

    exact: np.ndarray
    noisy: np.ndarray
    std: float
    grid: float


def named(selection: Selection, counts: Counts, delta: float) -> tuple[Mapping[str, np.ndarray], tuple[Any, ...]]:
    """The noisy counts above the threshold of cells that a person has, and their labels.

    The threshold is one step higher: the noise is rounded, so a count may be half a step above that of the ideal Gaussian.
    """
    least = math.ceil(threshold(counts.std * counts.grid, delta, selection.most) / counts.grid) + 1
    kept = np.flatnonzero((counts.exact != 0) & (counts.noisy >= least))
    return {selection.name: counts.noisy[kept]}, tuple(selection.labels[int(k)] for k in kept)
