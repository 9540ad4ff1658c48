"""Mechanisms, accounting and calibration against dp_accounting alone, Opacus and closed forms."""

import logging
import math
from types import SimpleNamespace

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dpformer.errors import PrivacyError
from dpformer.privacy import accounting
from dpformer.privacy.accounting import Charge, composed_multiplier, epsilon, event, split_budget
from dpformer.privacy.calibration import calibrate, gaussian_multiplier, step_multiplier

ADD_OR_REMOVE = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
REPLACE_BY_NONE = dp_accounting.NeighboringRelation.REPLACE_SPECIAL


def poisson(rate: float, sigma: float, steps: int) -> Charge:
    return Charge("steps", sigma, rate, steps)


def full(sigma: float, steps: int) -> Charge:
    return Charge("steps", sigma, times=steps)


def direct(
    rate: float, sigma: float, steps: int, delta: float, interval: float = 1e-4, neighbours=REPLACE_BY_NONE
) -> float:
    """Epsilon by dp_accounting without any of our code."""
    accountant = PLDAccountant(neighbours, value_discretization_interval=interval)
    accountant.compose(dp_accounting.PoissonSampledDpEvent(rate, dp_accounting.GaussianDpEvent(sigma)), steps)
    return accountant.get_epsilon(delta)


@pytest.mark.parametrize(("rate", "sigma", "steps", "delta"), [(0.17, 3.3, 590, 1e-5), (0.01, 0.8, 2000, 1e-6)])
def test_epsilon_is_dp_accountings(rate, sigma, steps, delta):
    found = epsilon([poisson(rate, sigma, steps)], delta)
    assert found.accountant == "pld"
    assert found.epsilon == pytest.approx(direct(rate, sigma, steps, delta), rel=1e-4)
    assert found.epsilon < found.rdp < 1.3 * found.epsilon


# (rate, sigma, steps, delta, grid): the presets' settings on MovieLens-1M and Amazon Games, and extremes.
IN_USE = [
    (1024 / 6040, 3.3, 590, 1e-5, 1e-3),
    (4096 / 31013, 1.97, 758, 1e-5, 1e-3),
    (0.5, 0.7, 40, 1e-6, 1e-3),
    (1e-3, 0.6, 5000, 1e-7, 1e-3),
]


@pytest.mark.parametrize("setting", IN_USE)
def test_the_neighbours_of_the_guarantee_cost_what_adding_or_removing_costs(setting):
    """Replacing a user's events by none: the same pair of distributions, so the same epsilon, by PLD and RDP, to all digits."""
    rate, sigma, steps, delta, _ = setting
    assert accounting.NEIGHBOURS is REPLACE_BY_NONE
    assert direct(*setting) == direct(*setting, ADD_OR_REMOVE)
    what = event([poisson(rate, sigma, steps), Charge("histogram", 5.0)])
    by_rdp = dp_accounting.rdp.RdpAccountant(neighboring_relation=ADD_OR_REMOVE).compose(what).get_epsilon(delta)
    assert accounting.rdp_epsilon(what, delta) == by_rdp
    assert accounting.pld(what, 1e-3).get_epsilon(delta) == PLDAccountant(
        ADD_OR_REMOVE, value_discretization_interval=1e-3
    ).compose(what).get_epsilon(delta)


def test_replacing_a_user_by_another_would_cost_more():
    """The control: another relation is another number, so that the test above compares something."""
    setting = (1024 / 6040, 3.3, 50, 1e-5, 1e-3)
    other = direct(*setting, dp_accounting.NeighboringRelation.REPLACE_ONE)
    assert other > 1.5 * direct(*setting)


def test_a_gaussian_is_the_closed_form():
    """delta = Phi(1/(2s) - e s) - exp(e) Phi(-1/(2s) - e s), Balle and Wang 2018, written out here once more."""

    def phi(x: float) -> float:
        return 0.5 * math.erfc(-x / math.sqrt(2))

    found = epsilon([full(6.0, 9)], 1e-5)  # nine steps of 6 are one of 2
    s, e = 2.0, found.epsilon
    assert phi(1 / (2 * s) - e * s) - math.exp(e) * phi(-1 / (2 * s) - e * s) == pytest.approx(1e-5, rel=1e-6)
    assert found.epsilon == pytest.approx(direct(1.0, 6.0, 9, 1e-5), rel=1e-4)


