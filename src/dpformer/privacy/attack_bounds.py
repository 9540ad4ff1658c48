"""The best that any membership attack can do: what epsilon means.

An attacker sees everything that was released, has the data of all other users, and tests whether one user took part. Let the
test flag a non-member with probability alpha (false positives) and a member with probability beta (true positives). (epsilon,
delta)-DP for one pair bounds every test by

    beta <= delta + e^epsilon alpha    and    1 - alpha <= delta + e^epsilon (1 - beta),

and a mechanism has a whole curve delta(epsilon), so the best test is at most the smallest of these bounds over epsilon. For one
Gaussian mechanism of multiplier sigma the curve is beta = Phi(Phi^-1(alpha) + 1 / sigma). The curve here is that of the privacy
loss distribution, or, where that is not reliable, the one point (epsilon, delta).
"""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dp_accounting
import numpy as np

from dpformer.privacy.accounting import Charge, Epsilon, coarse_interval, epsilon, event, pld

# A delta at which PLD is reliable.
PLD_DELTA = 1e-9


@dataclass(frozen=True)
class AttackBound:
    """No membership attack identifies more than `true_positive_rate` of the members at `false_positive_rate`.

    `advantage` is the most that true positives can exceed false positives, at any false positive rate.
    """

    false_positive_rate: float
    true_positive_rate: float
    advantage: float

    def sentence(self) -> str:
        """The bound in plain words."""
        return (
            "An attacker who has the data of all other users and wrongly flags "
            f"{self.false_positive_rate:.0%} of non-members can correctly identify at most "
            f"{percent_up(self.true_positive_rate)} of members; guessing whether one person took part succeeds at most "
            f"{percent_up((1 + self.advantage) / 2)} of the time (a coin: 50%)."
        )


def percent_up(share: float) -> str:
    """A share in percent with one digit, rounded up: it is an upper bound.

    >>> percent_up(0.25441), percent_up(0.254), percent_up(1.0)
    ('25.5%', '25.4%', '100.0%')
    """
    return f"{math.ceil(round(share * 1000, 9)) / 10:.1f}%"


def attack_bound(
    charges: Iterable[Charge], delta: float, false_positive_rate: float = 0.01, threshold_delta: float = 0.0
) -> AttackBound:
    """The best that any membership attack can do against everything that was released for these charges.

    threshold_delta: the part of delta that a threshold takes (see `selection`).
    """
    return _attack_bound(tuple(charges), delta, false_positive_rate, threshold_delta)


@functools.lru_cache(maxsize=256)
def _attack_bound(
    charges: tuple[Charge, ...], delta: float, false_positive_rate: float, threshold_delta: float
) -> AttackBound:
    # The curve is that of the charges; delta only limits how far it is computed, and PLD cannot compute its end.
    spent = epsilon(charges, max(delta - threshold_delta, PLD_DELTA))
    epsilons, deltas = delta_curve(charges, spent)
    return bound_from(epsilons, np.minimum(deltas + threshold_delta, 1.0), false_positive_rate)


def bound_from(epsilons: np.ndarray, deltas: np.ndarray, false_positive_rate: float = 0.01) -> AttackBound:
    """The bound that follows from points (epsilon, delta) which all hold; one is enough, more are tighter.

    Each point allows an advantage of (e^epsilon - 1 + 2 delta) / (e^epsilon + 1); at epsilon 0 that is delta(0).
    """
    reached = float(power([false_positive_rate], epsilons, deltas)[0])
    advantages = np.tanh(epsilons / 2) + 2 * deltas / (np.exp(np.minimum(epsilons, 700)) + 1)
    return AttackBound(false_positive_rate, reached, float(np.clip(advantages.min(), 0, 1)))


def delta_curve(charges: Sequence[Charge], spent: Epsilon) -> tuple[np.ndarray, np.ndarray]:
    """Points (epsilon, delta) that all hold for the charges; a single one where PLD is not used."""
    if isinstance(event(charges), dp_accounting.NoOpDpEvent):
        return np.zeros(1), np.zeros(1)
    if spent.accountant == "rdp" or math.isinf(spent.epsilon):
        return np.array([spent.epsilon]), np.array([spent.delta])
    epsilons = np.linspace(0, 1.5 * spent.epsilon + 1, 401)
    loss = pld(event(charges), coarse_interval(spent.epsilon) / 4)
    return epsilons, np.array([loss.get_delta(value) for value in epsilons])


def power(alphas: Sequence[float], epsilons: np.ndarray, deltas: np.ndarray) -> np.ndarray:
    """An upper bound on the true positive rate of any test at each false positive rate alpha."""
    alpha = np.asarray(alphas, dtype=float)[:, None]
    with np.errstate(over="ignore", invalid="ignore"):
        direct = deltas + np.exp(epsilons) * alpha
        reverse = 1 - np.exp(-epsilons) * (1 - deltas - alpha)
    bounds = np.where(np.isinf(epsilons), 1.0, np.minimum(direct, reverse))
    return np.clip(bounds.min(axis=1), 0.0, 1.0)
