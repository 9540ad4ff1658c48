"""The choice of cells that are not public: the threshold against closed forms and a simulation, and what leaves."""

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from dpformer.data import Sequences
from dpformer.errors import PrivacyError
from dpformer.privacy import Curator, Keys, create_ledger, make_plan
from dpformer.privacy.accounting import epsilon
from dpformer.privacy.selection import threshold
from dpformer.statistics.histogram import Histogram
from dpformer.statistics.item_selection import ITEMS, ItemCounts
from tests.people import people

TINY = 1e-6


@pytest.mark.parametrize("std", [0.3, 1.0, 2.7, 10.0])
@pytest.mark.parametrize("delta", [1e-3, 1e-6, 1e-9])
@pytest.mark.parametrize("most", [1, 7, 2000])
def test_the_threshold_is_the_smallest_that_keeps_the_probability(std, delta, most):
    def named(t: float) -> float:
        return max(n * norm.sf((t - 1 / math.sqrt(n)) / std) for n in range(1, most + 1))

    t = threshold(std, delta, most)
    assert named(t) <= delta
    assert named(t * (1 - 1e-6) - 1e-6) > delta * (1 - 1e-9)


def test_one_item_has_the_closed_form():
    assert threshold(2.0, 1e-6, 1) == pytest.approx(1 + 2 * norm.isf(1e-6), rel=1e-6)


def test_a_delta_outside_of_its_range_is_refused():
    with pytest.raises(PrivacyError, match="threshold"):
        threshold(1.0, 0.0, 10)


PLAN = make_plan(40, 6.0, 1e-2, shares={ITEMS: 1.0}, threshold_delta=5e-3)


def ask(folder, log: Sequences, ids: list[str], seed: int | None = None, plan=PLAN):
    with create_ledger(folder, plan) as ledger:
        return Curator(log, plan, ledger, Keys(seed)).ask(ItemCounts(ids))


def test_items_that_many_have_are_named_and_rare_ones_are_not(tmp_path):
    log = people([*[[1, 2]] * 39, [3]])
    answer = ask(tmp_path, log, ["a", "b", "c"])
    assert answer.labels == ("a", "b")
    assert answer.values[ITEMS].shape == (2,)
    assert (answer.values[ITEMS] % answer.grid == 0).all()


def test_an_item_of_one_person_is_named_as_rarely_as_planned(tmp_path):
    """One person with one item of their own: the probability is at most the threshold's delta; without threshold it is 1."""
    log = people([*[[]] * 39, [1]])
    trials = 400
    named = sum(bool(ask(tmp_path / str(k), log, ["odd"]).labels) for k in range(trials))
    assert named <= binom.isf(TINY, trials, PLAN.threshold_delta)
    least = threshold(PLAN.releases[0].noise_multiplier, PLAN.threshold_delta, 1)
    assert norm.sf((least - 1) / PLAN.releases[0].noise_multiplier) == pytest.approx(PLAN.threshold_delta, rel=1e-3)


def test_a_threshold_that_is_too_low_would_be_seen(tmp_path, monkeypatch):
    """The control of the test above: at a threshold of 1 every second release names the item."""
    monkeypatch.setattr("dpformer.privacy.selection.threshold", lambda std, delta, most: 1.0)
    log = people([*[[]] * 39, [1]])
    named = sum(bool(ask(tmp_path / str(k), log, ["odd"]).labels) for k in range(40))
    assert named > binom.isf(TINY, 40, PLAN.threshold_delta)


