"""Rank all items for all users: one call of the model, one comparison and one top-k for each batch of users."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol as TypingProtocol

import numpy as np
import torch
from torch import Tensor

from dpformer.data import HeldOut, Sequences, collate
from dpformer.errors import DPFormerError
from dpformer.evaluation.metrics import CUTOFFS

# Scores held at one time; 128 MB in float32.
_SCORES_AT_ONCE = 1 << 25
_TOKENS_AT_ONCE = 1 << 18


class Scorer(TypingProtocol):
    """Anything that scores all items for a batch of histories."""

    def scores(self, history: Tensor, lengths: Tensor) -> Tensor:
        """[B, items + 1], a tensor that the caller may overwrite; history: int64 [B, L], 0 after the end; lengths: int64 [B]."""


@dataclass(frozen=True)
class Ranks:
    """ranks: int64 [E], the place of each user's target among all items, 0 for the top; lists: int64 [E, 20], what stands
    at the top, best first, 0 where there are no more items."""

    ranks: np.ndarray
    lists: np.ndarray


def rank(model: Scorer, held: HeldOut, item_count: int) -> dict[str, Ranks]:
    """Ranks "masked" (items of the history taken out) and "unmasked", for every evaluated user.

    Ties count against the model: the rank is the number of other items that do not score below the target, and a
    score that is not a number ties with everything. Masked, a target that stands in the history is taken out with it
    and is missed.
    """
    users = len(held.evaluated)
    ranks = {kind: np.empty(users, dtype=np.int64) for kind in ("unmasked", "masked")}
    lists = {kind: np.zeros((users, max(CUTOFFS)), dtype=np.int64) for kind in ranks}
    for part in _batches(held, item_count):
        who = held.evaluated[part]
        batch = collate(held.histories, who, max(int(held.histories.lengths.max(initial=1)), 1))
        with torch.no_grad():
            scores = model.scores(batch.tokens, batch.lengths)
        if scores.shape != (len(part), item_count + 1):
            raise DPFormerError(
                f"the model scored {tuple(scores.shape)}, not one row a user and one column an item and the padding: "
                f"{(len(part), item_count + 1)}; fit it on the catalogue that it is evaluated on"
            )
        scores = scores.to(torch.float32)
        scores[:, 0] = -torch.inf
        target = torch.from_numpy(held.targets[part].astype(np.int64))[:, None]
        for kind in ranks:
            if kind == "masked":
                row, item = _seen(held.histories, who)
                scores[row, item] = -torch.inf
            # numpy counts ten times as fast as torch sums booleans.
            below = np.count_nonzero((scores < scores.gather(1, target)).numpy(), axis=1)
            ranks[kind][part] = item_count - below
            top = scores.topk(min(max(CUTOFFS), item_count + 1), dim=1)
            lists[kind][part, : top.indices.shape[1]] = torch.where(top.values > -torch.inf, top.indices, 0).numpy()
    return {kind: Ranks(ranks[kind], lists[kind]) for kind in ranks}


def _batches(held: HeldOut, item_count: int) -> Iterator[np.ndarray]:
    """Places in `evaluated`, users of similar length in one batch, bounded in scores and in tokens."""
    lengths = held.histories.lengths[held.evaluated]
    order = np.argsort(-lengths, kind="stable")
    start = 0
    while start < len(order):
        width = max(int(lengths[order[start]]), 1)
        size = max(1, min(_SCORES_AT_ONCE // (item_count + 1), _TOKENS_AT_ONCE // width))
        yield order[start : start + size]
        start += size


def _seen(histories: Sequences, users: np.ndarray) -> tuple[Tensor, Tensor]:
    """Row and item of every event of these users."""
    lengths = histories.lengths[users]
    first = np.cumsum(lengths) - lengths
    place = np.arange(lengths.sum()) + np.repeat(histories.offsets[users] - first, lengths)
    row = np.repeat(np.arange(len(users)), lengths)
    return torch.from_numpy(row), torch.from_numpy(histories.items[place].astype(np.int64))
