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


# Largest share of padding in the token budget. Less padding needs more micro-batches, and each has a fixed cost. On Amazon
# Games (2,048 users, budget 8,192): 1/16 gives 15 % padding in 7 micro-batches, 1/4 27 % in 4, no limit 32 % in 4.
_PADDING_SHARE = 1 / 4


def cut(
    users: np.ndarray, lengths: np.ndarray, token_budget: int, row_budget: int | None = None, longest: int = 0
) -> list[np.ndarray]:
    """Cut a batch into micro-batches of at most `token_budget` positions, padding included.

    The longest users come first, so the first user of a micro-batch gives its width. A user longer than the budget has a
    micro-batch of its own; users without items come last, as rows of width 0.

    Args:
        users, lengths: int64 [batch], the users and the lengths of their sequences.
        row_budget: upper limit for the sum of lengths in a micro-batch, where no length counts more than `longest`.

    Returns:
        Arrays of users; none for an empty batch.
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
    """Put the last `max_length` items of each user into tensors, as wide as the longest of them.

    Two users with the items [3, 1, 4] and [5] become tokens [[3, 1, 4], [5, 0, 0]] and lengths [3, 1].
    """
    # Imported here, because `prepare` does not need torch, which takes seconds to load.
    import torch

    lengths = np.minimum(sequences.lengths[users], max_length)
    ends = sequences.offsets[users + 1]
    columns = np.arange(lengths.max(initial=0))
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
) -> Iterator[MicroBatch]:
    """Cut a batch into micro-batches: each of `users` is in exactly one. See `cut` for the budgets."""
    if max_length < 1:
        raise DataError(f"a greatest length of {max_length} leaves nothing of a sequence; give 1 or more")
    lengths = np.minimum(sequences.lengths[users], max_length)
    for part in cut(users, lengths, token_budget, row_budget, longest):
        yield collate(sequences, part, max_length)