def test_releases_with_shares_are_one_gaussian():
    shares = {"histogram": 0.03, "stage 1": 0.45, "stage 2": 0.22, "stage 3": 0.3}
    releases = split_budget(0.9, shares)
    assert [r.name for r in releases] == list(shares)
    assert composed_multiplier(r.noise_multiplier for r in releases) == pytest.approx(0.9, rel=1e-12)
    assert epsilon(releases, 1e-5).epsilon == pytest.approx(epsilon([Charge("all", 0.9)], 1e-5).epsilon)
    # And against dp_accounting's own composition, one by one.
    accountant = PLDAccountant()
    for release in releases:
        accountant.compose(dp_accounting.GaussianDpEvent(release.noise_multiplier))
    assert epsilon(releases, 1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-3)


def test_releases_and_steps_together_are_dp_accountings_composition():
    mechanisms = [Charge("histogram", 5.0), poisson(0.2, 3.0, 100), poisson(0.2, 3.0, 50)]
    accountant = PLDAccountant()
    accountant.compose(dp_accounting.GaussianDpEvent(5.0))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, dp_accounting.GaussianDpEvent(3.0)), 150)
    assert epsilon(mechanisms, 1e-5).epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=1e-4)


def test_equal_steps_are_counted_together():
    one_by_one = event([poisson(0.1, 2.0, 1)] * 500)
    assert one_by_one == event([poisson(0.1, 2.0, 500)])


def test_no_noise_is_not_private_and_nothing_costs_nothing():
    assert math.isinf(epsilon([Charge("a", 1.0), poisson(0.1, 0.0, 3)], 1e-5).epsilon)
    assert epsilon([], 1e-5).epsilon == 0
    assert epsilon([poisson(0.1, 0.0, 0)], 1e-5).epsilon == 0


def test_where_pld_fails_rdp_is_used_and_the_result_says_so():
    tiny = epsilon([poisson(0.001, 1.0, 10000)], 1e-13)
    assert tiny.accountant == "rdp"
    assert tiny.epsilon == tiny.rdp
    assert "RDP is used" in tiny.note


@pytest.mark.parametrize("broken", [lambda *_: math.nan, lambda *_: 1e6, lambda *_: 1 / 0])
def test_a_broken_pld_is_noticed(monkeypatch, broken):
    monkeypatch.setattr(accounting, "pld", lambda *_: SimpleNamespace(get_epsilon=broken))
    accounting._epsilon.cache_clear()
    found = epsilon([poisson(0.1, 2.0, 100)], 1e-5)
    accounting._epsilon.cache_clear()
    assert found.accountant == "rdp"
    assert found.epsilon == found.rdp
    assert "RDP is used" in found.note


def test_accounting_is_silent(caplog):
    with caplog.at_level(logging.WARNING):
        epsilon([poisson(0.5, 0.3, 100)], 1e-5)
    assert not caplog.records
    assert not logging.getLogger("absl").filters


# (users, batch, delta or None for 1/users, epsilon, multiplier), by dp_accounting.calibrate_dp_mechanism with its
# PLDAccountant at its default grid, T = ceil(100 users / batch); none of our code took part.
REFERENCE = [
    (6040, 1024, None, 5, 3.2922),
    (6040, 1024, None, 8, 2.3095),
    (6040, 1024, None, 10, 1.9713),
    (6040, 1024, 1e-05, 5, 3.7839),
    (6040, 1024, 1e-05, 8, 2.6032),
    (6040, 1024, 1e-05, 10, 2.2011),
    (6040, 2048, None, 5, 4.5902),
    (6040, 2048, None, 8, 3.1806),
    (6040, 2048, None, 10, 2.6919),
    (6040, 2048, 1e-05, 5, 5.2884),
    (6040, 2048, 1e-05, 8, 3.5996),
    (6040, 2048, 1e-05, 10, 3.0207),
    (6040, 4096, None, 5, 6.4289),
    (6040, 4096, None, 8, 4.4193),
    (6040, 4096, None, 10, 3.7201),
    (6040, 4096, 1e-05, 5, 7.4122),
    (6040, 4096, 1e-05, 8, 5.0081),
    (6040, 4096, 1e-05, 10, 4.1813),
    (31013, 1024, None, 5, 1.7020),
    (31013, 1024, None, 8, 1.2525),
    (31013, 1024, None, 10, 1.1025),
    (31013, 1024, 1e-05, 5, 1.7852),
    (31013, 1024, 1e-05, 8, 1.3008),
    (31013, 1024, 1e-05, 10, 1.1402),
    (31013, 2048, None, 5, 2.3071),
    (31013, 2048, None, 8, 1.6433),
    (31013, 2048, None, 10, 1.4199),
    (31013, 2048, 1e-05, 5, 2.4284),
    (31013, 2048, 1e-05, 8, 1.7148),
    (31013, 2048, 1e-05, 10, 1.4755),
    (31013, 4096, None, 5, 3.1850),
    (31013, 4096, None, 8, 2.2194),
    (31013, 4096, None, 10, 1.8906),
    (31013, 4096, 1e-05, 5, 3.3596),
    (31013, 4096, 1e-05, 8, 2.3236),
    (31013, 4096, 1e-05, 10, 1.9720),
]


