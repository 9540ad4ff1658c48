"""Poisson draws through keys that are ratcheted: who is drawn, how often, and that samples are independent."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from scipy import stats

from dpformer.privacy import Keys
from dpformer.privacy.noise import poisson_draw

USERS, STEPS = 200, 4000


def sampler(rate: float, seed: int) -> Callable[[], np.ndarray]:
    """Draws at one place of a ledger after the other."""
    keys = Keys(seed)

    def draw() -> np.ndarray:
        users = poisson_draw(keys.sample(), USERS, rate)
        keys.ratchet()
        return users

    return draw


def check_poisson(draw: Callable[[], np.ndarray], rate: float) -> None:
    """Every bound holds for true Poisson sampling but for one time in about a million."""
    drawn = np.zeros((STEPS, USERS), dtype=bool)
    for step in range(STEPS):
        drawn[step, draw()] = True
    # Each user over the steps, all users together.
    low, high = stats.binom.interval(1 - 1e-6 / USERS, STEPS, rate)
    counts = drawn.sum(axis=0)
    assert low <= counts.min()
    assert counts.max() <= high
    low, high = stats.binom.interval(1 - 1e-6, STEPS * USERS, rate)
    assert low <= counts.sum() <= high
    # The size of a batch varies as a binomial: five standard errors of a variance, about sqrt(2 / STEPS) each.
    assert drawn.sum(axis=1).var() == pytest.approx(USERS * rate * (1 - rate), rel=5 * (2 / STEPS) ** 0.5)
    # A user is in two batches running as often as independence has it: even and odd steps paired, all users.
    low, high = stats.binom.interval(1 - 1e-6, STEPS // 2 * USERS, rate**2)
    assert low <= (drawn[::2] & drawn[1::2]).sum() <= high


@pytest.mark.parametrize("rate", [0.01, 0.3, 0.9])
def test_inclusion_rates_are_within_binomial_bounds(rate: float):
    check_poisson(sampler(rate, 7), rate)


def epochs(rng: np.random.Generator, size: int) -> Iterator[np.ndarray]:
    """What an ordinary data loader does: shuffle, then deal out everybody once an epoch."""
    while True:
        yield from np.split(rng.permutation(USERS), USERS // size)


@pytest.mark.parametrize("defect", ["fixed size", "shuffled epochs", "one user favoured", "every batch twice", "rate"])
def test_a_planted_defect_is_found(defect: str):
    rng, rate = np.random.default_rng(1), 0.1
    draw, shuffled = sampler(rate, 1), epochs(rng, round(rate * USERS))
    twice = (batch for _ in range(STEPS) for batch in [draw()] * 2)
    wrong: dict[str, Callable[[], np.ndarray]] = {
        "fixed size": lambda: rng.choice(USERS, round(rate * USERS), replace=False),
        "shuffled epochs": lambda: next(shuffled),
        "one user favoured": lambda: np.union1d(draw(), [3] if rng.random() < 0.05 else []).astype(np.int64),
        "every batch twice": lambda: next(twice),
        "rate": sampler(1.05 * rate, 1),
    }
    with pytest.raises(AssertionError):
        check_poisson(wrong[defect], rate)
