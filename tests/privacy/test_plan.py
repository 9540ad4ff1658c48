"""The plan that owns rate, noise, steps and accountant; the trade-off reading; tuning."""

import math

import dp_accounting
import numpy as np
import pytest
from dp_accounting.dp_event import RepeatAndSelectDpEvent
from dp_accounting.rdp import RdpAccountant
from scipy.stats import norm

from dpformer.errors import PrivacyError
from dpformer.privacy.accounting import Charge, epsilon
from dpformer.privacy.attack_bounds import attack_bound, bound_from, delta_curve, power
from dpformer.privacy.plan import GRADIENTS, PrivacyPlan, make_plan, steps_of
from dpformer.privacy.tuning import Tuning, tuned_epsilon, tuned_factor


@pytest.fixture(scope="module")
def plan() -> PrivacyPlan:
    return make_plan(6040, 5, 1e-5, 1024, epochs=20, shares={"histogram": 0.03})


def test_epochs_are_never_shorter_than_promised():
    assert steps_of(100, 6040, 1024) == 590
    assert steps_of(100, 31013, 4096) == 758
    assert steps_of(10, 1000, 100) == 100
    assert steps_of(0.1, 1000, 100) == 1
    assert steps_of(1.1, 10, 1) == 11


def test_a_plan_spends_its_budget_and_no_more(plan):
    assert plan.steps == 118
    assert plan.rate == 1024 / 6040
    assert 0.999 * 5 < plan.total.epsilon <= 5
    spent = [plan.epsilon_after(step).epsilon for step in (0, 1, 59, 118)]
    assert spent == sorted(spent)
    assert spent[0] == pytest.approx(epsilon(plan.releases, 1e-5).epsilon)


def test_a_plan_with_too_little_noise_cannot_be_made(plan):
    with pytest.raises(PrivacyError, match="more than the budget"):
        PrivacyPlan(6040, 1024, plan.steps, 5, 1e-5, plan.noise_multiplier / 2, plan.releases)


def test_answers_are_planned_in_order(plan):
    """The releases, then the steps: by place, with the noise and the rate of each."""
    first = plan.releases[0]
    assert plan.planned(0) == Charge("histogram", first.noise_multiplier, 1.0)
    for place in (1, 2, plan.steps):
        assert plan.planned(place) == Charge(GRADIENTS, plan.noise_multiplier, plan.rate)
    for place in (-1, plan.steps + 1, 10**9):
        with pytest.raises(PrivacyError, match="budget is spent"):
            plan.planned(place)
    several = make_plan(100, 3, 1e-3, shares={"b": 0.5, "a": 0.5})
    assert [several.planned(place).name for place in range(2)] == ["b", "a"]
    with pytest.raises(PrivacyError, match="0 steps"):
        several.planned(2)


def test_what_is_planned_is_what_is_accounted(plan):
    """The multipliers that a Curator is given, composed by an accountant of their own."""
    planned = [plan.planned(place) for place in range(1 + plan.steps)]
    assert epsilon(planned, plan.delta) == plan.total


@pytest.mark.parametrize("releases", [("a", "a"), (GRADIENTS,)])
def test_two_answers_of_one_name_are_refused(releases):
    with pytest.raises(PrivacyError, match="same name"):
        PrivacyPlan(100, 100, 0, 50, 1e-3, 0.0, tuple(Charge(name, 9.0) for name in releases))


@pytest.mark.parametrize("release", [Charge("a", 9.0, rate=0.5), Charge("a", 9.0, times=2)])
def test_a_release_is_one_sum_over_all_users(release):
    with pytest.raises(PrivacyError, match="must be 1"):
        PrivacyPlan(100, 100, 0, 50, 1e-3, 0.0, (release,))


def test_a_threshold_takes_its_part_of_delta():
    """The rest is for the noise: more noise than without a threshold, as much as for the smaller delta."""
    whole, part = (make_plan(1000, 4, 1e-4, shares={"items": 0.2, "rest": 0.8}, threshold_delta=t) for t in (0, 4e-5))
    assert part.delta == whole.delta == 1e-4
    assert part.releases[0].noise_multiplier > whole.releases[0].noise_multiplier
    smaller = make_plan(1000, 4, 1e-4 - 4e-5, shares={"items": 0.2, "rest": 0.8})
    assert part.releases == smaller.releases
    assert part.total.epsilon == smaller.total.epsilon
    assert part.total.epsilon <= 4
    assert part.total.delta == 1e-4
    steps = make_plan(1000, 4, 1e-4, steps=9, shares={"items": 0.2}, threshold_delta=4e-5)
    alone = make_plan(1000, 4, 1e-4 - 4e-5, steps=9, shares={"items": 0.2})
    assert steps.noise_multiplier == alone.noise_multiplier


