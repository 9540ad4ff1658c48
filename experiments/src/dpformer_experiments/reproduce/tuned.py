"""DP transitions with the tuning itself paid for (Papernot and Steinke 2022).

A random number K of trials is made. Each draws one configuration of `GRID` at random, releases the statistics with noise sigma,
and releases its score: how many users find their validation item in the top 10, plus N(0, score_noise^2). One user changes that
sum by at most 1, so the score is a Gaussian release of its own, and *part of the trial*: only so does the selection cost what
`tuned_epsilon` says. The best trial by its noisy score is kept. sigma is the smallest with which all of this together,
K trials, their scores and the choice, is within epsilon.

K and the scores that lost are not to be published.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data import load
from dpformer.evaluation import held_out, rank
from dpformer.models.statistics import DPTransitions, TransitionSettings
from dpformer.privacy import GaussianRelease, Tuning, noise_source, tuned_epsilon, tuned_release_multiplier
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.runs import append_line, read_lines
from dpformer_experiments.reproduce.work import Done, ShouldStop, Tell, figures_of

# Fixed beforehand and public. Chosen by what the settings mean; the default's head lies between these.
GRID: tuple[dict[str, Any], ...] = tuple(
    {"head": head, "lags": lags, **stages}
    for head in (500, 1000, 2000)
    for lags in (5, 15)
    for stages in ({}, {"stage_shares": (0.97,), "thresholds": ()})
)
TUNING = Tuning(trials=4.0, distribution="geometric", score_noise_multiplier=10.0)
TRIALS = "trials.jsonl"


def tuned_transitions(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, tell: Tell) -> Done | None:
    """All trials, and the figures of the best. A trial that was finished before an interruption is not made again."""
    sigma = tuned_release_multiplier(cell.epsilon, cell.delta, TUNING)
    dataset = load(data)
    train, items = dataset.split().train, len(dataset.catalogue)
    held = held_out(dataset.sequences, "validation")
    generator = np.random.default_rng(cell.seed)
    count = TUNING.draw(generator)
    drawn = [int(place) for place in generator.integers(len(GRID), size=count)]
    trials = read_lines(folder / TRIALS)

    def fit(trial: int) -> tuple[DPTransitions, Any]:
        noise = noise_source("seeded", 1_000_003 * cell.seed + trial)
        model = DPTransitions(TransitionSettings(**GRID[drawn[trial]]))
        model.fit(train.items, train.offsets, items, noise_multiplier=sigma, gaussian=noise.gaussian)
        return model, noise

    for trial in range(len(trials), count):
        if should_stop():
            return None
        model, noise = fit(trial)
        hits = int((rank(model, held, items)["masked"].ranks < 10).sum())
        score = hits + float(noise.gaussian((1,), TUNING.score_noise_multiplier)[0])
        trials.append({"trial": trial, "configuration": drawn[trial], "score": score})
        append_line(folder / TRIALS, trials[-1])
        tell(trial + 1, count)
    best = max(trials, key=lambda trial: trial["score"])
    spent = tuned_epsilon([GaussianRelease("transitions", sigma)], TUNING, cell.delta)
    users = len(dataset.sequences)
    privacy = {
        "epsilon": spent,
        "delta": cell.delta,
        "epsilon_at_delta_1_over_users": tuned_epsilon([GaussianRelease("transitions", sigma)], TUNING, 1 / users),
        "noise_multiplier": sigma,
        "score_noise_multiplier": TUNING.score_noise_multiplier,
        "mean_trials": TUNING.trials,
        "distribution": TUNING.distribution,
        "configurations": len(GRID),
        "chosen": GRID[best["configuration"]],
    }
    return {**figures_of(fit(best["trial"])[0], dataset, None), "privacy": privacy, "trials": trials}
