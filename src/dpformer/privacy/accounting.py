"""Epsilon of charges at a delta, by two accountants of `dp_accounting`.

The privacy loss distribution (PLD) is the accountant: it is numerically tight. Renyi differential privacy (RDP) is the
cross-check: a closed bound that is a few percent looser. Both are upper bounds on epsilon. So RDP below PLD means that PLD has
failed numerically; then RDP is used, and the result says so.

PLD rounds losses up to a grid: a coarse grid only overstates epsilon, by the square of its interval. The grid is refined until
epsilon moves by less than 2 parts in 10,000, which leaves about 1 in 75,000. At very small rates with very many steps (1e-5 and
a million) the finest grid does not suffice, and epsilon is overstated, which is the safe side.
"""

import functools
import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal

import dp_accounting
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant

from dpformer.privacy.charge import Charge, check_delta, check_threshold, event

# The number of users stays, and one user's events are replaced by none.
NEIGHBOURS = dp_accounting.NeighboringRelation.REPLACE_SPECIAL
# Below this, PLD's truncated tails (1e-15 at each composition) are not small compared with delta.
SMALLEST_PLD_DELTA = 1e-11
# The finest interval of a grid: memory grows with its inverse, and stopping here only overstates epsilon.
FINEST = 1e-5
_SETTLED = 2e-4


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
    """The (epsilon, delta) guarantee of all charges, between neighbours (see `charge`).

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
