"""What right guesses about canaries say of a guarantee.

M canaries are each put in by a fair coin, independently. The attacker guesses k of the coins, k fixed beforehand, and W guesses
are right. Canaries may be of one fit or of several: a fit is no part of the others, so all fits together are one mechanism
that gives each canary the same guarantee. Two readings:

**Any mechanism** that is (epsilon, delta)-DP. Steinke, Nasr and Jagielski (2023) show, with B ~ Binomial(k, e^eps / (1 + e^eps)),

    Pr[W >= w] <= Pr[B >= w] + M delta max over i >= 1 of (2 / i) Pr[w - i <= B < w].

An epsilon for which this is below 1 - confidence is refuted. It wastes much: only the surest guesses count, and the delta of
all canaries adds up.

**A Gaussian mechanism.** Under mu-GDP the best guess of one coin is right with probability Phi(mu / 2) at the most. All coins are
guessed; canaries have cells of their own, so with sound noise their guesses are independent, and the exact interval of Clopper
and Pearson for the share of right ones gives mu, and so epsilon at delta.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import beta, binom, norm

from dpformer.privacy import epsilon
from dpformer.privacy.accounting import Charge
from dpformer.privacy.attack_bounds import delta_curve
from dpformer.trust.verify.ledger import gaussian_delta

CONFIDENCE = 0.95
"""Of the reading for any mechanism."""

GAUSSIAN_CONFIDENCE = 0.9999
"""Of the Gaussian reading, which is so tight that a sound claim would be refuted by 1 audit in 20 at 95 %."""

_LARGEST = 50.0


def epsilon_refuted(correct: int, guesses: int, canaries: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that so many right guesses refute, of any mechanism; 0 if none.

    >>> round(epsilon_refuted(79, 80, 400, 1e-5), 2), epsilon_refuted(42, 80, 400, 1e-5)
    (2.78, 0.0)
    """
    fewer = np.arange(1, guesses + 1)

    def chance(eps: float) -> float:
        p = 1 / (1 + math.exp(-eps))
        tail = float(binom.sf(correct - 1, guesses, p))
        near = binom.sf(correct - 1 - fewer, guesses, p) - tail
        return tail + canaries * delta * float(np.max(2 / fewer * near, initial=0.0)) - (1 - confidence)

    if chance(0.0) >= 0:
        return 0.0
    return _LARGEST if chance(_LARGEST) < 0 else float(brentq(chance, 0.0, _LARGEST))


def mu_refuted(correct: int, canaries: int, confidence: float = GAUSSIAN_CONFIDENCE) -> float:
    """The largest mu that so many right guesses of all coins refute; 0 if none.

    >>> round(mu_refuted(5600, 10000), 3), mu_refuted(5000, 10000)
    (0.208, 0.0)
    """
    share = float(beta.ppf(1 - confidence, correct, canaries - correct + 1)) if correct else 0.0
    return max(0.0, 2 * float(norm.ppf(share))) if share > 0 else 0.0


def claimed_mu(charges: Sequence[Charge], delta: float) -> float:
    """The least mu such that mu-GDP allows all that the claim allows: the largest over the curve delta(epsilon).

    For Gaussian mechanisms it is their own mu. A Poisson-sampled training is a little less than mu-GDP everywhere.
    """
    if all(charge.rate == 1 for charge in charges):
        return math.sqrt(sum(charge.times * charge.noise_multiplier**-2 for charge in charges))
    epsilons, deltas = delta_curve(tuple(charges), epsilon(charges, delta))
    largest = 0.0
    for eps, value in zip(epsilons, deltas, strict=True):
        if 1e-7 < value < 1 and gaussian_delta(40.0, float(eps)) > value:
            largest = max(largest, float(brentq(lambda mu: gaussian_delta(mu, float(eps)) - value, 1e-6, 40.0)))  # noqa: B023
    return largest
