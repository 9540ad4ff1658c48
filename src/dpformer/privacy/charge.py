"""What ran, described so that an accountant can count it: mechanisms as `dp_accounting` events.

The unit is one user. Neighbours: the number of users stays, and one user's events are replaced by none. Every mechanism here adds
Gaussian noise of
standard deviation `noise_multiplier * C` to a sum in which each user's contribution has L2 norm at most C; the noise
multiplier (the paper's sigma) is all that an accountant needs to know of the pair.

Guarantee of the parts:

* `GaussianRelease`: one sum over all users. It is mu-GDP with mu = 1 / sigma.
* `FullBatchSteps`: T such sums, each of which may depend on the earlier ones: mu = sqrt(T) / sigma.
* `PoissonSteps`: T sums, each over a batch into which every user is drawn independently with probability `rate`.
  Holds only if the sampler does exactly that; a shuffled epoch is *not* such a batch.

Gaussian mechanisms compose exactly, adaptively too: together they are one with mu^2 = sum of mu_i^2. So releases with
shares s_i of a total multiplier sigma, each with noise sigma / sqrt(s_i), are together exactly one Gaussian
mechanism of multiplier sigma when the shares sum to 1.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import dp_accounting

from dpformer.errors import PrivacyError


@dataclass(frozen=True)
class GaussianRelease:
    """One sum over all users, released once under a name. `noise_multiplier` 0 means: not private."""

    name: str
    noise_multiplier: float

    def __post_init__(self) -> None:
        if not self.name:
            raise PrivacyError("a release needs a name that says what is released")
        check_noise_multiplier(self.noise_multiplier)


@dataclass(frozen=True)
class FullBatchSteps:
    """`steps` sums over all users; no assumption about sampling. `noise_multiplier` 0 means: not private."""

    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        check_noise_multiplier(self.noise_multiplier)
        check_steps(self.steps)


@dataclass(frozen=True)
class PoissonSteps:
    """`steps` sums over Poisson batches of sampling rate `rate`. `noise_multiplier` 0 means: not private."""

    rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if not 0 < self.rate <= 1:
            raise PrivacyError(
                f"sampling rate {self.rate:g} is not in (0, 1]: the expected batch size must be positive and at most "
                "the number of users"
            )
        check_noise_multiplier(self.noise_multiplier)
        check_steps(self.steps)


Mechanism = GaussianRelease | FullBatchSteps | PoissonSteps


def check_noise_multiplier(value: float) -> None:
    """Refuse a noise multiplier that is negative or not a number."""
    if not (math.isfinite(value) and value >= 0):
        raise PrivacyError(f"noise multiplier {value:g} is not a finite number of at least 0")


def check_steps(value: int) -> None:
    """Refuse a number of steps that is negative or not whole."""
    if value != int(value) or value < 0:
        raise PrivacyError(f"steps {value!r} is not a whole number of at least 0")


def check_epsilon(value: float) -> None:
    """Refuse an epsilon that is not positive. Infinity is allowed and means: not private."""
    if math.isnan(value) or value <= 0:
        raise PrivacyError(f"epsilon {value:g} is not above 0; typical budgets are 1 to 10, and inf is not private")


def check_delta(value: float, users: int | None = None) -> None:
    """Refuse a delta outside (0, 1), or at or above 1/users, where publishing one whole user could hide in it."""
    if math.isnan(value) or not 0 < value < 1:
        raise PrivacyError(f"delta {value:g} is not in (0, 1); 1e-5 is usual")
    if users is not None and value * users >= 1:
        raise PrivacyError(
            f"delta {value:g} is not below 1/users = {1 / users:.6g}: so large a delta allows one whole user to be "
            f"published; choose a smaller one, such as {min(1e-5, 0.1 / users):.0e}"
        )


def split_releases(noise_multiplier: float, shares: Mapping[str, float]) -> tuple[GaussianRelease, ...]:
    """Divide one Gaussian budget of multiplier sigma among named releases: sigma_i = sigma / sqrt(share_i).

    With shares that sum to 1 the releases together are exactly one Gaussian mechanism of multiplier sigma.
    """
    check_shares(shares)
    return tuple(GaussianRelease(name, noise_multiplier / math.sqrt(share)) for name, share in shares.items())


def check_shares(shares: Mapping[str, float]) -> None:
    """Refuse shares that are not positive or that sum to more than the whole budget."""
    for name, share in shares.items():
        if not 0 < share <= 1:
            raise PrivacyError(f"share {share:g} of release {name!r} is not in (0, 1]")
    if sum(shares.values()) > 1 + 1e-9:
        raise PrivacyError(f"the shares of the releases sum to {sum(shares.values()):g}; they may sum to 1 at most")


def composed_multiplier(multipliers: Iterable[float]) -> float:
    """The multiplier of the one Gaussian mechanism that these are together: (sum of sigma_i^-2)^(-1/2)."""
    total = sum(1 / sigma**2 for sigma in multipliers)
    return math.inf if total == 0 else 1 / math.sqrt(total)


def event(mechanisms: Iterable[Mechanism]) -> dp_accounting.DpEvent:
    """All of the mechanisms together, as one event for an accountant.

    Gaussians are merged into one and equal Poisson steps are counted together. Both are exact, and they spare the
    accountant one convolution for each step of a ledger.
    """
    gaussians: list[float] = []
    poisson: Counter[tuple[float, float]] = Counter()
    for mechanism in mechanisms:
        steps = 1 if isinstance(mechanism, GaussianRelease) else mechanism.steps
        if steps == 0:
            continue
        if mechanism.noise_multiplier == 0:
            return dp_accounting.NonPrivateDpEvent()
        if isinstance(mechanism, PoissonSteps) and mechanism.rate < 1:
            poisson[mechanism.rate, mechanism.noise_multiplier] += steps
        else:
            gaussians.append(mechanism.noise_multiplier / math.sqrt(steps))
    parts: list[dp_accounting.DpEvent] = [
        dp_accounting.SelfComposedDpEvent(
            dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps
        )
        for (rate, sigma), steps in poisson.items()
    ]
    if gaussians:
        parts.append(dp_accounting.GaussianDpEvent(composed_multiplier(gaussians)))
    if not parts:
        return dp_accounting.NoOpDpEvent()
    return parts[0] if len(parts) == 1 else dp_accounting.ComposedDpEvent(parts)
