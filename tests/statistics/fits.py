"""All statistics of a run in one call: the histogram, then the transitions over its head."""

import math

from dpformer.fit.scorers import fit_transitions, popularity_of
from dpformer.models import Popularity, TransitionScorer
from dpformer.privacy.query import Asker
from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import HISTOGRAM, Histogram
from dpformer.statistics.settings import TransitionSettings

POPULARITY_SHARES = {HISTOGRAM: 1.0}
HISTOGRAM_SHARE = 0.03
USERS = 200  # few: the head does not depend on their number


def all_shares(settings: TransitionSettings | None = None) -> dict[str, float]:
    """The parts of the budget, as preset `transitions` has them."""
    return {HISTOGRAM: HISTOGRAM_SHARE, **(settings or TransitionSettings()).shares(1 - HISTOGRAM_SHARE)}


def fit_popularity(asker: Asker, items: int) -> Popularity:
    """Preset `popularity`."""
    return popularity_of(asker.ask(Histogram(items)))


def fit_all(asker: Asker, items: int, settings: TransitionSettings | None = None) -> TransitionScorer:
    """Preset `transitions`."""
    histogram = asker.ask(Histogram(items))
    return fit_transitions(asker, histogram, histogram.noise_std * math.sqrt(HISTOGRAM_SHARE), USERS, settings)


def measure_all(asker: Asker, items: int, settings: TransitionSettings) -> Measured:
    """What preset `transitions` measures."""
    histogram = asker.ask(Histogram(items))
    return measure(asker, histogram, settings, histogram.noise_std * math.sqrt(HISTOGRAM_SHARE), USERS)
