"""Leave-one-out: a user's last item is for the test, the second to last for validation, the rest for training."""

from dataclasses import dataclass

import numpy as np

from dpformer.data.sequences import Sequences

# One item to test, one to validate, and at least one to go by.
SHORTEST_SPLIT = 3


@dataclass(frozen=True)
class Split:
    """train: all users; those with fewer than three events keep all of theirs and are not evaluated.

    evaluated: int64 [E], places of the users who are; validation, test: int32 [E], the item held out of each.
    What precedes the validation item is the user's training sequence, what precedes the test item is that and the
    validation item.
    """

    train: Sequences
    evaluated: np.ndarray
    validation: np.ndarray
    test: np.ndarray


def without_last(sequences: Sequences, count: int) -> Sequences:
    """The sequences without the last `count` items of every user who has three."""
    lengths, ends = sequences.lengths, sequences.offsets[1:]
    long = lengths >= SHORTEST_SPLIT
    kept = np.ones(len(sequences.items), dtype=bool)
    for place in range(1, count + 1):
        kept[ends[long] - place] = False
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths - count * long)])
    return Sequences(sequences.users, sequences.items[kept], offsets)


def split(sequences: Sequences) -> Split:
    """Hold out the last two items of every user who has three."""
    lengths, ends = sequences.lengths, sequences.offsets[1:]
    long = lengths >= SHORTEST_SPLIT
    return Split(
        train=without_last(sequences, 2),
        evaluated=np.flatnonzero(long),
        validation=sequences.items[ends[long] - 2],
        test=sequences.items[ends[long] - 1],
    )
