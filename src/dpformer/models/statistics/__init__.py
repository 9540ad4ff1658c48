"""Recommenders that are sums over users: popularity, DP popularity and DP transition statistics. See docs/statistics.md."""

from dpformer.models.statistics.popularity import DPPopularity, Popularity
from dpformer.models.statistics.settings import Mix, TransitionSettings
from dpformer.models.statistics.transitions import DPTransitions

__all__ = [
    "DPPopularity",
    "DPTransitions",
    "Mix",
    "Popularity",
    "TransitionSettings",
]
