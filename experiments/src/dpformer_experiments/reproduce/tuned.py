"""DP transitions with the tuning itself paid for (Papernot and Steinke 2022).

A random number K of trials is made. Each draws one configuration of `GRID` at random, releases the statistics with noise sigma,
and releases its score: how many users find their validation item in the top 10, plus N(0, score_noise^2). One user changes that
sum by at most 1, so the score is a Gaussian release of its own, and *part of the trial*: only so does the selection cost what
`tuned_epsilon` says. A trial is a plan of its own, and all that it learns of people are the answers of its Curator. The best
trial by its noisy score is kept. sigma is the smallest with which all of this together, K trials, their scores and the choice,
is within epsilon.

K and the scores that lost are not to be published.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data import Sequences, load
from dpformer.evaluation import held_out, rank
from dpformer.evaluation.ranking import Scorer
from dpformer.fit.scorers import to_scorer
from dpformer.models import TransitionScorer
from dpformer.privacy import Answer, Charge, Curator, PrivacyPlan, Query, Sample, Statistic
from dpformer.privacy.charge import split_budget
from dpformer.privacy.query import Asker, Vectors
from dpformer.privacy.tuning import Tuning, tuned_epsilon, tuned_factor
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runs import append_line, read_lines
from dpformer_experiments.reproduce.work import Done, OnStep, ShouldStop, figures_of
from dpformer_experiments.transition_answers import measure_transitions, transition_shares

# Fixed beforehand and public. Chosen by what the settings mean; the default's head lies between these.
GRID: tuple[dict[str, Any], ...] = tuple(
    {"head": head, "lags": lags, **stages}
    for head in (500, 1000, 2000)
    for lags in (5, 15)
    for stages in ({}, {"stage_shares": (0.97,), "thresholds": ()})
)
TUNING = Tuning(trials=4.0, distribution="geometric", score_noise_multiplier=10.0)
TRIALS = "trials.jsonl"


SCORE = "score"


class Hits(Statistic):
    """How many people find their validation item among the first ten: 1 or 0 of each, so the bound is 1."""

    name, shape = SCORE, (1,)

    def __init__(self, model: Scorer, items: int) -> None:
        self._model, self._items = model, items

    def vectors(self, people: Sequences) -> Vectors:
        """1 for each person with a hit."""
        held = held_out(people, "validation")
        hit = held.evaluated[rank(self._model, held, self._items)["masked"].ranks < 10]
        yield hit, np.zeros(len(hit), dtype=np.int64), np.ones(len(hit))


class Earlier:
    """A query over the events before the validation item, for a Curator that has all of them. A matter of each person alone."""

    def __init__(self, query: Query[Sequences]) -> None:
        self._query = query
        self.name, self.bound, self.numbers, self.sensitivity = (
            query.name,
            query.bound,
            query.numbers,
            query.sensitivity,
        )

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """The query's sum over these events."""
        return self._query.sum(people.without_last(2), sample, grid)


class AskEarlier:
    """Asks a Curator for `Earlier` queries."""

    def __init__(self, curator: Asker) -> None:
        self._curator = curator

    def ask(self, query: Query[Any]) -> Answer:
        """The answer over the events before the validation item."""
        return self._curator.ask(Earlier(query))


def tuned_transitions(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """All trials, and the figures of the best. A trial that was finished before an interruption is not made again."""
    sigma = tuned_factor([Charge("transitions", 1.0)], TUNING, cell.epsilon, cell.delta)
    dataset = load(data)
    people, items = dataset.sequences, len(dataset.catalogue)
    generator = np.random.default_rng(cell.seed)
    count = TUNING.draw(generator)
    drawn = [int(place) for place in generator.integers(len(GRID), size=count)]
    trials = read_lines(folder / TRIALS)

    def fit(curator: Curator[Sequences], trial: int) -> TransitionScorer:
        settings = TransitionSettings(**GRID[drawn[trial]])
        return to_scorer(measure_transitions(AskEarlier(curator), items, settings), settings)

    def curator_of(trial: int) -> Any:
        shares = transition_shares(TransitionSettings(**GRID[drawn[trial]]))
        releases = (*split_budget(sigma, shares), Charge(SCORE, TUNING.score_noise_multiplier))
        plan = PrivacyPlan(len(people), len(people), 0, cell.epsilon, cell.delta, 0.0, releases)
        return seeded_curator(people, plan, 1_000_003 * cell.seed + trial)

    for trial in range(len(trials), count):
        if should_stop():
            return None
        with curator_of(trial) as curator:
            score = float(curator.ask(Hits(fit(curator, trial), items)).values[SCORE][0])
        trials.append({"trial": trial, "configuration": drawn[trial], "score": score})
        append_line(folder / TRIALS, trials[-1])
        on_step(trial + 1, count)
    best = max(trials, key=lambda trial: trial["score"])
    with curator_of(best["trial"]) as curator:
        model = fit(curator, best["trial"])  # with the same keys: the same answers
    spent = tuned_epsilon([Charge("transitions", sigma)], TUNING, cell.delta)
    users = len(people)
    privacy = {
        "epsilon": spent,
        "delta": cell.delta,
        "epsilon_at_delta_1_over_users": tuned_epsilon([Charge("transitions", sigma)], TUNING, 1 / users),
        "noise_multiplier": sigma,
        "score_noise_multiplier": TUNING.score_noise_multiplier,
        "mean_trials": TUNING.trials,
        "distribution": TUNING.distribution,
        "configurations": len(GRID),
        "chosen": GRID[best["configuration"]],
    }
    return {**figures_of(model, dataset, None), "privacy": privacy, "trials": trials}