def test_an_item_that_the_query_does_not_count_is_never_named(tmp_path):
    """Noise so large that every count is above the threshold: only cells of somebody's last events are named.

    Else one person with many older events would have as many cells of their own, and the proof counts `most` at most.
    """

    def large(key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        return np.full(shape, 2**40)

    log = people([*[[1, 2]] * 39, [3, 4, 5, 1, 2]])
    with create_ledger(tmp_path, PLAN) as ledger:
        answer = Curator(log, PLAN, ledger, Keys(), noise=large).ask(ItemCounts(list("abcdef"), last=2))
    assert answer.labels == ("a", "b")
    assert answer.values[ITEMS].shape == (2,)


class Changed(ItemCounts):
    """A selection whose vectors are not what a threshold is made for: `change` is applied to the values, by person."""

    def __init__(self, change, **options) -> None:
        super().__init__(["a", "b", "c"], **options)
        self.change = change

    def vectors(self, people):
        for person, cell, value in super().vectors(people):
            yield person, cell, self.change(value, person)


def fewer_than_counted() -> ItemCounts:
    query = ItemCounts(["a", "b", "c"])
    query.most = 1
    return query


def without_labels() -> ItemCounts:
    query = ItemCounts(["a", "b", "c"])
    query.labels = ["a", "b"]
    return query


class OwnSum(Changed):
    """As `Changed`, by a sum of its own that checks nothing."""

    def sum(self, people, sample, grid):
        return {self.name: np.ones(self.numbers, dtype=np.int64)}


REFUSED = {
    "more cells than most": (fewer_than_counted(), "2 cells.*most"),
    "values that are too large": (Changed(lambda value, person: value * (1 + 1e-7)), "1 / sqrt"),
    "values that are too small": (Changed(lambda value, person: value * 0.9), "1 / sqrt"),
    "values that differ": (Changed(lambda value, person: np.where(np.arange(40) == 3, value / 2, value)), "1 / sqrt"),
    "a negative value": (Changed(lambda value, person: np.where(person == 3, -value, value)), "1 / sqrt"),
    "no number": (Changed(lambda value, person: np.where(person == 3, math.nan, value)), "1 / sqrt"),
    "zeros": (Changed(lambda value, person: value * 0), "1 / sqrt"),
    "fewer labels than cells": (without_labels(), "2 labels for 3 cells"),
    "a sum without checks": (OwnSum(lambda value, person: value * 0.9), "1 / sqrt"),
}


@pytest.mark.parametrize(("query", "word"), REFUSED.values(), ids=REFUSED.keys())
def test_the_curator_refuses_vectors_that_the_threshold_is_not_made_for(query, word, tmp_path):
    log = people([[1, 2]] * 20)
    with create_ledger(tmp_path, PLAN) as ledger:
        curator = Curator(log, PLAN, ledger, Keys())
        with pytest.raises(PrivacyError, match=word):
            curator.ask(query)
        assert not ledger.account().entries
        assert curator.keys.place == 0


@pytest.mark.parametrize("most", [1, 2, 3, 7, 1000, 1999, 2000])
def test_every_number_of_items_up_to_the_most_is_taken(most, tmp_path):
    log = people([[*range(1, most + 1)], [], [1]])
    assert ask(tmp_path, log, [f"{k}" for k in range(2000)]).noise_std > 0


def test_the_budget_pays_for_the_threshold():
    plain = make_plan(40, 6.0, 1e-2, shares={ITEMS: 1.0})
    assert PLAN.releases[0].noise_multiplier > plain.releases[0].noise_multiplier
    spent = epsilon(PLAN.charges(), PLAN.delta, PLAN.threshold_delta)
    assert spent.epsilon == pytest.approx(6.0, rel=1e-5)
    assert spent.epsilon <= 6.0
    assert PLAN.total == spent
    with pytest.raises(PrivacyError, match="threshold delta"):
        make_plan(40, 6.0, 1e-2, shares={ITEMS: 1.0}, threshold_delta=1e-2)


def gaussian_delta(mu: float, epsilons: np.ndarray) -> np.ndarray:
    """delta(epsilon) of a mu-GDP mechanism."""
    return norm.cdf(mu / 2 - epsilons / mu) - np.exp(epsilons) * norm.cdf(-mu / 2 - epsilons / mu)


@pytest.mark.parametrize("mu", [0.3, 1.0, 4.0])
@pytest.mark.parametrize("p", [1e-6, 1e-3, 0.3])
def test_a_threshold_adds_its_probability_to_delta_and_nothing_to_epsilon(mu, p):
    """One person with one item that nobody else has, named with probability p, and one Gaussian answer y of mean 1 or 0.

    Both directions exactly. With: named (impossible without) or not, and y ~ N(mu, 1). Without: not named, y ~ N(0, 1).
    The smallest delta that holds at epsilon is the integral of the positive part of one density less e^epsilon times the other.
    """
    epsilons = np.linspace(0, 12, 400)
    claimed = gaussian_delta(mu, epsilons) + p
    without = gaussian_delta(mu, epsilons + math.log1p(-p))
    present = p + (1 - p) * gaussian_delta(mu, epsilons - math.log1p(-p))
    assert (without <= claimed).all()
    assert (present <= claimed).all()
    # p is needed: less would not hold.
    assert (present > claimed - p / 2).any()
    # The closed forms are the integrals: both by sums over a fine grid of y.
    y, step = np.linspace(-12, 16, 200_001, retstep=True)
    one, other = (1 - p) * norm.pdf(y, mu), norm.pdf(y)
    for at in range(0, 400, 100):
        factor = math.exp(epsilons[at])
        assert p + np.clip(one - factor * other, 0, None).sum() * step == pytest.approx(present[at], abs=1e-7)
        assert np.clip(other - factor * one, 0, None).sum() * step == pytest.approx(without[at], abs=1e-7)


def test_a_plan_without_a_threshold_names_nothing(tmp_path):
    plan = make_plan(40, 6.0, 1e-2, shares={ITEMS: 1.0})
    with pytest.raises(PrivacyError, match="threshold"):
        ask(tmp_path, people([[1]] * 40), ["a"], plan=plan)


def test_a_selection_that_the_plan_has_no_threshold_for_is_refused_and_nothing_is_charged(tmp_path):
    """Two selections would name twice what one threshold delta pays for."""
    log = people([[1]] * 40)
    without = make_plan(40, 6.0, 1e-2, shares={ITEMS: 1.0})
    later = make_plan(40, 6.0, 1e-2, shares={"first": 0.5, ITEMS: 0.5}, threshold_delta=5e-3)
    for plan, asked in ((without, 0), (later, 1)):
        with create_ledger(tmp_path / str(asked), plan) as ledger:
            curator = Curator(log, plan, ledger, Keys())
            if asked:
                curator.ask(Histogram(1, name="first"))
            with pytest.raises(PrivacyError, match="no threshold"):
                curator.ask(ItemCounts(["a"]))
            assert len(ledger.account().entries) == asked


def test_the_grid_does_not_tell_how_many_items_there_are(tmp_path):
    """Above 2^24 numbers a grid is finer; the number of items of a selection is private."""

    class Many(ItemCounts):
        numbers = 2**26

        def sensitivity(self, grid):
            assert grid == 2.0**-26
            raise KeyboardInterrupt

    with create_ledger(tmp_path, PLAN) as ledger, pytest.raises(KeyboardInterrupt):
        Curator(people([[1]]), PLAN, ledger, Keys()).ask(Many(["a"]))
