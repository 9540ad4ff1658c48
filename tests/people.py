"""Small logs for tests."""

import itertools
from collections.abc import Sequence

import numpy as np
import polars as pl

from dpformer.data import Sequences


def people(histories: Sequence[Sequence[int]]) -> Sequences:
    """One person for each list of items."""
    items = np.array(list(itertools.chain.from_iterable(histories)), dtype=np.int32)
    offsets = np.cumsum([0, *map(len, histories)])
    return Sequences(pl.Series("user_id", range(len(histories)), dtype=pl.Int64), items, offsets)


def without(histories: Sequence[Sequence[int]], person: int) -> list[Sequence[int]]:
    """The neighbour: this person's events are replaced by none."""
    return [[] if n == person else history for n, history in enumerate(histories)]
