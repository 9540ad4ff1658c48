"""Charges (what ran), and the epsilon that they spend at a delta, by two accountants of `dp_accounting`.

The unit is one user. Neighbours: the number of users stays, and one user's events are replaced by none. A charge is `times`
sums to which each user contributes a vector of L2 norm at most C, each with Gaussian noise of standard deviation
noise_multiplier * C. Of the two, an accountant needs the noise multiplier alone (the paper's sigma).

* rate 1: each sum is over all users. T such sums, which may depend on the earlier ones, are mu-GDP with mu = sqrt(T) / sigma.
* rate q < 1: each sum is over a batch into which every user is drawn independently with probability q (Poisson sampling). This
  holds only if the sampler does exactly that: a shuffled epoch is *not* such a batch.

Gaussian mechanisms compose exactly, adaptively too: all of them are one with mu^2 = sum of mu_i^2. So charges with noise
sigma / sqrt(s_i) are one Gaussian mechanism of multiplier sigma when their shares s_i sum to 1.

The privacy loss distribution (PLD) is the accountant: it is numerically tight. Renyi differential privacy (RDP) is the
cross-check, a few percent looser. Both are upper bounds on epsilon, so RDP below PLD means that PLD has failed numerically; then
RDP is used, and the result says so. PLD rounds losses up to a grid: a coarse one only overstates epsilon, by the square of its
interval. It is refined until epsilon moves by less than 2 parts in 10,000, which leaves about 1 in 75,000; at very small rates
with very many steps (1e-5 and a million) the finest grid still overstates epsilon.
"""

import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpformer.errors import PrivacyError

# The number of users stays, and one user's events are replaced by none.
NEIGHBOURS = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
# Below this, PLD's truncated tails (1e-15 at each composition) are not small compared with delta.
SMALLEST_PLD_DELTA = 1e-11
# The finest interval of a grid: memory grows with its inverse, and stopping here only overstates epsilon.
FINEST = 1e-5
_SETTLED = 2e-4


@dataclass(frozen=True)
class Charge:
    """`times` noisy sums under one name, each over users drawn with probability `rate`. noise_multiplier 0: not private."""

    name: str
    noise_multiplier: float
    rate: float = 1.0
    times: int = 1

    def __post_init__(self) -> None:
        if not self.name:
            raise PrivacyError("a charge needs a name that says what is asked")
        if not (math.isfinite(self.noise_multiplier) and self.noise_multiplier >= 0):
            raise PrivacyError(f"noise multiplier {self.noise_multiplier:g} is not a finite number of at least 0")
        if not 0 < self.rate <= 1:
            raise PrivacyError(f"sampling rate {self.rate:g} is not in (0, 1]; a batch has 1 to all users")
        if self.times != int(self.times) or self.times < 0:
            raise PrivacyError(f"times {self.times!r} is not a whole number of at least 0")


def scaled(charges: Iterable[Charge], factor: float) -> tuple[Charge, ...]:
    """The same sums with all noise multiplied by one factor."""
    return tuple(replace(charge, noise_multiplier=charge.noise_multiplier * factor) for charge in charges)


def event(charges: Iterable[Charge]) -> dp_accounting.DpEvent:
    """All charges as one event for an accountant.

    Gaussians are merged into one, and equal Poisson steps are counted once with their number. Both are exact, and save the
    accountant one convolution for each step of a ledger.
    """
    gaussians: list[float] = []
    poisson: Counter[tuple[float, float]] = Counter()
    for charge in charges:
        if charge.times == 0:
            continue
        if charge.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if charge.rate < 1:
            poisson[charge.rate, charge.noise_multiplier] += charge.times
        else:
            gaussians.append(charge.noise_multiplier / math.sqrt(charge.times))
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), times
        )
        for (rate, sigma), times in poisson.items()
    ]
    if gaussians:
        parts.append(dp_accounting.GaussianDpEvent(composed_multiplier(gaussians)))
    if not parts:
        return dp_accounting.NoOpDpEvent()
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)


def composed_multiplier(multipliers: Iterable[float]) -> float:
    """The multiplier of one Gaussian mechanism that is equal to these: (sum of sigma_i^-2)^(-1/2)."""
    total = sum(1 / sigma**2 for sigma in multipliers)
    return math.inf if total == 0 else 1 / math.sqrt(total)


def split_budget(noise_multiplier: float, shares: Mapping[str, float]) -> tuple[Charge, ...]:
    """Divide one Gaussian budget of multiplier sigma by named shares: sigma_i = sigma / sqrt(share_i).

    Shares that are not positive, or sum to more than 1, are refused.
    """
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise PrivacyError(f"share {share:g} of {name!r} is not in (0, 1]")
    if sum(shares.values()) > 1 + 1e-9:
        raise PrivacyError(f"the shares sum to {sum(shares.values()):g}; they may sum to 1 at most")
    return tuple(Charge(name, noise_multiplier / math.sqrt(share)) for name, share in shares.items())


@dataclass(frozen=True)
class Epsilon:
    """What charges spend at `delta`: `epsilon` is the value to rely on.

    accountant: "pld"; or "rdp" where PLD failed (`note` says why); or "gaussian" for full-batch Gaussians alone, whose epsilon
    has a closed form. pld, rdp: the bound of each; infinite where it has none.
    """

    epsilon: float
    delta: float
    accountant: Literal["pld", "rdp", "gaussian"]
    pld: float
    rdp: float
    note: str = ""


