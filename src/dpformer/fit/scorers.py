"""Turn answers into the models `Popularity` and `TransitionScorer`; and exact counts, a baseline that is not private."""

from __future__ import annotations

import numpy as np
import torch

from dpformer.data import Sequences
from dpformer.models import Popularity, TransitionScorer
from dpformer.privacy import Answer
from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import check_items, histogram_of
from dpformer.statistics.score_matrix import scorer_arrays
from dpformer.statistics.settings import TransitionSettings


def fit_transitions(
    asker: Asker, histogram: Answer, sigma: float, users: int, settings: TransitionSettings | None = None
) -> TransitionScorer:
    """Ask for the transitions over the head of a histogram. sigma, users: of the whole plan; see `head_size`."""
    settings = settings or TransitionSettings()
    return to_scorer(measure(asker, histogram, settings, sigma, users), settings)


def to_scorer(measured: Measured, settings: TransitionSettings, features: np.ndarray | None = None) -> TransitionScorer:
    """The scorer of what was measured: post-processing. features: public ones of all items."""
    tensors = {name: torch.from_numpy(array) for name, array in scorer_arrays(measured, settings, features).items()}
    return TransitionScorer.of(tensors, settings.window, settings.popularity)


def popularity_of(histogram: Answer) -> Popularity:
    """Rank by a noisy histogram, in which each user has one vector of norm 1."""
    return Popularity.of(torch.from_numpy(histogram_of(histogram)), histogram.noise_std)


def count_events(people: Sequences, items: int) -> Popularity:
    """Count the events of each item 1..items. Not private: the counts are exact."""
    check_items(people, items)
    return Popularity.of(torch.from_numpy(np.bincount(people.items, minlength=items + 1)))
