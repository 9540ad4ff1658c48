"""The helper of experiments: a real Curator with a ledger that is charged, and the same answers for the same seed."""

import numpy as np
import pytest

from dpformer.data import demo_frame, prepare
from dpformer.errors import PrivacyError
from dpformer.privacy import Curator, Keys, create_ledger, make_plan
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer_experiments.curators import curator_by_place, seeded_curator


@pytest.fixture(scope="module")
def people():
    return prepare(demo_frame()).sequences


def answer(people, seed, epsilon=8.0):
    items = int(people.items.max())
    plan = make_plan(len(people), epsilon, 1e-5, shares={HISTOGRAM: 1.0})
    with seeded_curator(people, plan, seed) as curator:
        found = curator.ask(Histogram(items)).values[HISTOGRAM]
        assert curator.ledger.account().released == {HISTOGRAM}
        assert curator.keys.seeded
        with pytest.raises(PrivacyError, match="budget is spent"):
            curator.ask(Histogram(items))
    return found


def test_a_seed_gives_the_same_answer_again_and_another_seed_another(people):
    first = answer(people, 1)
    np.testing.assert_array_equal(first, answer(people, 1))
    assert (first != answer(people, 2)).mean() > 0.99


def noise_and_sum(people, folder, make_curator, keys):
    """The answer of a histogram, and the exact one."""
    items = int(people.items.max())
    plan = make_plan(len(people), 8.0, 1e-5, shares={HISTOGRAM: 1.0})
    with create_ledger(folder, plan) as ledger:
        noisy = make_curator(people, plan, ledger, keys).ask(Histogram(items)).values[HISTOGRAM]
    with seeded_curator(people, make_plan(len(people), np.inf, 1e-5, shares={HISTOGRAM: 1.0}), 1) as exact:
        return noisy - exact.ask(Histogram(items)).values[HISTOGRAM]


def test_runs_that_are_compared_share_their_noise_whatever_their_sums(people, tmp_path):
    shorter = prepare(demo_frame()[:-500]).sequences
    size = min(int(people.items.max()), int(shorter.items.max())) + 1
    for make_curator, same in ((Curator, False), (curator_by_place, True)):
        noise = []
        for name, own in (("one", people), ("other", shorter)):
            folder = tmp_path / f"{name}-{same}"
            folder.mkdir()
            noise.append(noise_and_sum(own, folder, make_curator, Keys(1))[1:size])
        difference = np.std(noise[0] - noise[1]) / np.std(noise[0])
        # Noise is a multiple of the grid and scaled by the number of people: equal up to that.
        assert difference < 0.01 if same else difference > 1


def test_noise_by_place_needs_a_seed(people):
    with pytest.raises(PrivacyError, match="seed"):
        curator_by_place(people, make_plan(len(people), 8.0, 1e-5, shares={HISTOGRAM: 1.0}), None, Keys())
