"""`Prior`: answers of earlier runs as a prior for those of a new one: free post-processing of what was released.

Both say the same about one person, up to noise, and N_0 and N people were asked. So an earlier count, C_0, is taken to say
C_0 = r C + noise with r = N_0 / N, and is combined with the new one by precision:

    C = (Y / V + r C_0 / V_0) / (1 / V + r^2 / V_0),      Var C = 1 / (1 / V + r^2 / V_0).

If habits change, this is slow to follow; `refit --no-prior` starts anew.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from dpformer.privacy.build import Conditions
from dpformer.privacy.query import Answer
from dpformer.statistics.combine import Measured


@dataclass(frozen=True)
class Prior:
    """What earlier runs measured, in the numbers of the new catalogue and in counts of `users` people.

    histogram, its precision [items + 1], 0 for items that were not asked about; head [P], counts and precision [P, P]; noise:
    of `Measured`. conditions: of the statement of the last of these runs.
    """

    users: np.ndarray
    histogram: np.ndarray
    histogram_precision: np.ndarray
    head: np.ndarray
    counts: np.ndarray
    precision: np.ndarray
    noise: np.ndarray
    conditions: Conditions = field(default_factory=Conditions)

    @classmethod
    def of(cls, users: int, histogram: Answer, measured: Measured, numbers: np.ndarray, items: int) -> "Prior":
        """From what a run measured. numbers: of its items in the new catalogue of `items`, 0 if it does not have them."""
        kept = numbers[1:] > 0
        values, precision = np.zeros(items + 1), np.zeros(items + 1)
        values[numbers[1:][kept]] = measured.histogram[1:][kept]
        precision[numbers[1:][kept]] = histogram.noise_std**-2.0
        there = np.flatnonzero(numbers[measured.head] > 0)
        cells = np.ix_(there, there)
        with np.errstate(divide="ignore"):
            of_counts = 1 / measured.variance[cells]
        return cls(
            np.array([users]),
            values,
            precision,
            numbers[measured.head[there]],
            measured.counts[cells],
            of_counts,
            np.array([measured.noise]),
        )

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, for a file."""
        return {name: np.ascontiguousarray(value) for name, value in vars(self).items() if name != "conditions"}

    def with_histogram(self, answer: Answer, users: int) -> Answer:
        """The new histogram combined with the earlier one. Items that are new keep the noise of the new answer alone."""
        r, new = self.users.item() / users, answer.noise_std**-2.0
        noisy = answer.values[answer.name]
        both = (noisy * new + r * self.histogram * self.histogram_precision) / (new + r * r * self.histogram_precision)
        std = float((new + r * r * self.histogram_precision.max()) ** -0.5)
        return replace(answer, values={answer.name: both}, noise_std=std)

    def with_counts(self, measured: Measured, users: int) -> Measured:
        """The new transitions combined with the earlier ones, in cells that both have."""
        r, place = self.users.item() / users, np.full(len(measured.histogram), -1)
        place[measured.head] = np.arange(len(measured.head))
        there = place[self.head]
        cells = np.ix_(there[there >= 0], there[there >= 0])
        mine = np.ix_(there >= 0, there >= 0)
        with np.errstate(divide="ignore"):
            precision = 1 / measured.variance
        weighted = np.where(precision > 0, measured.counts * precision, 0.0)
        weighted[cells] += r * (self.counts * self.precision)[mine]
        precision[cells] += r * r * self.precision[mine]
        more: dict[str, Any] = {}
        with np.errstate(divide="ignore"):
            more["variance"] = 1 / precision
        more["counts"] = np.divide(weighted, precision, out=np.zeros_like(weighted), where=precision > 0)
        more["noise"] = float((measured.noise**-2.0 + (r / self.noise.item()) ** 2) ** -0.5)
        return replace(measured, **more)