def epsilon(charges: Iterable[Charge], delta: float, threshold_delta: float = 0.0) -> Epsilon:
    """The (epsilon, delta) guarantee of all charges, between neighbours.

    threshold_delta: the part of delta that a threshold takes (see `selection`); the charges have the rest.
    """
    check_delta(delta)
    check_threshold(threshold_delta, delta)
    return replace(_epsilon(tuple(charges), delta - threshold_delta), delta=delta)


@functools.lru_cache(maxsize=256)
def _epsilon(charges: tuple[Charge, ...], delta: float) -> Epsilon:
    what = event(charges)
    by_rdp, by_pld, failure = rdp_epsilon(what, delta), math.inf, ""
    if isinstance(what, dp_accounting.NonPrivateDpEvent):
        return Epsilon(math.inf, delta, "pld", math.inf, math.inf, "without noise nothing is private")
    if isinstance(what, dp_accounting.NoOpDpEvent):
        return Epsilon(0.0, delta, "pld", 0.0, 0.0)
    if isinstance(what, dp_accounting.GaussianDpEvent):
        exact = float(dp_accounting.get_epsilon_gaussian(what.noise_multiplier, delta))
        return Epsilon(exact, delta, "gaussian", exact, by_rdp)
    if delta < SMALLEST_PLD_DELTA:
        failure = f"PLD is not reliable at delta {delta:g}, below {SMALLEST_PLD_DELTA:g}"
    else:
        try:
            by_pld = settled(lambda interval: float(pld(what, interval).get_epsilon(delta)), by_rdp)
            if math.isnan(by_pld) or by_pld > by_rdp * (1 + _SETTLED) + 1e-6:
                failure = f"PLD gave {by_pld:g}, above the bound {by_rdp:g} of RDP, so it failed numerically"
        except (ValueError, ArithmeticError, MemoryError) as error:
            failure = f"PLD failed ({type(error).__name__})"
    if failure:
        return Epsilon(by_rdp, delta, "rdp", by_pld, by_rdp, f"{failure}; RDP is used")
    return Epsilon(by_pld, delta, "pld", by_pld, by_rdp)


def pld(what: dp_accounting.DpEvent, interval: float) -> PLDAccountant:
    """PLD on a grid of this interval. Its epsilon and delta are never below the truth, and above it by O(interval^2)."""
    return PLDAccountant(NEIGHBOURS, value_discretization_interval=interval).compose(what)


def rdp_epsilon(what: dp_accounting.DpEvent, delta: float) -> float:
    """Epsilon by RDP over dp_accounting's default orders. Never below the truth; infinite where no order works."""
    logger = logging.getLogger("absl")
    logger.addFilter(_not_about_orders)
    try:
        return float(RdpAccountant(neighboring_relation=NEIGHBOURS).compose(what).get_epsilon(delta))
    finally:
        logger.removeFilter(_not_about_orders)


def _not_about_orders(record: logging.LogRecord) -> bool:
    """Drop RDP's warnings about orders that it leaves out: leaving one out only loosens the bound."""
    return "_compute_log_a_frac" not in record.getMessage()


def coarse_interval(scale: float) -> float:
    """A first grid interval for losses of about `scale`: fine enough to be near the truth, coarse enough to be quick."""
    return min(max(scale * 1e-3, FINEST), 0.1) if math.isfinite(scale) else 1e-3


def settled(function: Callable[[float], float], scale: float, tolerance: float = _SETTLED) -> float:
    """`function` of the grid interval, refined until its value moves by less than `tolerance`, relative."""
    interval = coarse_interval(scale)
    value = function(interval)
    while interval >= 4 * FINEST and math.isfinite(value):
        interval /= 4
        before, value = value, function(interval)
        if abs(before - value) <= tolerance * value + 1e-9:
            break
    return value


def check_epsilon(value: float) -> None:
    """Refuse an epsilon that is not positive. Infinity is allowed and means: not private."""
    if math.isnan(value) or value <= 0:
        raise PrivacyError(f"epsilon {value:g} is not above 0; typical budgets are 1 to 10, and inf is not private")


def check_delta(value: float, users: int | None = None) -> None:
    """Refuse a delta outside (0, 1), or at or above 1/users, where a mechanism may publish one whole user."""
    if math.isnan(value) or not 0 < value < 1:
        raise PrivacyError(f"delta {value:g} is not in (0, 1); 1e-5 is usual")
    if users is not None and value * users >= 1:
        smaller = f"choose a smaller one, such as {min(1e-5, 0.1 / users):.0e}"
        raise PrivacyError(
            f"delta {value:g} is not below 1/users = {1 / users:.6g}: it may publish a whole user; {smaller}"
        )


def check_threshold(threshold_delta: float, delta: float) -> None:
    """Refuse a threshold that leaves nothing of delta for the noise."""
    if not 0 <= threshold_delta < delta:
        raise PrivacyError(f"the threshold delta, {threshold_delta:g}, is not below delta, {delta:g}")
