"""People in the likeness of a data set, as many as wanted, and the oracle: the ranking by the generator's own probabilities.

With n items in the history s, w_k = 1 / k over its last 8 items at the most (normalised), p the popularity of items, and P made
of the data set's own transitions, the first item is drawn from p and each other one from

    q(j | s) = sum_k w_k [(1 - b) P(s_{n+1-k}, j) + b p_j],         restricted to items that the history does not have,
    P_ij = C_ij^a / sum_j C_ij^a,         C_ij = sum_{k <= 5} k^-0.8 #{t: s_t = i, s_{t+k} = j},  i != j.

For an item that nothing follows, P is p. The counts are exact, so the simulator is not private: it is for measurements alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import torch
from torch import Tensor

from dpformer.data import Sequences
from dpformer.models.recommender import Scores

LAGS, LAG_POWER, WINDOW = 5, 0.8, 8
# People who are drawn at one time; bounds the memory.
BLOCK = 50_000


@dataclass(frozen=True)
class Kind:
    """source: the data set. power, popular: a and b above.

    events: of each person; None: lengths of the data set, up to `longest`.
    """

    source: str
    power: float
    popular: float
    events: int | None = None
    longest: int = 40


KINDS = {
    "ml-1m": Kind("ml-1m", power=1.3, popular=0.07, events=40),
    "amazon-games": Kind("amazon-games", power=1.5, popular=0.3),
}


class Generator:
    """The law of the next item. sequences: of the data set; items: in its catalogue."""

    def __init__(self, sequences: Sequences, items: int, kind: Kind) -> None:
        self.items, self.kind = items, kind
        self._lengths = np.minimum(sequences.lengths, kind.longest) if kind.events is None else np.array([kind.events])
        popularity = np.bincount(sequences.items, minlength=items + 1).astype(float)
        self.popularity = popularity / popularity.sum()
        self._popular_cdf = _cdf(self.popularity)
        key, count = _pairs(sequences, items)
        source, self._following = np.divmod(key, items + 1)
        weight = count**kind.power
        totals = np.bincount(source, weight, minlength=items + 1)
        self._followed = totals > 0
        self._probability = weight / totals[source]
        self._starts = np.searchsorted(source, np.arange(items + 2))
        # One ascending array for all rows: row i, of those that have entries, goes from its place to the next whole number.
        self._row = np.cumsum(self._followed) - 1
        self._cdf = _cdf(self._probability, self._row[source])

    def draw(self, people: int, seed: int) -> Sequences:
        """So many people, numbered from 1; the same for the same seed."""
        random = np.random.default_rng(seed)
        lengths = random.choice(self._lengths, people)
        items = [self._block(lengths[first : first + BLOCK], random) for first in range(0, people, BLOCK)]
        offsets = np.concatenate([[0], np.cumsum(lengths)])
        return Sequences(pl.Series("user_id", np.arange(1, people + 1)), np.concatenate(items), offsets)

    def _block(self, lengths: np.ndarray, random: np.random.Generator) -> np.ndarray:
        s = np.zeros((len(lengths), lengths.max()), dtype=np.int32)
        for t in range(s.shape[1]):
            left = np.flatnonzero(lengths > t)
            while len(left):  # rejection: the law restricted to items that are not in the history
                drawn = self._next(s[left, max(t - WINDOW, 0) : t], random)
                new = ~(s[left, :t] == drawn[:, None]).any(1)
                s[left[new], t] = drawn[new]
                left = left[~new]
        return s[np.arange(s.shape[1]) < lengths[:, None]]

    def _next(self, recent: np.ndarray, random: np.random.Generator) -> np.ndarray:
        """Draw from q, seen items included. recent: [B, up to 8], the latest item last."""
        u = random.random(len(recent))
        drawn = np.searchsorted(self._popular_cdf, u, side="right")
        if recent.shape[1]:
            weights = _weights(recent.shape[1])
            k = random.choice(len(weights), len(recent), p=weights) + 1
            source = recent[np.arange(len(recent)), -k]
            by_item = (random.random(len(recent)) >= self.kind.popular) & self._followed[source]
            place = np.searchsorted(self._cdf, self._row[source[by_item]] + u[by_item], side="right")
            drawn[by_item] = self._following[np.minimum(place, self._starts[source[by_item] + 1] - 1)]
        return drawn

    def probabilities(self, recent: np.ndarray) -> np.ndarray:
        """q [B, items + 1], seen items included. recent: [B, L], the latest item last; 0 before the first."""
        q = np.zeros((len(recent), self.items + 1))
        recent = recent[:, -WINDOW:]
        weights = np.where(recent > 0, _weights(WINDOW)[: recent.shape[1]][::-1], 0.0)
        weights /= np.maximum(weights.sum(1, keepdims=True), np.finfo(float).tiny)
        for source, weight in zip(recent.T, weights.T, strict=True):
            first, count = self._starts[source], self._starts[source + 1] - self._starts[source]
            row = np.repeat(np.arange(len(recent)), count)
            place = np.arange(len(row)) + np.repeat(first - np.cumsum(count) + count, count)
            # Each item follows another once, so no pair of row and item is there twice.
            q[row, self._following[place]] += (1 - self.kind.popular) * weight[row] * self._probability[place]
        return q + (1 - q.sum(1, keepdims=True)) * self.popularity


class Oracle:
    """A model that scores by q; see `models.top.Scorer`."""

    def __init__(self, generator: Generator) -> None:
        self._generator, self.item_count = generator, generator.items

    def candidates(self, best: int, allowed: Tensor) -> Tensor:
        """Every item may be among the best."""
        return allowed.nonzero()[:, 0]

    def scorer(self, items: Tensor) -> Scores:
        """q of these items, after histories that are padded at their end."""

        def scores(history: Tensor, lengths: Tensor) -> Tensor:
            places = lengths[:, None] - torch.arange(WINDOW, 0, -1)
            recent = torch.where(places >= 0, history.gather(1, places.clamp_min(0)), 0)
            return torch.from_numpy(self._generator.probabilities(recent.numpy())[:, items.numpy()])

        return scores


def _weights(count: int) -> np.ndarray:
    """w_k of the last `count` items, latest first."""
    weights: np.ndarray = 1 / np.arange(1, count + 1)
    return weights / weights.sum()


def _pairs(sequences: Sequences, items: int) -> tuple[np.ndarray, np.ndarray]:
    """Source times (items + 1) plus following item, ascending, each once; and C."""
    user, s = np.repeat(np.arange(len(sequences)), sequences.lengths), sequences.items.astype(np.int64)
    keys, weights = [], []
    for k in range(1, LAGS + 1):
        used = (user[:-k] == user[k:]) & (s[:-k] != s[k:])
        keys.append((s[:-k] * (items + 1) + s[k:])[used])
        weights.append(np.full(len(keys[-1]), k**-LAG_POWER))
    key, place = np.unique(np.concatenate(keys), return_inverse=True)
    return key, np.bincount(place, np.concatenate(weights))


def _cdf(probability: np.ndarray, row: np.ndarray | None = None) -> np.ndarray:
    """Upper ends of the parts that entries take of an interval: of [r, r + 1) for entries of row r. Rows ascend."""
    row = np.zeros(len(probability), dtype=np.int64) if row is None else row
    ends = np.cumsum(probability)
    last = np.flatnonzero(np.append(row[1:] != row[:-1], True))
    ends -= np.concatenate([[0.0], ends[last[:-1]]])[row]
    result: np.ndarray = row + ends / ends[last][row]  # the end of a row is a whole number exactly
    return result
