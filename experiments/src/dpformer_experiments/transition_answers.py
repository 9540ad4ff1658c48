"""The DP transition statistics without a run: the answers of a Curator to the queries of the preset `transitions`."""

from __future__ import annotations

import math

from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer.statistics.settings import TransitionSettings

HISTOGRAM_SHARE = 0.03  # as in the preset


def transition_shares(settings: TransitionSettings) -> dict[str, float]:
    """The answers in order, and their parts of the whole budget."""
    return {HISTOGRAM: HISTOGRAM_SHARE, **settings.shares(1 - HISTOGRAM_SHARE)}


def measure_transitions(asker: Asker, items: int, users: int, settings: TransitionSettings) -> Measured:
    """Ask for the histogram, then for the transitions over its head."""
    histogram = asker.ask(Histogram(items, settings.last))
    return measure(asker, histogram, settings, sigma=histogram.noise_std * math.sqrt(HISTOGRAM_SHARE), users=users)