def test_noise_calibrated_without_the_threshold_is_too_little_with_it():
    whole = make_plan(1000, 4, 1e-4, shares={"items": 1.0})
    with pytest.raises(PrivacyError, match="more than the budget"):
        PrivacyPlan(1000, 1000, 0, 4, 1e-4, 0.0, whole.releases, threshold_delta=4e-5)


@pytest.mark.parametrize("threshold", [1e-4, 2e-4, -1e-6, math.nan])
def test_a_threshold_that_leaves_nothing_is_refused(threshold):
    with pytest.raises(PrivacyError, match="delta"):
        make_plan(1000, 4, 1e-4, shares={"items": 1.0}, threshold_delta=threshold)


def test_full_batch_and_statistics_only():
    full = make_plan(6040, 5, steps=60)
    assert full.sampler == "full"
    assert full.charges() == (Charge(GRADIENTS, full.noise_multiplier, times=60),)
    assert full.total.accountant == "gaussian"
    statistics = make_plan(6040, 5, shares={"histogram": 0.03, "transitions": 0.97})
    assert statistics.steps == 0
    assert statistics.total.epsilon == pytest.approx(5, rel=1e-4)
    assert statistics.total.epsilon <= 5


def test_not_private_is_said_plainly():
    free = make_plan(100, math.inf, 1e-3, 10, steps=5)
    assert not free.private
    assert free.noise_multiplier == 0
    assert math.isinf(free.total.epsilon)
    assert attack_bound(free.charges(), 1e-3).true_positive_rate == 1


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"epsilon": 0}, "epsilon 0"),
        ({"epsilon": -1}, "epsilon -1"),
        ({"epsilon": math.nan}, "epsilon nan"),
        ({"delta": 1e-3}, "1/users"),
        ({"delta": 0.01}, "1/users"),
        ({"delta": 0}, "delta 0"),
        ({"batch_size": 2000}, "batch size 2000"),
        ({"batch_size": 0}, "batch size 0"),
        ({"steps": 0}, "steps 0"),
        ({"steps": -3}, "steps -3"),
        ({"steps": None}, "no steps"),
        ({"steps": None, "epochs": 0}, "epochs 0"),
        ({"steps": None, "epochs": math.inf}, "epochs inf"),
        ({"epochs": 3}, "both"),
        ({"users": 0}, "users 0"),
        ({"users": 1}, "users 1"),
        ({"shares": {"a": 1.0}}, "nothing for the steps"),
        ({"steps": None, "shares": {"a": 0.5}}, "sum to 1"),
    ],
)
def test_bad_arguments_are_one_clear_line(arguments, word):
    good = {"users": 1000, "epsilon": 5, "delta": 1e-5, "batch_size": 100, "steps": 10}
    with pytest.raises(PrivacyError, match=word) as caught:
        make_plan(**{**good, **arguments})
    assert "\n" not in str(caught.value)


def test_delta_just_below_one_over_users_is_allowed():
    assert make_plan(6040, 5, 1.6556e-4, steps=3).delta == 1.6556e-4


# --- what epsilon means ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sigma", [0.6, 1.0, 3.0])
def test_the_reading_of_a_gaussian_is_its_closed_form(sigma):
    """mu-GDP: beta = Phi(Phi^-1(alpha) + mu), advantage 2 Phi(mu / 2) - 1, mu = 1 / sigma."""
    found = attack_bound([Charge("r", sigma)], 1e-5)
    exact = norm.cdf(norm.ppf(0.01) + 1 / sigma)
    assert exact <= found.true_positive_rate <= exact * 1.005
    assert found.advantage == pytest.approx(2 * norm.cdf(1 / (2 * sigma)) - 1, rel=2e-3)
    assert found.advantage >= 2 * norm.cdf(1 / (2 * sigma)) - 1 - 1e-9


def test_the_whole_curve_is_an_upper_bound_on_a_gaussians():
    mechanism = [Charge("r", 1.0)]
    alphas = np.linspace(0.001, 0.999, 200)
    bound = power(alphas, *delta_curve(mechanism, epsilon(mechanism, 1e-5)))
    exact = norm.cdf(norm.ppf(alphas) + 1)
    assert (bound >= exact - 1e-12).all()
    assert np.abs(bound - exact).max() < 2e-3


