"""Is the sampler Poisson? Amplification is claimed for users who are drawn independently, of one another and of earlier steps.

From T batches of N users with rate q, three statistics, each with a two-sided p-value:

    sizes       sum_t (n_t - N q)^2 / (N q (1 - q))       chi-square with T degrees: users are drawn independently
    counts      sum_u (c_u - T q)^2 / (T q (1 - q))       chi-square with N degrees: so are the steps of one user
    overlaps    users in both of two batches in a row     Binomial(N (T - 1), q^2): nobody is spared for being drawn last time
                (normal, with the covariance of pairs that share a batch)

Batches of a fixed size have sizes 0; a shuffled epoch cut into batches has counts 0 and overlaps 0 too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from scipy.stats import chi2, norm

from dpformer.privacy import Keys
from dpformer.privacy.noise import poisson_draw

FALSE_ALARM = 1e-4


@dataclass(frozen=True)
class SamplingTest:
    """p-values of the three statistics; small ones refute Poisson sampling."""

    users: int
    batches: int
    sizes: float
    counts: float
    overlaps: float

    @property
    def passed(self) -> bool:
        """Whether none of the three refutes the claim; a sound sampler fails once in 10,000 at most."""
        return min(self.sizes, self.counts, self.overlaps) >= FALSE_ALARM / 3


def check_sampling(draw: Callable[[], np.ndarray], users: int, rate: float, batches: int = 400) -> SamplingTest:
    """Draw batches and test them."""
    inside = np.zeros((batches, users))
    for t in range(batches):
        inside[t, draw()] = 1
    variance = rate * (1 - rate)
    sizes = float(((inside.sum(1) - users * rate) ** 2).sum() / (users * variance))
    counts = float(((inside.sum(0) - batches * rate) ** 2).sum() / (batches * variance))
    overlap = float((inside[1:] * inside[:-1]).sum())
    pairs = users * (batches - 1)
    # Var sum_t x_t x_(t+1) = (T-1) (q^2 - q^4) + 2 (T-2) (q^3 - q^4), for each user.
    spread = users * ((batches - 1) * (rate**2 - rate**4) + 2 * (batches - 2) * (rate**3 - rate**4))
    z = (overlap - pairs * rate**2) / np.sqrt(spread)
    return SamplingTest(
        users, batches, _two_sided(sizes, batches), _two_sided(counts, users), float(2 * norm.sf(abs(z)))
    )


def _two_sided(value: float, degrees: int) -> float:
    return float(min(1.0, 2 * min(chi2.cdf(value, degrees), chi2.sf(value, degrees))))


class ByKeys:
    """The product's draws: `poisson_draw` under the keys of a run, one place after the other."""

    def __init__(self, users: int, rate: float, seed: int) -> None:
        self._keys, self.users, self.rate = Keys(seed), users, rate

    def draw(self) -> np.ndarray:
        """The next batch."""
        drawn = poisson_draw(self._keys.sample(), self.users, self.rate)
        self._keys.ratchet()
        return drawn


class FixedSize:
    """The defect: batches of a fixed size, drawn without replacement."""

    def __init__(self, users: int, rate: float, seed: int) -> None:
        self._random, self.users, self.size = np.random.default_rng(seed), users, round(users * rate)

    def draw(self) -> np.ndarray:
        """The next batch."""
        return self._random.permutation(self.users)[: self.size]


class Shuffled(FixedSize):
    """The usual defect: shuffle once an epoch, then cut into batches."""

    def __init__(self, users: int, rate: float, seed: int) -> None:
        super().__init__(users, rate, seed)
        self._left = np.zeros(0, dtype=np.int64)

    def draw(self) -> np.ndarray:
        """The next batch of the epoch."""
        if len(self._left) < self.size:
            self._left = self._random.permutation(self.users)
        batch, self._left = self._left[: self.size], self._left[self.size :]
        return batch
