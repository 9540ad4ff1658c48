"""Cut the users of a batch into micro-batches, which bound memory. One user is one record."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from dpformer.data.sequences import Sequences
from dpformer.errors import DataError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class MicroBatch:
    """Some users of one batch. users: int64 [B]; tokens: int64 [B, L], 0 after the end; lengths: int64 [B]."""

    users: np.ndarray
    tokens: "torch.Tensor"
    lengths: "torch.Tensor"


# How far a class of lengths reaches: short ones to twice as much, long ones to a quarter more, the last a tenth further. Less
# padding needs more micro-batches, and each has a fixed cost (scripts/step_time.py). On the training sequences of ML-1M (200
# items) and Games (50) there are 1.09 and 1.53 positions per token.
_LONG, _SHORT_REACH, _LONG_REACH, _LAST_REACH = 32, 2.0, 1.25, 1.1


def class_widths(max_length: int, narrowest: int = 1) -> np.ndarray:
    """The width that a sequence of each length 0 .. max_length is padded to, int64 [max_length + 1].

    narrowest: the least width; of few people, padding costs less than another micro-batch.

    >>> class_widths(12)
    array([ 0,  2,  2,  6,  6,  6,  6, 12, 12, 12, 12, 12, 12])
    >>> class_widths(12, narrowest=5)
    array([ 0,  5,  5,  5,  5,  5, 12, 12, 12, 12, 12, 12, 12])
    """
    widths = [0]
    while widths[-1] < max_length:
        shortest = widths[-1] + 1
        reach = max(narrowest, int(shortest * (_SHORT_REACH if shortest < _LONG else _LONG_REACH)))
        widths.append(max_length if reach * _LAST_REACH >= max_length else reach)
    return np.array(widths)[np.searchsorted(widths, np.arange(max_length + 1))]


def cut(
    users: np.ndarray, widths: np.ndarray, token_budget: int, row_budget: int | None = None, longest: int = 0
) -> list[np.ndarray]:
    """Cut a batch into micro-batches of users of one width, of at most `token_budget` positions, padding included.

    The widest come first. A user wider than the budget has a micro-batch of its own. A user's width is a function of the user's
    own length: so a user who leaves changes the width of nobody else's micro-batch.

    Args:
        users, widths: int64 [batch], the users and the widths that their sequences are padded to.
        row_budget: upper limit for the sum of widths in a micro-batch, where no width counts more than `longest`.

    Returns:
        Arrays of users; none for an empty batch.
    """
    if token_budget < 1:
        raise DataError(f"a token budget of {token_budget} holds nothing; give at least the longest sequence")
    parts = []
    for width in np.unique(widths)[::-1].tolist():
        rows = token_budget // max(1, width)
        if row_budget is not None:
            rows = min(rows, row_budget // max(1, min(width, longest)))
        members = users[widths == width]
        parts += np.split(members, range(max(1, rows), len(members), max(1, rows)))
    return parts


def collate(sequences: Sequences, users: np.ndarray, max_length: int, width: int | None = None) -> MicroBatch:
    """Put the last `max_length` items of each user into tensors, `width` columns wide; by default as wide as the longest.

    Two users with the items [3, 1, 4] and [5] become tokens [[3, 1, 4], [5, 0, 0]] and lengths [3, 1].
    """
    # Imported here, because `prepare` does not need torch, which takes seconds to load.
    import torch

    lengths = np.minimum(sequences.lengths[users], max_length)
    ends = sequences.offsets[users + 1]
    columns = np.arange(lengths.max(initial=0) if width is None else width)
    places = (ends - lengths)[:, None] + columns
    inside = columns < lengths[:, None]
    # After a user's last item the array has the next user's items, which become 0.
    tokens = np.where(inside, sequences.items[np.minimum(places, len(sequences.items) - 1)], 0).astype(np.int64)
    return MicroBatch(users, torch.from_numpy(tokens), torch.from_numpy(lengths))


def micro_batches(
    sequences: Sequences,
    users: np.ndarray,
    *,
    max_length: int,
    token_budget: int,
    row_budget: int | None = None,
    longest: int = 0,
    narrowest: int = 1,
) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches: each of `users` is in exactly one. See `cut` for budgets, `class_widths` for narrowest."""
    if max_length < 1:
        raise DataError(f"a greatest length of {max_length} leaves nothing of a sequence; give 1 or more")
    lengths = np.minimum(sequences.lengths[users], max_length)
    order = np.argsort(-lengths, kind="stable")
    classes = class_widths(max_length, narrowest)
    for part in cut(users[order], classes[lengths[order]], token_budget, row_budget, longest):
        yield collate(sequences, part, max_length, int(classes[min(sequences.lengths[part[0]], max_length)]))
