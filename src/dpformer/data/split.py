"""The held-out item of each user, and the words that say which it is: leave-one-out, or a split by time."""

from dataclasses import dataclass, replace

import numpy as np

from dpformer.data.sequences import HELD_OUT, SHORTEST_SPLIT, Sequences, TimeSplit
from dpformer.errors import DataError


@dataclass(frozen=True)
class HeldOut:
    """Histories, and the item that follows each of them.

    item: "test" or "validation". histories: all users' items before the held-out one; users who are not evaluated keep all.
    evaluated: int64 [E], indices of the users to evaluate; targets: int32 [E], their held-out items. asked, left_out: which item
    that is and which users are not evaluated, in words. date: of a split by time.
    A model fitted on `histories` has seen neither the held-out item nor anything after it.
    """

    item: str
    histories: Sequences
    evaluated: np.ndarray
    targets: np.ndarray
    asked: str
    left_out: str
    date: str | None = None

    def renumbered(self, numbers: np.ndarray) -> "HeldOut":
        """Replace item i by `numbers[i]`, as in another catalogue. A missing target is 0 and counts as missed."""
        return replace(self, histories=self.histories.renumbered(numbers), targets=numbers[self.targets])


def held_out(sequences: Sequences, item: str = "test") -> HeldOut:
    """Hold out one item of each user, and all after it.

    Leave-one-out: the last item ("test"), or the second to last ("validation"), of users with at least three. By time: the first
    item from the date on ("test"), or the last one before it ("validation"), of users with items before the held-out one.

    Raises:
        DataError: `item` is neither.
    """
    before, evaluated, asked, left_out = places(sequences.lengths, sequences.split, item)
    targets = sequences.items[(sequences.offsets[:-1] + before)[evaluated]]
    histories = sequences.first(np.where(evaluated, before, sequences.lengths))
    date = None if sequences.split is None else sequences.split.date
    return HeldOut(item, histories, np.flatnonzero(evaluated), targets, asked, left_out, date)


def places(lengths: np.ndarray, split: TimeSplit | None, item: str) -> tuple[np.ndarray, np.ndarray, str, str]:
    """Where the held-out item stands in sequences of these lengths, int64 [N], and who has one, bool [N]; both also in words."""
    if item not in HELD_OUT or item == "nothing":
        raise DataError(f"no item {item!r} is held out; there are: test, validation")
    if split is None:
        asked = {"test": "last item", "validation": "second to last item"}[item] + ", from everything before it"
        left_out, before = f"with fewer than {SHORTEST_SPLIT} events", lengths - HELD_OUT[item]
        evaluated = lengths >= SHORTEST_SPLIT
    elif item == "test":
        asked = f"first item from {split.date} (UTC) on, from everything before that date"
        left_out, before = "without events on both sides of that date", split.before
        evaluated = (before > 0) & (before < lengths)
    else:
        asked = f"last item before {split.date} (UTC), from everything before that item"
        left_out, before = "with fewer than 2 events before that date", split.before - 1
        evaluated = before > 0
    return before, evaluated, f"each user's {asked}", left_out


def trained_on(hold_out: str, date: str | None = None) -> str:
    """The events that `Sequences.training` keeps, in words. date: of a split by time."""
    if hold_out == "nothing":
        return "all events"
    if date is None:
        last = {"test": "one", "validation": "two"}[hold_out]
        return f"each user's events but the last {last} (all of them, of users with fewer than three)"
    but = {"test": "", "validation": " but the last one (users with one keep it)"}[hold_out]
    return f"each user's events before {date} (UTC){but}"
