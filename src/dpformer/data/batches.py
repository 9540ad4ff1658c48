"""Cut the people of one group of a batch into micro-batches: a matter of memory and speed only. One person is one record."""

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


# Padding that one micro-batch may hold, as a share of the token budget. Smaller means more and smaller micro-batches, each of
# which costs some time however small it is: on Amazon Games (2,048 users, budget 8,192) 1/16 gives 15 % padding in 7 of them, 1/4
# 27 % in 4, no limit 32 % in 4. The output layer, where most of the time goes, has no padding in any case.
_PADDING_SHARE = 1 / 4


def cut(
    users: np.ndarray, lengths: np.ndarray, token_budget: int, row_budget: int | None = None, longest: int = 0
) -> list[np.ndarray]:
    """Cut a batch into micro-batches of at most `token_budget` positions, padding included.

    row_budget: their lengths together at the most, without padding, where none counts for more than `longest`.

    users: int64 [batch]; lengths: int64 [batch], theirs. Longest first: the first user of a micro-batch tells its
    width, and it ends where the positions or the padding would become too many. A user longer than the budget is alone;
    users without items come last, as rows of width 0.
    Returns arrays of users; an empty batch gives an empty list.
    """
    if token_budget < 1:
        raise DataError(f"a token budget of {token_budget} holds nothing; give at least the longest sequence")
    order = np.argsort(-lengths, kind="stable")
    users, lengths = users[order], lengths[order]
    parts, start = [], 0
    while start < len(users):
        width = int(lengths[start])
        rows = max(1, token_budget // max(1, width))
        if row_budget is not None:
            kept = np.cumsum(np.minimum(lengths[start : start + rows], longest))
            rows = max(1, int(np.searchsorted(kept, row_budget, side="right")))
        padding = np.cumsum(width - lengths[start : start + rows])
        rows = int(np.searchsorted(padding, token_budget * _PADDING_SHARE, side="right"))
        parts.append(users[start : start + rows])
        start += rows
    return parts


def collate(sequences: Sequences, users: np.ndarray, max_length: int) -> MicroBatch:
    """The last `max_length` items of each user, as tensors that are as wide as the longest of them.

    Two users with the items [3, 1, 4] and [5] become tokens [[3, 1, 4], [5, 0, 0]] and lengths [3, 1].
    """
    # Imported here: preparing data needs no torch, and it takes seconds to load.
    import torch

    lengths = np.minimum(sequences.lengths[users], max_length)
    ends = sequences.offsets[users + 1]
    columns = np.arange(lengths.max(initial=0))
    places = (ends - lengths)[:, None] + columns
    inside = columns < lengths[:, None]
    # Beyond a user's end stands somebody else's item: masked out at once.
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
) -> Iterator[MicroBatch]:
    """A batch in micro-batches: every user of `users` in exactly one; none for an empty batch. For the others see `cut`."""
    if max_length < 1:
        raise DataError(f"a greatest length of {max_length} leaves nothing of a sequence; give 1 or more")
    lengths = np.minimum(sequences.lengths[users], max_length)
    for part in cut(users, lengths, token_budget, row_budget, longest):
        yield collate(sequences, part, max_length)
