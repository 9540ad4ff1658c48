"""The helper of experiments: a real Curator with a ledger that is charged, and the same answers for the same seed."""

import numpy as np
import pytest

from dpformer.data import demo_frame, prepare
from dpformer.errors import PrivacyError
from dpformer.privacy import make_plan
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer_experiments.curators import seeded_curator


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
