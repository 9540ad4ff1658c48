"""Calibration: the noise that a budget needs.

A budget (epsilon, delta) is divided among releases and training steps like this:

1. sigma_1 is the multiplier of the single Gaussian mechanism that is exactly (epsilon, delta)-DP.
2. A release with share s gets noise sigma_1 / sqrt(s): it takes the fraction s of the Gaussian budget 1 / sigma_1^2.
3. The steps get the smallest noise with which releases and steps *as a whole* are (epsilon, delta)-DP. For full batches that is
   sigma_1 sqrt(T / (1 - sum of shares)) exactly; for Poisson batches it is less, and a search finds it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence

import dp_accounting
from scipy.optimize import brentq

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import (
    SMALLEST_PLD_DELTA,
    Charge,
    check_delta,
    check_epsilon,
    epsilon,
    event,
    pld,
    rdp_epsilon,
    settled,
    split_budget,
)

ChargesOf = Callable[[float], Sequence[Charge]]
_CEILING = math.log(1e9)
_SETTLED = 3e-4
# How far below the target the search aims, relative: more than two grids can disagree once they have settled.
_MARGIN = 2e-5


@functools.lru_cache(maxsize=256)
def gaussian_multiplier(target: float, delta: float) -> float:
    """sigma_1: the smallest multiplier of one Gaussian mechanism that is (target, delta)-DP (Balle and Wang 2018)."""
    check_epsilon(target)
    check_delta(delta)
    if math.isinf(target):
        return 0.0
    return float(dp_accounting.get_sigma_gaussian(target, delta)) * (1 + 1e-9)


def step_multiplier(
    target: float, delta: float, rate: float, steps: int, shares: Mapping[str, float] | None = None
) -> float:
    """The noise multiplier of `steps` Poisson steps (full batches for rate 1) beside releases with these shares.

    Within 0.1 % above the smallest value that keeps the whole (target, delta)-DP, and never below it.
    """
    return _step_multiplier(target, delta, rate, steps, tuple((shares or {}).items()))


@functools.lru_cache(maxsize=256)  # a search takes seconds, and runs of one recipe ask the same
def _step_multiplier(
    target: float, delta: float, rate: float, steps: int, named_shares: tuple[tuple[str, float], ...]
) -> float:
    shares = dict(named_shares)
    sigma_1 = gaussian_multiplier(target, delta)
    releases, left = split_budget(sigma_1, shares), 1 - sum(shares.values())
    if steps < 1:
        raise PrivacyError("no steps: there is nothing to calibrate; give epochs or steps above 0")
    if math.isinf(target):
        return 0.0
    if left <= 1e-9:
        raise PrivacyError("the releases' shares sum to 1 and leave nothing for the steps; lower a share")
    if rate == 1:
        return sigma_1 * math.sqrt(steps / left) * (1 + 1e-9)
    # By the central limit theorem T Poisson steps are about (q sqrt(T (exp(1/sigma^2) - 1)))-GDP.
    guess = 1 / math.sqrt(math.log1p(1 / (sigma_1 / math.sqrt(left) * rate) ** 2 / steps))
    return calibrate(lambda sigma: (*releases, Charge("steps", sigma, rate, steps)), target, delta, guess)


def calibrate(charges: ChargesOf, target: float, delta: float, guess: float = 1.0) -> float:
    """The smallest sigma for which `charges(sigma)` are (target, delta)-DP: within 0.1 %, never below.

    A coarse grid overstates epsilon, so a search on it asks for slightly too much noise; it is repeated on finer grids until
    the noise settles. `epsilon`, the function that the statement uses, confirms the result.
    """
    check_epsilon(target)
    check_delta(delta)
    sigma, width = guess, 0.1

    def search(interval: float) -> float:
        nonlocal sigma, width

        def spent(sigma: float) -> float:
            what = event(charges(sigma))
            by_rdp = delta < SMALLEST_PLD_DELTA
            return rdp_epsilon(what, delta) if by_rdp else float(pld(what, interval).get_epsilon(delta))

        sigma, width = smallest_noise(spent, target, sigma, width), 5e-4
        return sigma

    try:
        settled(search, target, _SETTLED)
    except PrivacyError:
        fixed = [part.name for part in charges(1.0) if part in charges(2.0)]
        message = f"no noise meets epsilon {target:g}: the releases {fixed} alone spend it; lower their shares"
        raise PrivacyError(message) from None
    for _ in range(100):
        if epsilon(charges(sigma), delta).epsilon <= target:
            return sigma
        sigma *= 1 + 1e-5
    raise PrivacyError(f"no noise could be confirmed for epsilon {target:g} at delta {delta:g}; choose another delta")


def smallest_noise(spent: Callable[[float], float], target: float, guess: float, width: float = 0.1) -> float:
    """The smallest sigma with spent(sigma) <= target, to 2 parts in 100,000, never below; `spent` must fall."""

    @functools.cache
    def excess(log_sigma: float) -> float:
        return min(spent(math.exp(log_sigma)), 1e9) / target - 1 + _MARGIN

    low = high = math.log(guess)
    while excess(high) > 0:
        low, high, width = high, high + width, 2 * width
        if high > _CEILING:
            raise PrivacyError(f"no noise meets epsilon {target:g}; raise epsilon")
    while excess(low) <= 0:
        low, high, width = low - width, low, 2 * width
    root = float(brentq(excess, low, high, xtol=_MARGIN / 2))
    while excess(root) > _MARGIN:
        root += _MARGIN / 2
    return math.exp(root)
