"""DP transitions whose epsilon includes the tuning (Papernot and Steinke 2022).

A random number K of trials is made. Each draws one configuration of `GRID` at random, asks for the statistics with noise sigma,
and asks for its score: the number of users whose validation item is in the top 10, plus N(0, score_noise^2). One user changes
that sum by at most 1, so the score is one more Gaussian answer. It must be *part of the trial* for `tuned_epsilon` to hold.
Each trial has its own plan, and sees only the answers of its Curator. The trial with the best noisy score is kept. sigma is the
smallest noise for which the K trials, their scores and the choice stay within epsilon.

Do not publish K or the scores of the other trials.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data import Sequences, load
from dpformer.evaluation import Scorer, held_out, rank
from dpformer.fit.scorers import to_scorer
from dpformer.models import TransitionScorer
from dpformer.privacy import Answer, Charge, Curator, PrivacyPlan, Query, Sample, Statistic
from dpformer.privacy.accounting import split_budget
from dpformer.privacy.query import Asker, Vectors
from dpformer.privacy.tuning import Tuning, tuned_epsilon, tuned_factor
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runs import append_line, read_lines
from dpformer_experiments.reproduce.work import Done, OnStep, ShouldStop, figures_of
from dpformer_experiments.transition_answers import measure_transitions, transition_shares

# Fixed beforehand and public, without looking at data; the size of the default's head lies between these.
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
    """The number of people whose validation item is in the top 10: each adds 1 or 0, so the bound is 1."""

    name, shape = SCORE, (1,)

    def __init__(self, model: Scorer, items: int) -> None:
        self._model, self._items = model, items

    def vectors(self, people: Sequences) -> Vectors:
        """1 for each person with a hit."""
        held = held_out(people, "validation")
        hit = held.evaluated[rank(self._model, held, self._items)["masked"].ranks < 10]
        yield hit, np.zeros(len(hit), dtype=np.int64), np.ones(len(hit))


class Earlier:
    """A query over the events before the validation item, for a Curator that has all events. It cuts each person separately."""

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
        return self._query.sum(people.training("validation"), sample, grid)


class AskEarlier:
    """Asks a Curator for `Earlier` queries."""

    def __init__(self, curator: Asker) -> None:
        self._curator = curator

    def ask(self, query: Query[Any]) -> Answer:
        """The answer over the events before the validation item."""
        return self._curator.ask(Earlier(query))


def tuned_transitions(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """Make all trials, and evaluate the best. Trials that were finished before an interruption are not repeated."""
    sigma = tuned_factor([Charge("transitions", 1.0)], TUNING, cell.epsilon, cell.delta)
    dataset = load(data)
    people, items = dataset.sequences, len(dataset.catalogue)
    generator = np.random.default_rng(cell.seed)
    count = TUNING.draw(generator)
    drawn = [int(place) for place in generator.integers(len(GRID), size=count)]
    trials = read_lines(folder / TRIALS)

    def fit(curator: Curator[Sequences], trial: int) -> TransitionScorer:
        settings = TransitionSettings(**GRID[drawn[trial]])
        return to_scorer(measure_transitions(AskEarlier(curator), items, len(people), settings), settings)

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
        model = fit(curator, best["trial"])  # the same keys give the same answers
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
    return {**figures_of(model, dataset), "privacy": privacy, "trials": trials}
