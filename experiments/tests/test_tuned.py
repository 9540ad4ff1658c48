"""Tuning that is accounted: the price against a computation of its own, and what a trial may depend on."""

import json
import math

import numpy as np
import pytest

from dpformer.data import demo_frame, prepare
from dpformer.fit.scorers import count_events
from dpformer.privacy import Charge, Sample
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.privacy.query import grid_step
from dpformer.privacy.tuning import Tuning, tuned_epsilon, tuned_factor
from dpformer.statistics.histogram import Histogram
from dpformer_experiments.reproduce import tuned
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runner import Running, run_cells


def by_hand(sigma: float, tuning: Tuning, delta: float) -> float:
    """Theorem 2 of Papernot and Steinke for a geometric number of trials (eta = 1, gamma = 1 / mean), each of them two Gaussian
    mechanisms, so that a trial is (l, l / 2 (1 / sigma^2 + 1 / s^2))-RDP; the best over both orders, turned into epsilon.
    """
    rho = 0.5 * (1 / sigma**2 + 1 / tuning.score_noise_multiplier**2)
    orders = np.concatenate([np.linspace(1.01, 12, 2000), np.linspace(12, 200, 2000)])
    # the part at the second order, free to choose
    second = 2 * (1 - 1 / orders) * rho * orders + 2 * math.log(tuning.trials) / orders
    total = rho * orders + second.min() + math.log(tuning.trials) / (orders - 1)
    return float((total + np.log1p(-1 / orders) - (math.log(delta) + np.log(orders)) / (orders - 1)).min())


@pytest.mark.parametrize("epsilon", [5.0, 8.0, 10.0])
def test_the_noise_is_the_smallest_that_pays_for_everything(epsilon):
    sigma = tuned_factor([Charge("t", 1.0)], tuned.TUNING, epsilon, 1e-5)
    assert tuned_epsilon([Charge("t", sigma)], tuned.TUNING, 1e-5) <= epsilon
    assert by_hand(sigma, tuned.TUNING, 1e-5) == pytest.approx(epsilon, rel=0.02)
    # Tuning that is not accounted would be content with much less: a run with that noise is found out.
    single = gaussian_multiplier(epsilon, 1e-5)
    assert sigma > 1.3 * single
    assert by_hand(single, tuned.TUNING, 1e-5) > 1.3 * epsilon


def test_a_seeded_number_of_trials_has_the_right_mean():
    generator = np.random.default_rng(0)
    drawn = [tuned.TUNING.draw(generator) for _ in range(4000)]
    assert min(drawn) == 1
    assert np.mean(drawn) == pytest.approx(tuned.TUNING.trials, rel=0.1)


def test_a_score_counts_each_person_once_and_is_bounded_by_one():
    """Against a loop over people: the sum in grid steps is the number of hits, and one person moves it by one hit at the most."""
    people = prepare(demo_frame()).sequences
    items = int(people.items.max())
    model = count_events(people, items)
    query = tuned.Hits(model, items)
    grid = grid_step(query.bound, query.numbers)
    counts = np.bincount(people.items, minlength=items + 1).astype(float)
    hits = 0
    for person in range(len(people)):
        events = people[person]
        if len(events) < 3:
            continue
        history, target = events[:-2], events[-2]
        scores = counts.copy()
        scores[history] = -np.inf
        scores[0] = -np.inf
        if np.isfinite(scores[target]) and int((scores >= scores[target]).sum()) <= 10:
            hits += 1
    everybody = Sample(np.arange(len(people)), bytes(32))
    assert query.sum(people, everybody, grid)[tuned.SCORE].tolist() == [round(hits / grid)]
    assert hits > 0
    assert query.sensitivity(grid) == 1 / grid


def test_statistics_of_a_trial_do_not_see_the_validation_item():
    people = prepare(demo_frame()).sequences
    items = int(people.items.max())
    early, train = tuned.Earlier(Histogram(items)), people.training("validation")
    everybody = Sample(np.arange(len(people)), bytes(32))
    grid = grid_step(1.0, items + 1)
    expected = Histogram(items).sum(train, everybody, grid)["histogram"]
    np.testing.assert_array_equal(early.sum(people, everybody, grid)["histogram"], expected)
    assert (expected != Histogram(items).sum(people, everybody, grid)["histogram"]).any()


def test_trials_are_made_once_and_the_best_by_its_noisy_score_is_kept(demo, tmp_path, monkeypatch):
    grid = ({"head": 30, "rank": 4}, {"head": 60, "rank": 4})
    monkeypatch.setattr(tuned, "GRID", grid)
    seed = next(s for s in range(1, 50) if tuned.TUNING.draw(np.random.default_rng(s)) == 3)
    cell = Cell("demo", "tuned", 8.0, seed, "tuned transitions")
    calls = iter(range(100))
    [stopped] = run_cells([cell], demo, Running(tmp_path, workers=1, stopped=lambda: next(calls) > 1))
    assert stopped.record is None
    before = (stopped.folder / tuned.TRIALS).read_text().splitlines()
    assert 0 < len(before) < 3
    [outcome] = run_cells([cell], demo, Running(tmp_path, workers=1))
    trials = outcome.record["trials"]
    assert trials[: len(before)] == [json.loads(line) for line in before]
    assert len(trials) == 3
    privacy = outcome.record["privacy"]
    assert 7.9 < privacy["epsilon"] <= 8.0
    best = max(trials, key=lambda trial: trial["score"])
    assert privacy["chosen"] == grid[best["configuration"]]
    # Counts with noise: no score is whole, and the released one is near the figure of the model that was kept.
    assert all(trial["score"] != round(trial["score"]) for trial in trials)
    users = int(outcome.record["validation"]["protocol"].split("for all ")[1].split(" users")[0].replace(",", ""))
    hits = outcome.record["validation"]["masked"]["hit@10"]["value"] * users
    assert abs(best["score"] - hits) < 6 * tuned.TUNING.score_noise_multiplier
