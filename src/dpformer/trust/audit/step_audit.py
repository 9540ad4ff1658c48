"""Does a step hide one user as well as it claims? A white-box audit of single steps.

Take many noisy sums without and with a canary user whose clipped gradient v has norm C, and look at each along v:
<sum, v> / C. If the noise is Gaussian with standard deviation sigma C, both samples are Gaussian with the same spread
and their means differ by C, that is by mu = 1 / sigma standard deviations, which is exactly the mu-GDP of a step
before sampling. With n sums of each kind the two-sample statistic t = sqrt(n/2) (difference of means) / (pooled
deviation) follows a noncentral t distribution with 2n - 2 degrees of freedom and noncentrality mu sqrt(n/2); inverting
it gives an exact confidence interval for mu.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import nct, norm

from dpformer.errors import PrivacyError


@dataclass(frozen=True)
class StepAudit:
    """The measured mu of a single step, its confidence interval, and the claim 1 / sigma that it must hold."""

    claimed_mu: float
    mu: float
    low: float
    high: float
    confidence: float
    trials: int

    @property
    def passed(self) -> bool:
        """Whether the interval holds the claim. Too little noise puts it above, too much or no canary below."""
        return self.low <= self.claimed_mu <= self.high


def audit_step(
    noisy_sum: Callable[[bool], Mapping[str, torch.Tensor]],
    canary: Mapping[str, torch.Tensor],
    noise_multiplier: float,
    trials: int = 2000,
    confidence: float = 0.999,
) -> StepAudit:
    """Audit the real thing: `noisy_sum(with_canary)` makes one noisy sum, by parameter name, with fresh noise.

    `canary` is the canary's clipped gradient, of the largest norm that clipping allows. The audit has power when
    trials >> sigma^2: halved noise is told apart once sqrt(trials / 2) / sigma is above about 8.
    """
    if trials < 10:
        raise PrivacyError(f"trials {trials} are too few for an interval; take at least 10")
    size = math.sqrt(sum(float(value.double().square().sum()) for value in canary.values()))
    if not size > 0:
        raise PrivacyError("the canary's gradient is zero; nothing can be seen of it")

    def scores(with_canary: bool) -> np.ndarray:
        projections = np.empty(trials)
        for trial in range(trials):
            total = noisy_sum(with_canary)
            projections[trial] = sum(
                float((total[name].double() * value.double()).sum()) for name, value in canary.items()
            )
        return projections / size

    mu, low, high = mu_interval(scores(False), scores(True), confidence)
    return StepAudit(1 / noise_multiplier, mu, low, high, confidence, trials)


def mu_interval(without: np.ndarray, present: np.ndarray, confidence: float) -> tuple[float, float, float]:
    """Estimate of mu and its exact interval, from equally many Gaussian scores without and with the canary."""
    n = len(without)
    if len(present) != n:
        raise PrivacyError(f"{n} scores without the canary and {len(present)} with it; take equally many")
    pooled = math.sqrt((without.var(ddof=1) + present.var(ddof=1)) / 2)
    root = math.sqrt(n / 2)
    mu = float((present.mean() - without.mean()) / pooled)
    tail = (1 - confidence) / 2
    # A little beyond the normal approximation's ends: much farther out the noncentral t is not computed reliably.
    reach = (float(norm.isf(tail)) + 1.5) * math.sqrt(1 + mu**2 / 4) / root

    def end(probability: float) -> float:
        # The distribution function falls in the noncentrality; the end of the interval is where it equals the tail.
        return float(brentq(lambda m: nct.cdf(mu * root, 2 * n - 2, m * root) - probability, mu - reach, mu + reach))

    return mu, end(1 - tail), end(tail)
