"""What k guesses about m canaries say of the guarantee, from a single training.

m canaries are each put in by a fair coin u_i, independently. The attacker sees everything that was released, guesses k of the
coins (his best k; the number is fixed beforehand) and W of the guesses are right.

**(epsilon, delta).** Give the attacker u_1 .. u_(i-1) too. With P and Q the laws of the output y for u_i = 1 and 0, the posterior
chance of the better guess is max(P, Q) / (P + Q). It is at most p = e^eps / (1 + e^eps) but for an excess
(max - e^eps min)_+ / ((1 + e^eps) (P + Q)); so the guess is right only if a coin of bias p falls so or another of bias
(1 + e^eps) * excess does, whose chance is delta at most on average over y, as the integral of (max - e^eps min)_+ is at most
2 delta and y has the law (P + Q) / 2. One of the m other coins falls with chance m delta at most. Hence

    Pr[W >= w] <= Pr[Binomial(k, p) >= w] + m delta,

the bound of Steinke, Nasr and Jagielski (2023) with a plainer delta term. An
epsilon for which this is below 1 - confidence is refuted.

**mu-GDP.** Let p_j = Pr[W = j] and fbar(x) = Phi(Phi^-1(x) + mu), the largest chance of an event under one of two
neighbours whose chance under the other is x. Take a canary at random and the event that it is guessed right and at least
i are right in all. Turn its coin: the same outputs now have it guessed wrong and at least i - 1 right.
With Jensen (fbar is concave), for every i,

    sum_(j >= i) (j / m) p_j  <=  fbar( sum_(j >= i-1) ((k - j) / m) p_j ),

as in Mahloujifar, Melis and Chaudhuri (2024). fbar is the least of its tangents, so the largest possible Pr[W >= w] is a linear
program; a finite number of tangents only makes it larger. A mu for which it is below 1 - confidence is refuted. It uses the whole
trade-off curve and is much tighter.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from scipy.optimize import brentq, linprog
from scipy.stats import binom, norm

from dpformer.privacy import epsilon
from dpformer.privacy.attack_bounds import delta_curve
from dpformer.privacy.charge import Charge
from dpformer.trust.verify.folder import gaussian_delta, gaussian_epsilon

TANGENTS = 24
CONFIDENCE = 0.95


def epsilon_refuted(correct: int, guesses: int, canaries: int, delta: float, confidence: float = CONFIDENCE) -> float:
    """The largest epsilon that so many correct guesses refute, 0 if none.

    >>> round(epsilon_refuted(79, 80, 400, 1e-5), 2), epsilon_refuted(42, 80, 400, 1e-5)
    (2.77, 0.0)
    """

    def chance(eps: float) -> float:
        return float(binom.sf(correct - 1, guesses, 1 / (1 + math.exp(-eps)))) + canaries * delta - (1 - confidence)

    if chance(0.0) >= 0:
        return 0.0
    return 50.0 if chance(50.0) < 0 else float(brentq(chance, 0.0, 50.0))


def most_likely_tail(mu: float, correct: int, guesses: int, canaries: int) -> float:
    """The largest Pr[W >= correct] that mu-GDP allows."""
    q = np.linspace(-4.5 - mu, 4.5, TANGENTS)
    slope = np.exp(-(q * mu + mu * mu / 2))
    at_zero = norm.cdf(q + mu) - slope * norm.cdf(q)
    j = np.arange(guesses + 1)
    first = np.arange(1, guesses + 1)[:, None]
    right = np.where(j >= first, j, 0) / canaries
    wrong = np.where(j >= first - 1, guesses - j, 0) / canaries
    # right_i <= slope wrong_i + at_zero, for each i and tangent; rows are scaled so that none is huge.
    scale = 1 / np.maximum(slope, 1.0)
    rows = scale[:, None, None] * (right[None] - slope[:, None, None] * wrong[None])
    limits = np.repeat(scale * at_zero, guesses)
    solution = linprog(
        -(j >= correct).astype(float),
        A_ub=rows.reshape(-1, guesses + 1),
        b_ub=limits,
        A_eq=np.ones((1, guesses + 1)),
        b_eq=[1.0],
        bounds=(0, 1),
        method="highs",
    )
    return 1.0 if solution.status != 0 else float(-solution.fun)


def mu_refuted(correct: int, guesses: int, canaries: int, confidence: float = CONFIDENCE) -> float:
    """The largest mu that so many correct guesses refute, to 0.01; 0 if none."""
    low, high = 0.0, 8.0
    while high - low > 0.01:
        middle = (low + high) / 2
        if most_likely_tail(middle, correct, guesses, canaries) < 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def claimed_mu(charges: Sequence[Charge], delta: float) -> float:
    """The least mu such that mu-GDP allows all that the claim allows: the largest over the curve delta(epsilon).

    For Gaussian mechanisms it is their own mu. A Poisson-sampled training is a little less than mu-GDP everywhere.
    """
    epsilons, deltas = delta_curve(tuple(charges), epsilon(charges, delta))
    largest = 0.0
    for eps, value in zip(epsilons, deltas, strict=True):
        if 1e-7 < value < 1 and gaussian_delta(40.0, float(eps)) > value:
            largest = max(largest, float(brentq(lambda mu: gaussian_delta(mu, float(eps)) - value, 1e-6, 40.0)))  # noqa: B023
    return largest


def epsilon_of(mu: float, delta: float) -> float:
    """What a mu-GDP mechanism spends at delta."""
    return gaussian_epsilon(mu, delta) if mu > 0 else 0.0
