"""The held-out item: leave-one-out evaluation."""

from dataclasses import dataclass

import numpy as np

from dpformer.data.sequences import HELD_OUT, SHORTEST_SPLIT, Sequences
from dpformer.errors import DataError


@dataclass(frozen=True)
class HeldOut:
    """Histories, and the item that follows each of them.

    item: "test" or "validation". histories: all users' items before the held-out one; users with fewer than three items keep
    all. evaluated: int64 [E], indices of the users to evaluate; targets: int32 [E], their held-out items.
    A model fitted on `histories` has seen neither the held-out item nor anything after it.
    """

    item: str
    histories: Sequences
    evaluated: np.ndarray
    targets: np.ndarray

    def renumbered(self, numbers: np.ndarray) -> "HeldOut":
        """Replace item i by `numbers[i]`, as in another catalogue. A missing target is 0 and counts as missed."""
        return HeldOut(self.item, self.histories.renumbered(numbers), self.evaluated, numbers[self.targets])


def held_out(sequences: Sequences, item: str = "test") -> HeldOut:
    """Hold out each user's last item ("test"), or the last two and ask for the first of them ("validation").

    Raises:
        DataError: `item` is neither.
    """
    if item not in HELD_OUT or item == "nothing":
        raise DataError(f"no item {item!r} is held out; there are: test, validation")
    long = sequences.lengths >= SHORTEST_SPLIT
    targets = sequences.items[sequences.offsets[1:][long] - HELD_OUT[item]]
    return HeldOut(item, sequences.without_last(HELD_OUT[item]), np.flatnonzero(long), targets)
