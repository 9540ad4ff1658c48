"""Charges: what ran, as events for an accountant of `dp_accounting`.

The unit is one user. Neighbours: the number of users stays, and one user's events are replaced by none. A charge is `times`
sums to which each user contributes a vector of L2 norm at most C, each with Gaussian noise of standard deviation
noise_multiplier * C. Of the two, an accountant needs the noise multiplier alone (the paper's sigma).

Guarantee of a charge:

* rate 1: each sum is over all users. T such sums, which may depend on the earlier ones, are mu-GDP with mu = sqrt(T) / sigma.
* rate q < 1: each sum is over a batch into which every user is drawn independently with probability q (Poisson sampling). This
  holds only if the sampler does exactly that: a shuffled epoch is *not* such a batch.

Gaussian mechanisms compose exactly, adaptively too: all of them are one with mu^2 = sum of mu_i^2. So charges with shares s_i
of a total multiplier sigma, each with noise sigma / sqrt(s_i), are exactly one Gaussian mechanism of multiplier sigma when the
shares sum to 1.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dp_accounting

from dpformer.errors import PrivacyError


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

    With shares that sum to 1 the charges are exactly one Gaussian mechanism of multiplier sigma. Shares that are not positive,
    or sum to more than 1, are refused.
    """
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise PrivacyError(f"share {share:g} of {name!r} is not in (0, 1]")
    if sum(shares.values()) > 1 + 1e-9:
        raise PrivacyError(f"the shares sum to {sum(shares.values()):g}; they may sum to 1 at most")
    return tuple(Charge(name, noise_multiplier / math.sqrt(share)) for name, share in shares.items())


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
