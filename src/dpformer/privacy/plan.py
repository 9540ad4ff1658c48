"""The plan of a run: sampling rate, noise, divisor, steps and cost in one object, so that they cannot disagree."""

import functools
import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import (
    Charge,
    Epsilon,
    check_delta,
    check_epsilon,
    check_threshold,
    epsilon,
    split_budget,
)
from dpformer.privacy.calibration import gaussian_multiplier, step_multiplier

# Composing more takes minutes, and its rounding makes epsilon look larger than it is.
MOST_STEPS = 1_000_000
# The name of the query that a step asks.
GRADIENTS = "gradients"


@dataclass(frozen=True)
class PrivacyPlan:
    """What will run and what it costs. `make_plan` makes one with the smallest noise.

    Guarantee: if every user's contribution to a release or a step has norm at most C, each release named here is made at most
    once, at most `steps` steps are made, each over a batch into which every user is drawn independently with probability `rate`
    (over all users when the rate is 1), and each sum gets Gaussian noise of standard deviation noise_multiplier * C, then all
    that is released is (epsilon, delta)-DP between neighbours: one user's events are replaced by none.

    users: how many there are; assumed public. declared: it is a population in place of the number in the data, see
    `declared_users`; then a person who is replaced by none may be absent from the data, and others move up in it.
    batch_size: the *expected* batch, by which a noisy sum is divided. Never the realised one.
    noise_multiplier: of the steps; 0 when there are no steps, or epsilon is infinite (not private).
    releases: sums over all users, each asked once, that are paid from the same budget.
    threshold_delta: the part of delta that a threshold on the first release takes (a private catalogue, see `selection`).
    """

    users: int
    batch_size: int
    steps: int
    epsilon: float
    delta: float
    noise_multiplier: float
    releases: tuple[Charge, ...] = ()
    threshold_delta: float = 0.0
    declared: bool = False

    def __post_init__(self) -> None:
        _check_budget(self.users, self.batch_size, self.epsilon, self.delta, self.threshold_delta)
        names = [release.name for release in self.releases]
        _check_steps(self.steps, names)
        if len({*names, GRADIENTS}) < len(names) + 1:
            raise PrivacyError(f"two releases have the same name in {names}, or one has the steps' name, {GRADIENTS!r}")
        if any((release.rate, release.times) != (1.0, 1) for release in self.releases):
            raise PrivacyError("a release is one sum over all users: its rate and its times must be 1")
        if self.private and (spent := self.total.epsilon) > self.epsilon * (1 + 1e-9):
            what = f"noise multiplier {self.noise_multiplier:g} spends epsilon {spent:.4g}"
            raise PrivacyError(f"{what}, more than the budget of {self.epsilon:g}; raise the noise or lower the steps")

    @property
    def private(self) -> bool:
        """Whether there is any guarantee at all."""
        return math.isfinite(self.epsilon)

    @property
    def rate(self) -> float:
        """The probability with which each user is drawn into a batch, independently of all others."""
        return self.batch_size / self.users

    @property
    def sampler(self) -> Literal["poisson", "full"]:
        """How batches are made: "poisson", or "full" for all users at each step, without a sampling assumption."""
        return "full" if self.batch_size == self.users else "poisson"

    def planned(self, place: int) -> Charge:
        """The answer number `place` (0 is the first): the releases in their order, then the steps."""
        if 0 <= place < len(self.releases):
            return self.releases[place]
        if not 0 <= place < len(self.releases) + self.steps:
            has = f"the plan has {len(self.releases)} releases and {self.steps} steps, not answer {place}"
            raise PrivacyError(f"the budget is spent: {has}; publish the model as it is, or plan a new run")
        return Charge(GRADIENTS, self.noise_multiplier, self.rate)

    def charges(self, steps: int | None = None) -> tuple[Charge, ...]:
        """What has run after so many steps, the releases included; after all of them by default."""
        steps = self.steps if steps is None else steps
        if not 0 <= steps <= self.steps:
            raise PrivacyError(f"step {steps} is not between 0 and the plan's {self.steps}")
        made = (Charge(GRADIENTS, self.noise_multiplier, self.rate, steps),) if steps else ()
        return self.releases + made

    def epsilon_after(self, steps: int) -> Epsilon:
        """What has been spent after so many steps, the releases included."""
        return epsilon(self.charges(steps), self.delta, self.threshold_delta)

    @functools.cached_property
    def total(self) -> Epsilon:
        """What the whole plan spends."""
        return self.epsilon_after(self.steps)


