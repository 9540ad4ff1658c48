"""Recommenders made of statistics: ask for them, and build the model from the answers alone."""

from __future__ import annotations

import numpy as np
import torch

from dpformer.data import Sequences
from dpformer.models import Popularity, TransitionScorer
from dpformer.privacy import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import Histogram, check_items, histogram_of
from dpformer.statistics.score_matrix import scorer_arrays
from dpformer.statistics.settings import HISTOGRAM, TransitionSettings

# The name and the share of each answer that `fit_popularity` asks for.
POPULARITY_SHARES = {HISTOGRAM: 1.0}


def fit_transitions(
    asker: Asker, items: int, settings: TransitionSettings | None = None, prefix: str = ""
) -> TransitionScorer:
    """Ask for the histogram and the transitions. With shares that sum to 1 this is exactly one Gaussian mechanism.

    items: of the catalogue. prefix: stands before the names of `settings.shares` in the asker's plan.
    """
    settings = settings or TransitionSettings()
    return to_scorer(measure(asker, items, settings, prefix), settings)


def to_scorer(measured: Measured, settings: TransitionSettings) -> TransitionScorer:
    """The scorer of released counts: post-processing."""
    arrays = scorer_arrays(measured, settings)
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    return TransitionScorer.of(tensors, settings.window, settings.popularity)


def fit_popularity(asker: Asker, items: int, last: int = 2000, prefix: str = "") -> Popularity:
    """Ask for the histogram, in which each user has one vector of norm 1: one Gaussian mechanism."""
    answer = asker.ask(Histogram(items, last, prefix + HISTOGRAM))
    return Popularity.of(torch.from_numpy(histogram_of(answer)), answer.noise_std)


def count_events(people: Sequences, items: int) -> Popularity:
    """Count the events of each item 1..items. Not private: the counts are exact."""
    check_items(people, items)
    return Popularity.of(torch.from_numpy(np.bincount(people.items, minlength=items + 1)))