def test_no_simulated_attack_beats_the_bound():
    """The likelihood ratio test on Poisson steps, by simulation: near the bound, never above it by more than chance."""
    rate, sigma, steps, runs = 0.3, 1.5, 20, 40_000
    random = np.random.default_rng(0)

    def loss(member: bool) -> np.ndarray:
        x = random.normal(size=(runs, steps)) * sigma + (random.random((runs, steps)) < rate) * member
        return np.log1p(rate * np.expm1((2 * x - 1) / (2 * sigma**2))).sum(axis=1)

    non_members, members = loss(False), loss(True)
    threshold = np.quantile(non_members, 0.99)
    reached = (members > threshold).mean()
    bound = attack_bound([Charge("steps", sigma, rate, steps)], 1e-5).true_positive_rate
    assert bound * 0.85 < reached < bound + 0.01
    # With half the noise the same attack beats what was promised: this test can fail.
    sigma /= 2
    non_members, members = loss(False), loss(True)
    assert (members > np.quantile(non_members, 0.99)).mean() > bound + 0.05


def test_the_attack_does_not_depend_on_delta():
    """It is bounded by the mechanism's curve, also where delta is too small for PLD and epsilon is RDP's."""
    steps = [Charge("steps", 1.0, 0.001, 10_000)]
    assert epsilon(steps, 1e-13).accountant == "rdp"
    small, usual = attack_bound(steps, 1e-13), attack_bound(steps, 1e-9)
    assert small.true_positive_rate == usual.true_positive_rate
    assert "coin" in small.sentence()


def test_a_single_epsilon_delta_point_is_the_fall_back():
    found = bound_from(np.array([2.0]), np.array([1e-6]))
    assert found.true_positive_rate == pytest.approx(1e-6 + math.exp(2) * 0.01)


# --- tuning ---------------------------------------------------------------------------------------------------------


def test_tuning_is_dp_accountings(plan):
    tuning = Tuning(10)
    trial = dp_accounting.ComposedDpEvent(
        [
            dp_accounting.GaussianDpEvent(plan.releases[0].noise_multiplier),
            dp_accounting.SelfComposedDpEvent(
                dp_accounting.PoissonSampledDpEvent(plan.rate, dp_accounting.GaussianDpEvent(plan.noise_multiplier)),
                plan.steps,
            ),
            dp_accounting.GaussianDpEvent(10.0),
        ]
    )
    expected = RdpAccountant().compose(RepeatAndSelectDpEvent(trial, 10, 1)).get_epsilon(1e-5)
    assert tuned_epsilon(plan.charges(), tuning, 1e-5) == pytest.approx(expected, rel=1e-9)
    assert expected > plan.total.epsilon


def test_tuning_within_the_budget(plan):
    tuning = Tuning(5)
    sigma = plan.noise_multiplier * tuned_factor(plan.charges(), tuning, plan.epsilon, plan.delta)
    trial = [
        Charge("histogram", plan.releases[0].noise_multiplier * sigma / plan.noise_multiplier),
        Charge(GRADIENTS, sigma, plan.rate, plan.steps),
    ]
    spent = tuned_epsilon(trial, tuning, 1e-5)
    assert 0.998 * 5 < spent <= 5
    assert sigma > plan.noise_multiplier


@pytest.mark.parametrize("distribution", ["geometric", "logarithmic"])
def test_trials_are_drawn_from_the_distribution_that_is_paid_for(distribution):
    tuning = Tuning(4, distribution)
    drawn = np.array([tuning.draw() for _ in range(4000)])
    assert drawn.min() == 1
    assert abs(drawn.mean() - 4) < 6 * drawn.std() / math.sqrt(4000)
    # Logarithmic: mean -p / ((1 - p) ln(1 - p)) = 4 at p = 0.9034, and P(1) = -p / ln(1 - p) = 0.3866.
    ones = {"geometric": 0.25, "logarithmic": 0.3866}[distribution]
    assert abs((drawn == 1).mean() - ones) < 0.05


def test_bad_tuning_is_named(plan):
    with pytest.raises(PrivacyError, match="number of trials, 1,"):
        Tuning(1)
    with pytest.raises(PrivacyError, match="'poisson'"):
        Tuning(3, "poisson")
    with pytest.raises(PrivacyError, match="score"):
        Tuning(3, score_noise_multiplier=0)
    with pytest.raises(PrivacyError, match="noisy scores alone"):
        tuned_factor(plan.charges(), Tuning(3, score_noise_multiplier=0.2), plan.epsilon, plan.delta)
    for epsilon_, charges in ((math.inf, plan.charges()), (5.0, ())):
        with pytest.raises(PrivacyError, match="finite epsilon"):
            tuned_factor(charges, Tuning(3), epsilon_, 1e-5)