def quick(rows: list[tuple], every: int) -> list:
    """Every so many of the rows; the others are of dp_accounting alone, and run with the slow tests."""
    return [row if n % every == 0 else pytest.param(*row, marks=pytest.mark.slow) for n, row in enumerate(rows)]


@pytest.mark.parametrize(("users", "batch", "delta", "target", "expected"), quick(REFERENCE, 7))
def test_noise_multipliers_of_the_papers_settings(users, batch, delta, target, expected):
    delta, rate, steps = delta or 1 / users, batch / users, math.ceil(100 * users / batch)
    sigma = step_multiplier(target, delta, rate, steps)
    assert sigma == pytest.approx(expected, rel=5e-4)
    assert direct(rate, sigma, steps, delta, 2.5e-4) <= target, "too little noise"
    assert direct(rate, sigma * 0.999, steps, delta, 2.5e-4) > target, "more than 0.1 % too much noise"


def test_the_issues_examples():
    assert step_multiplier(5, 1 / 6040, 1024 / 6040, 590) == pytest.approx(3.293, rel=5e-3)
    assert step_multiplier(10, 1e-5, 4096 / 31013, 758) == pytest.approx(1.973, rel=5e-3)
    by_rdp = dp_accounting.calibrate_dp_mechanism(
        dp_accounting.rdp.RdpAccountant,
        lambda s: event([poisson(1024 / 6040, s, 590)]),
        5,
        1 / 6040,
        dp_accounting.ExplicitBracketInterval(1, 20),
    )
    assert by_rdp == pytest.approx(3.558, rel=1e-3)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("users", "batch", "delta", "target"),
    quick([(6040, 1024, 1 / 6040, 5), (6040, 4096, 1e-5, 8), (31013, 1024, 1e-5, 10), (31013, 4096, 1e-5, 10)], 4),
)
def test_opacus_accountants_bracket_ours(users, batch, delta, target):
    """Opacus' PRV accountant is another implementation altogether: its bounds hold ours, and its RDP is above."""
    from opacus.accountants import PRVAccountant, RDPAccountant

    rate, steps = batch / users, math.ceil(100 * users / batch)
    sigma = step_multiplier(target, delta, rate, steps)
    ours = epsilon([poisson(rate, sigma, steps)], delta).epsilon
    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    low, estimate, high = prv._get_dprv(eps_error=0.01, delta_error=delta / 1000).compute_epsilon(
        delta, delta / 1000, 0.01
    )
    assert low <= ours <= high
    assert ours == pytest.approx(estimate, rel=1e-4)
    rdp = RDPAccountant()
    rdp.history = [(sigma, rate, steps)]
    assert ours < rdp.get_epsilon(delta)
    # Half the noise is caught by the same bounds.
    prv.history = [(sigma / 2, rate, steps)]
    assert prv.get_epsilon(delta, eps_error=0.1) > 1.5 * target


def test_full_batches_need_the_closed_forms_noise():
    sigma_1 = gaussian_multiplier(5, 1e-5)
    assert step_multiplier(5, 1e-5, 1.0, 60) == pytest.approx(sigma_1 * math.sqrt(60), rel=1e-6)
    assert step_multiplier(5, 1e-5, 1.0, 60, {"h": 0.19}) == pytest.approx(sigma_1 * math.sqrt(60 / 0.81), rel=1e-6)


@pytest.mark.parametrize("shares", [{"histogram": 0.03}, {"histogram": 0.05, "statistics": 0.85}])
def test_a_split_budget_is_met_by_the_whole(shares):
    sigma = step_multiplier(5, 1e-5, 0.3, 100, shares)
    releases = split_budget(gaussian_multiplier(5, 1e-5), shares)
    assert 0.999 * 5 < epsilon([*releases, poisson(0.3, sigma, 100)], 1e-5).epsilon <= 5
    assert sigma > step_multiplier(5, 1e-5, 0.3, 100)


