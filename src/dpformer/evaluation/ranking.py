"""Rank all items for all users: each batch of users takes one call of the model, one comparison and one top-k."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from dpformer.data import HeldOut, Sequences, collate
from dpformer.errors import DPFormerError
from dpformer.models.top import Best, Columns, Scorer, in_threads, top

DEPTH = 20


@dataclass(frozen=True)
class Ranks:
    """ranks: int64 [E], the place of each user's target among all items, 0 for the top, and `depth` for all places from there
    on; lists: int64 [E, depth], what stands at the top, best first, 0 where there are no more items."""

    ranks: np.ndarray
    lists: np.ndarray


def rank(
    model: Scorer,
    held: HeldOut,
    item_count: int,
    depth: int = DEPTH,
    on_progress: Callable[[int], None] = lambda users: None,
    threads: int = 1,
) -> dict[str, Ranks]:
    """Ranks "masked" (items of the history taken out) and "unmasked", for every evaluated user.

    Ties count against the model: the rank is the number of other items that do not score below the target, and a
    score that is not a number ties with everything. Masked, a target that stands in the history is taken out with it
    and is missed. Only items that can be among the first `depth` are scored. on_progress: gets the number of users done.
    """
    if model.item_count != item_count:
        raise DPFormerError(
            f"the model scores {model.item_count:,} items, not {item_count:,}; fit it on the catalogue that it is evaluated on"
        )
    users, best = len(held.evaluated), Best(model, depth + 1)
    ranks = {kind: np.full(users, depth, dtype=np.int64) for kind in ("unmasked", "masked")}
    lists = {kind: np.zeros((users, depth), dtype=np.int64) for kind in ranks}
    lengths = held.histories.lengths[held.evaluated]

    @torch.inference_mode()
    def fill(batch: tuple[np.ndarray, Columns]) -> int:
        part, columns = batch
        who = held.evaluated[part]
        padded = collate(held.histories, who, max(int(lengths[part].max()), 1))
        scores = columns.scores(padded.tokens, padded.lengths).to(torch.float32)
        place = columns.place[torch.from_numpy(held.targets[part].astype(np.int64))]
        here = (place < len(columns.items)).numpy()
        own = place.clamp_max(len(columns.items) - 1)[:, None]
        for kind in ranks:
            if kind == "masked":
                columns.leave_out(scores, *_seen(held.histories, who))
            target = scores.gather(1, own)
            # numpy counts ten times as fast as torch sums booleans. A target that is taken out, or no candidate, is missed.
            others = len(columns.items) - 1 - np.count_nonzero((scores < target).numpy(), axis=1)
            ranked = here & (target[:, 0] != -torch.inf).numpy()
            ranks[kind][part] = np.where(ranked, np.minimum(others, depth), depth)
            values, best_places = top(scores, depth)
            shown = torch.where(values > -torch.inf, columns.items[best_places], 0)
            lists[kind][part, : shown.shape[1]] = shown.numpy()
        return len(part)

    done = 0
    for count in in_threads(fill, best.batches(lengths, lengths), threads):
        done += count
        on_progress(done)
    return {kind: Ranks(ranks[kind], lists[kind]) for kind in ranks}


def _seen(histories: Sequences, users: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and item of every event of these users."""
    lengths = histories.lengths[users]
    first = np.cumsum(lengths) - lengths
    place = np.arange(lengths.sum()) + np.repeat(histories.offsets[users] - first, lengths)
    row = np.repeat(np.arange(len(users)), lengths)
    return torch.from_numpy(row), torch.from_numpy(histories.items[place].astype(np.int64))
