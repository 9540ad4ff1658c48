"""The held-out item, and what is known when it is asked for."""

from dataclasses import dataclass

import numpy as np

from dpformer.data.sequences import HELD_OUT, SHORTEST_SPLIT, Sequences
from dpformer.errors import DataError


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
    if item not in HELD_OUT or item == "nothing":
        raise DataError(f"no item {item!r} is held out; there are: test, validation")
    long = sequences.lengths >= SHORTEST_SPLIT
    targets = sequences.items[sequences.offsets[1:][long] - HELD_OUT[item]]
    return HeldOut(item, sequences.without_last(HELD_OUT[item]), np.flatnonzero(long), targets)
