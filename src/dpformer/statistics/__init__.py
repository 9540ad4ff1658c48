"""What a recommender asks of people's data, as queries, and what is made of the answers. numpy only."""

from dpformer.statistics.combine import Measured, measure
from dpformer.statistics.histogram import Histogram, ItemFrequencies, frequencies
from dpformer.statistics.item_selection import ItemCounts
from dpformer.statistics.score_matrix import score_matrix, scorer_arrays
from dpformer.statistics.settings import Mix, TransitionSettings
from dpformer.statistics.transitions import Transitions

__all__ = ["Histogram", "ItemCounts", "ItemFrequencies", "Measured", "Mix", "TransitionSettings", "Transitions"]
__all__ += ["frequencies", "measure", "score_matrix", "scorer_arrays"]
