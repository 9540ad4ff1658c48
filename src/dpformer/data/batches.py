"""Batches as the privacy analysis has them: every user is in with the same probability, independently.

One user is one record, whatever the length. A batch has a random size and may be empty; an empty one is a step with
noise alone, so it is yielded like any other. Cutting a batch into micro-batches is a matter of memory and speed only:
each sampled user is in exactly one of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.data.sequences import Sequences
from dpformer.errors import DataError

if TYPE_CHECKING:
    import torch


class PoissonSampler:
    """Draws batches of users: user n is in with probability `rate`, independently of all others and of other draws.

    The rate is public and fixed in advance. Without a seed the draws start from the operating system's entropy, which
    a real run needs: amplification by sampling holds only while nobody knows who was drawn. A seed is for experiments.
    """

    def __init__(self, users: int, rate: float, seed: int | None = None) -> None:
        if users < 1:
            raise DataError(f"a sampler needs at least one user, not {users}")
        if not 0 < rate <= 1:
            raise DataError(f"the sampling rate is a probability above 0, not {rate}")
        self.users = users
        self.rate = rate
        self.seeded = seed is not None
        self._bits = np.random.PCG64(np.random.SeedSequence(seed))
        self._random = np.random.Generator(self._bits)

    def draw(self) -> np.ndarray:
        """The places of the users in the next batch, int64 [batch], ascending; may be empty.

        A uniform multiple of 2^-53 in [0, 1) is below the rate with probability ceil(rate 2^53) / 2^53.
        """
        return np.flatnonzero(self._random.random(self.users) < self.rate)

    def state(self) -> dict[str, Any]:
        """Where the draws stand, ready for JSON. It tells who is drawn next: keep it as private as the data."""
        return {"users": self.users, "rate": self.rate, "seeded": self.seeded, "bits": self._bits.state}

    @classmethod
    def restored(cls, state: dict[str, Any]) -> "PoissonSampler":
        """A sampler that goes on where `state` was taken."""
        sampler = cls(state["users"], state["rate"])
        sampler.seeded = state["seeded"]
        sampler._bits.state = state["bits"]
        return sampler


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


def deal(users: np.ndarray, lengths: np.ndarray, parts: int) -> list[np.ndarray]:
    """Deal a batch to `parts` workers so that each has about as many tokens, and about as many users of any length.

    users: int64 [batch]; lengths: int64 [batch], theirs. Longest first, forth and back: 0, 1, 2, 2, 1, 0, 0, ... Every user is in
    exactly one part. In tokens two parts differ by no more than the longest user has. Parts may be empty.

    >>> [part.tolist() for part in deal(np.arange(5), np.array([9, 8, 7, 6, 5]), 2)]
    [[0, 3, 4], [1, 2]]
    """
    order = np.argsort(-lengths, kind="stable")
    turn = np.arange(len(users)) % (2 * parts)
    part = np.minimum(turn, 2 * parts - 1 - turn)
    return [users[order[part == k]] for k in range(parts)]


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
