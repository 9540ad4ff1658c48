"""A private catalogue: the items whose noisy counts are above a threshold; see `privacy.selection` for the guarantee."""

from collections.abc import Sequence
from typing import Any

from dpformer.privacy.query import Vectors
from dpformer.privacy.selection import Selection
from dpformer.statistics.histogram import Histogram, People

ITEMS = "items"


class ItemCounts(Selection):
    """The histogram over all items of a log, whose names are private. ids: of the items 1, 2, ..."""

    def __init__(self, ids: Sequence[Any], last: int = 2000) -> None:
        self.name, self.shape, self.most = ITEMS, (len(ids),), last
        self.labels = ids
        self._histogram = Histogram(len(ids), last)

    def vectors(self, people: People) -> Vectors:
        for person, item, value in self._histogram.vectors(people):
            yield person, item - 1, value