def make_plan(
    users: int,
    epsilon: float,
    delta: float = 1e-5,
    batch_size: int | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    shares: Mapping[str, float] | None = None,
    threshold_delta: float = 0.0,
    declared: bool = False,
) -> PrivacyPlan:
    """A plan with the smallest noise that meets a budget.

    `batch_size` is the expected batch, all users by default (full batch). Training lasts `epochs` or `steps`. `shares` are the
    parts of the budget for releases (see `calibration`); the steps get the rest. Without steps the shares are taken of the
    whole budget, and must sum to 1. `threshold_delta`, `declared`: see `PrivacyPlan`.
    """
    shares = dict(shares or {})
    batch_size = users if batch_size is None else batch_size
    _check_budget(users, batch_size, epsilon, delta, threshold_delta)
    if epochs is not None and steps is not None:
        raise PrivacyError("epochs and steps are both given; give one of them")
    if epochs is not None:
        steps = steps_of(epochs, users, batch_size)
    if steps is None and not shares:
        raise PrivacyError("no steps: give epochs or steps")
    steps = steps or 0
    _check_steps(steps, shares)
    noise_delta = delta - threshold_delta
    releases = split_budget(gaussian_multiplier(epsilon, noise_delta) * (1 + 1e-6), shares)
    if steps == 0 and abs(sum(shares.values()) - 1) > 1e-9:
        raise PrivacyError(f"without steps the shares must sum to 1, not {sum(shares.values()):g}")
    sigma = step_multiplier(epsilon, noise_delta, batch_size / users, steps, shares) if steps else 0.0
    return PrivacyPlan(users, batch_size, steps, epsilon, delta, sigma, releases, threshold_delta, declared)


def steps_of(epochs: float, users: int, batch_size: int) -> int:
    """Steps of so many epochs: ceil(epochs * users / batch_size), so that an epoch is never shorter than promised."""
    if not (math.isfinite(epochs) and epochs > 0):
        raise PrivacyError(f"epochs {epochs:g} is not above 0; give epochs or steps")
    # The rounding keeps 10 * 0.1 from becoming one step more than 1.
    return math.ceil(round(epochs * users / batch_size, 9))


def declared_users(users: int, population: int | None) -> int:
    """The number of users that a plan is made for: of the data, or of a declared population that has at least as many."""
    if population is not None and population < users:
        raise PrivacyError(
            f"population {population:,} is below the number of users in the data, {users:,}: delta and the statement would be "
            f"for fewer users than there are; declare a population of {users} or more, or leave it out"
        )
    return population or users


@functools.cache
def spending(plan: PrivacyPlan) -> dict[int, float]:
    """Epsilon after each tenth of the steps. Accounting is slow: no more marks than these, and once for each plan."""
    if not plan.private:
        return {}
    marks = sorted({max(1, round(plan.steps * k / 10)) for k in range(1, 11)})
    return {mark: plan.epsilon_after(mark).epsilon for mark in marks}


def _check_budget(users: int, batch_size: int, epsilon: float, delta: float, threshold_delta: float) -> None:
    check_epsilon(epsilon)
    if users < 2:
        raise PrivacyError(f"users {users} is not at least 2: one user is too few for any privacy")
    if not 1 <= batch_size <= users:
        raise PrivacyError(f"batch size {batch_size} is not between 1 and the number of users, {users}; choose another")
    check_delta(delta, users)
    check_threshold(threshold_delta, delta)


def _check_steps(steps: int, releases: Collection[str]) -> None:
    if steps < 0 or not (steps or releases):
        raise PrivacyError(f"steps {steps} is not above 0; give epochs or steps above 0")
    if steps > MOST_STEPS:
        raise PrivacyError(f"steps {steps:,} are more than {MOST_STEPS:,}; lower epochs or steps")


def plan_to_json(plan: PrivacyPlan) -> dict[str, Any]:
    """A plan as JSON; an infinite epsilon, for which JSON has no number, becomes "inf"."""
    releases = [{"name": release.name, "noise_multiplier": release.noise_multiplier} for release in plan.releases]
    return {**asdict(plan), "epsilon": plan.epsilon if plan.private else "inf", "releases": releases}


def plan_from_json(fields: Mapping[str, Any]) -> PrivacyPlan:
    """The plan that `plan_to_json` wrote, checked as when it was made, its cost included."""
    try:
        releases = tuple(Charge(**release) for release in fields["releases"])
        return PrivacyPlan(**{**fields, "epsilon": float(fields["epsilon"]), "releases": releases})
    except (TypeError, KeyError, ValueError, OverflowError) as problem:
        raise PrivacyError(f"a privacy plan cannot be read ({problem}); it is of another version") from problem
