"""Simulated people: the law of the next item is the stated mixture, and no model ranks better than the oracle."""

import numpy as np
import pytest

from dpformer.data import Sequences, demo_frame, held_out, prepare
from dpformer.evaluation import evaluate
from dpformer.fit.scorers import count_events, fit_transitions
from dpformer.privacy import make_plan
from dpformer.statistics.histogram import Histogram
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.simulator import LAG_POWER, LAGS, WINDOW, Generator, Kind, Oracle
from tests.people import people

KIND = Kind("demo", power=1.3, popular=0.2, events=12)
# Item 5 is always last, so nothing follows it; item 4 follows 3 and 1 alone.
LOG = [[1, 2, 3, 4], [1, 2, 1, 3], [2, 3, 5], [3, 4, 5], [4, 1, 2, 5], [2, 1]] * 3


def stated(log: list[list[int]], kind: Kind, items: int, history: list[int]) -> np.ndarray:
    """q of the module's docstring, item by item."""
    C, p = np.zeros((items + 1, items + 1)), np.zeros(items + 1)
    for s in log:
        for t, i in enumerate(s):
            p[i] += 1
            for k in range(1, LAGS + 1):
                if t + k < len(s) and s[t + k] != i:
                    C[i, s[t + k]] += k**-LAG_POWER
    p /= p.sum()
    recent = history[::-1][:WINDOW]
    weights = np.array([1 / (k + 1) for k in range(len(recent))])
    q = np.zeros(items + 1) if recent else p.copy()
    for i, w in zip(recent, weights / weights.sum(), strict=True):
        row = C[i] ** kind.power
        P = row / row.sum() if row.sum() else p
        q += w * ((1 - kind.popular) * P + kind.popular * p)
    return q


@pytest.fixture(scope="module")
def generator() -> Generator:
    return Generator(people(LOG), 5, KIND)


@pytest.mark.parametrize("history", [[], [2], [5], [3, 4], [4, 5, 1, 2]])
def test_probabilities_are_the_stated_mixture(generator, history):
    found = generator.probabilities(np.array([[0] * (WINDOW - len(history)) + history]))[0]
    np.testing.assert_allclose(found, stated(LOG, KIND, 5, history), atol=1e-12)
    assert found.sum() == pytest.approx(1)


def test_what_is_drawn_next_follows_the_mixture_without_seen_items():
    """200,000 people with 3 events: frequencies of the third, given the first two, within 5 standard errors."""
    kind = Kind("demo", power=1.3, popular=0.2, events=3)
    s = Generator(people(LOG), 5, kind).draw(200_000, seed=7).items.reshape(-1, 3)
    assert (np.bincount(s[:, 0], minlength=6) / len(s)) == pytest.approx(stated(LOG, kind, 5, []), abs=0.006)
    for first in range(1, 6):
        for second in set(range(1, 6)) - {first}:
            given = s[(s[:, 0] == first) & (s[:, 1] == second), 2]
            q = stated(LOG, kind, 5, [first, second])
            q[[first, second]] = 0
            q /= q.sum()
            found = np.bincount(given, minlength=6) / len(given)
            assert (np.abs(found - q) <= 5 * np.sqrt(q * (1 - q) / len(given)) + 1e-12).all(), (first, second)


def test_people_have_the_lengths_of_the_kind_and_no_item_twice():
    log = [list(range(1, n + 1)) for n in (3, 7, 30)]
    kind = Kind("demo", power=1.0, popular=0.3, longest=10)
    drawn = Generator(people(log), 30, kind).draw(500, seed=1)
    assert set(drawn.lengths) == {3, 7, 10}
    assert all(len(set(s)) == len(s) and min(s) >= 1 for s in map(list, drawn))
    again = Generator(people(log), 30, kind).draw(500, seed=1)
    assert (again.items == drawn.items).all()
    other = Generator(people(log), 30, kind).draw(500, seed=2)
    assert other.items.tolist() != drawn.items.tolist()


def test_no_model_ranks_better_than_the_oracle():
    demo = prepare(demo_frame())
    items = len(demo.catalogue)
    generator = Generator(demo.sequences, items, KIND)
    drawn: Sequences = generator.draw(3000, seed=3)
    held, settings = held_out(drawn), TransitionSettings()
    plan = make_plan(len(drawn), 100.0, 1e-5, shares={"histogram": 0.03, **settings.shares(0.97)})
    with seeded_curator(held.histories, plan, 0) as curator:
        histogram = curator.ask(Histogram(items))
        transitions = fit_transitions(curator, histogram, histogram.noise_std * 0.03**0.5, len(drawn), settings)
    models = {
        "oracle": Oracle(generator),
        "transitions": transitions,
        "popularity": count_events(held.histories, items),
    }
    found = {name: evaluate(model, held, items).masked["ndcg@10"].value for name, model in models.items()}
    assert found["oracle"] > found["transitions"] > found["popularity"]