def test_calibration_below_plds_reach_uses_rdp():
    sigma = step_multiplier(5, 1e-12, 0.1, 100)
    found = epsilon([poisson(0.1, sigma, 100)], 1e-12)
    assert found.accountant == "rdp"
    assert 0.999 * 5 < found.epsilon <= 5


def test_releases_that_spend_everything_are_refused():
    with pytest.raises(PrivacyError, match="statistics"):
        calibrate(lambda s: [Charge("statistics", 0.5), poisson(0.1, s, 10)], 5, 1e-5)


MORE_PRIVATE = {
    "noise": lambda rate, sigma, steps, delta, f: ([poisson(rate, sigma * f, steps)], delta),
    "delta": lambda rate, sigma, steps, delta, f: ([poisson(rate, sigma, steps)], delta * f),
}
LESS_PRIVATE = {
    "steps": lambda rate, sigma, steps, delta, f: ([poisson(rate, sigma, math.ceil(steps * f))], delta),
    "rate": lambda rate, sigma, steps, delta, f: ([poisson(min(rate * f, 1), sigma, steps)], delta),
    "release": lambda rate, sigma, steps, delta, f: (
        [poisson(rate, sigma, steps), Charge("r", 9 / f)],
        delta,
    ),
}


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    change=st.sampled_from([*MORE_PRIVATE, *LESS_PRIVATE]),
    rate=st.floats(0.05, 0.6),
    sigma=st.floats(0.8, 10),
    steps=st.integers(1, 500),
    factor=st.floats(1.05, 2),
    delta=st.sampled_from([1e-4, 1e-5, 1e-7]),
)
def test_epsilon_is_monotone_in_every_argument(change, rate, sigma, steps, factor, delta):
    base = epsilon([poisson(rate, sigma, steps)], delta).epsilon
    assume(base > 0.01)
    changed = (MORE_PRIVATE | LESS_PRIVATE)[change](rate, sigma, steps, delta, factor)
    ratio = epsilon(*changed).epsilon / base
    assert ratio <= 1 + 1e-3 if change in MORE_PRIVATE else ratio >= 1 - 1e-3


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(
    change=st.sampled_from(["epsilon", "delta", "rate", "steps", "share"]),
    target=st.floats(1, 9),
    rate=st.floats(0.05, 0.5),
    steps=st.integers(20, 200),
    factor=st.floats(1.1, 1.8),
)
def test_noise_is_monotone_in_every_argument(change, target, rate, steps, factor):
    base = step_multiplier(target, 1e-5, rate, steps)
    if change == "epsilon":
        assert step_multiplier(target * factor, 1e-5, rate, steps) < base
    elif change == "delta":
        assert step_multiplier(target, 1e-5 * factor, rate, steps) < base
    elif change == "rate":
        assert step_multiplier(target, 1e-5, rate * factor, steps) > base
    elif change == "steps":
        assert step_multiplier(target, 1e-5, rate, math.ceil(steps * factor)) > base
    else:
        assert step_multiplier(target, 1e-5, rate, steps, {"r": 0.1}) > base


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: poisson(1.2, 1.0, 1), "sampling rate 1.2"),
        (lambda: poisson(0.0, 1.0, 1), "sampling rate 0"),
        (lambda: poisson(0.1, -1.0, 1), "noise multiplier -1"),
        (lambda: poisson(0.1, math.nan, 1), "noise multiplier nan"),
        (lambda: full(1.0, -1), "times -1"),
        (lambda: full(1.0, 1.5), "times 1.5"),
        (lambda: Charge("", 1.0), "name"),
        (lambda: split_budget(1.0, {"a": 0.7, "b": 0.5}), "sum to 1.2"),
        (lambda: split_budget(1.0, {"a": 0.0}), "share 0"),
        (lambda: epsilon([], 0.0), "delta 0"),
        (lambda: epsilon([], math.nan), "delta nan"),
        (lambda: step_multiplier(0, 1e-5, 0.1, 10), "epsilon 0"),
        (lambda: step_multiplier(5, 1e-5, 0.1, 0), "no steps"),
        (lambda: step_multiplier(5, 1e-5, 0.1, 10, {"a": 1.0}), "nothing for the steps"),
        (lambda: gaussian_multiplier(math.nan, 1e-5), "epsilon nan"),
    ],
)
def test_bad_arguments_are_named(make, word):
    with pytest.raises(PrivacyError, match=word):
        make()
