"""The exact best k items, from no more scores than that needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dpformer.models.recommender import Scores

A = TypeVar("A")
B = TypeVar("B")
Numbers = Sequence[Sequence[int] | np.ndarray]
# Of one batch; 16 MB of scores, since memory that fits a cache is faster than fresh memory.
HISTORIES_AT_ONCE, TOKENS_AT_ONCE, SCORES_AT_ONCE = 1024, 1 << 16, 1 << 22
# Rows with more columns are searched by groups of 16, whose maxima are cheap.
_WIDE, _GROUP = 8192, 16


class Scorer(Protocol):
    """Anything that scores items 1..item_count after histories, as a `Recommender` does; also an `Artifact`."""

    @property
    def item_count(self) -> int: ...

    def candidates(self, best: int, allowed: Tensor) -> Tensor: ...

    def scorer(self, items: Tensor) -> Scores: ...


@dataclass(frozen=True)
class Columns:
    """Scores of some items. items: their numbers `[S]`; place: the column of each item, `[items + 1]`, S if it has none."""

    items: Tensor
    place: Tensor
    scores: Scores

    def leave_out(self, scores: Tensor, rows: Tensor, items: Tensor) -> None:
        """Set the scores `[B, S]` of these pairs of row and item to -inf."""
        columns = self.place[items]
        here = columns < len(self.items)
        scores[rows[here], columns[here]] = -torch.inf


class Best:
    """The best `k` of the items `allowed` (bool `[items + 1]`, or None for all) after histories, for any number of them."""

    def __init__(self, model: Scorer, k: int, allowed: Tensor | None = None) -> None:
        self._model, self._k = model, min(k, model.item_count)
        self._allowed = torch.ones(model.item_count + 1, dtype=torch.bool) if allowed is None else allowed.clone()
        self._allowed[0] = False
        self._columns: dict[int, Columns] = {}

    def columns(self, left_out: int) -> Columns:
        """The columns that hold the best k for every history of which at most so many items are left out."""
        room = 1 << max(left_out - 1, 0).bit_length()  # few different ones
        if room not in self._columns:
            items = self._model.candidates(self._k + room, self._allowed)
            place = torch.full_like(self._allowed, len(items), dtype=torch.int64)
            place[items] = torch.arange(len(items))
            self._columns[room] = Columns(items, place, self._model.scorer(items))
        return self._columns[room]

    def batches(self, lengths: np.ndarray, left_out: np.ndarray) -> Iterator[tuple[np.ndarray, Columns]]:
        """Places of histories, similar ones together, and their columns; bounded in scores and in tokens.

        lengths, left_out: int64 [N], the items of each history, and how many are left out of its list.
        """
        order = np.lexsort((left_out, lengths))[::-1]
        start = 0
        while start < len(order):
            size = max(1, min(HISTORIES_AT_ONCE, TOKENS_AT_ONCE // max(int(lengths[order[start]]), 1)))
            columns = self.columns(int(left_out[order[start : start + size]].max()))
            part = order[start : start + min(size, max(1, SCORES_AT_ONCE // max(len(columns.items), 1)))]
            yield part, columns
            start += len(part)

    def rank(self, histories: Numbers, left_out: Numbers, threads: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """The numbers of the best items, int64 `[N, k]`, 0 where fewer are left, and their scores, float32 `[N, k]`."""
        lengths, gone = (np.fromiter(map(len, lists), np.int64, len(lists)) for lists in (histories, left_out))
        numbers = np.zeros((len(lengths), self._k), dtype=np.int64)
        values = np.full(numbers.shape, -np.inf, dtype=np.float32)

        @torch.inference_mode()
        def fill(batch: tuple[np.ndarray, Columns]) -> None:
            part, columns = batch
            tokens = np.zeros((len(part), max(int(lengths[part].max()), 1)), dtype=np.int64)
            tokens[np.arange(tokens.shape[1]) < lengths[part][:, None]] = _joined(histories, part)
            scores = columns.scores(torch.from_numpy(tokens), torch.from_numpy(lengths[part]))
            rows = np.repeat(np.arange(len(part)), gone[part])
            columns.leave_out(scores, torch.from_numpy(rows), torch.from_numpy(_joined(left_out, part)))
            best, place = top(scores, self._k)
            width = best.shape[1]
            numbers[part, :width] = torch.where(best > -torch.inf, columns.items[place], 0).numpy()
            values[part, :width] = best.numpy()

        for _ in in_threads(fill, self.batches(lengths, gone), threads):
            pass
        return numbers, values


def in_threads(work: Callable[[A], B], tasks: Iterable[A], threads: int) -> Iterator[B]:
    """`map` by several threads. With one torch thread each they do not wait for one another, as threads within one call do."""
    if threads == 1:
        yield from map(work, tasks)
        return
    with ThreadPoolExecutor(threads) as pool:
        yield from pool.map(work, tasks)


def _joined(lists: Numbers, part: np.ndarray) -> np.ndarray:
    """The numbers of some lists, one after the other, int64."""
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(lists[n], dtype=np.int64) for n in part)])


def top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row `[B, S]`, largest first, and their columns; exact. Fewer if S is less than k.

    >>> top(torch.tensor([[3.0, 5.0, 4.0]]), 2)
    (tensor([[5., 4.]]), tensor([[1, 2]]))
    """
    width = scores.shape[1]
    if width <= max(_WIDE, 2 * _GROUP * k):
        best = scores.topk(min(k, width), dim=1)
        return best.values, best.indices
    # Group g has the columns g, g + n, g + 2n, ...: the best k are in the k groups with the largest maxima.
    n = -(-width // _GROUP)
    size = -(-width // n)
    whole = (size - 1) * n
    last = F.pad(scores[:, whole:], (0, n * size - width), value=-torch.inf)
    groups = torch.maximum(scores[:, :whole].unflatten(1, (size - 1, n)).amax(1), last).topk(k, dim=1).indices
    columns = (groups[:, :, None] + n * torch.arange(size)).flatten(1)
    values = scores.gather(1, columns.clamp_max(width - 1)).masked_fill(columns >= width, -torch.inf)
    best = values.topk(k, dim=1)
    return best.values, columns.gather(1, best.indices)
