"""Which item is asked for, and what is known when it is asked."""

from dataclasses import dataclass

import numpy as np

from dpformer.data import Sequences
from dpformer.data.split import SHORTEST_SPLIT, without_last
from dpformer.errors import DataError

ITEMS = {"test": 1, "validation": 2}
"""What can be held out, and its place from the end."""


@dataclass(frozen=True)
class HeldOut:
    """item: "test" or "validation". histories: of all users, everything before the item held out; a user too short to be
    evaluated keeps all. evaluated: int64 [E], places of the users who are; targets: int32 [E], the item of each.

    Fit on `histories`, and the item to predict is not in it, nor anything after it.
    """

    item: str
    histories: Sequences
    evaluated: np.ndarray
    targets: np.ndarray

    def renumbered(self, numbers: np.ndarray) -> "HeldOut":
        """The same in another catalogue: item i is `numbers[i]` there. A target without a number there is 0, and is missed."""
        return HeldOut(self.item, self.histories.renumbered(numbers), self.evaluated, numbers[self.targets])


def held_out(sequences: Sequences, item: str = "test") -> HeldOut:
    """Hold out everybody's last item ("test"), or their second to last and the last with it ("validation")."""
    if item not in ITEMS:
        raise DataError(f"no item {item!r} is held out; there are: {', '.join(ITEMS)}")
    lengths, ends = sequences.lengths, sequences.offsets[1:]
    long = lengths >= SHORTEST_SPLIT
    histories = without_last(sequences, ITEMS[item])
    return HeldOut(item, histories, np.flatnonzero(long), sequences.items[ends[long] - ITEMS[item]])
