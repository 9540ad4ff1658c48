"""What leaves the log: sums over users in which everybody counts for a vector of norm below 1, plus Gaussian noise.

Guarantee. The unit is one user; neighbours differ by adding or removing one. Whatever head, cell weights or earlier
answers are given, a user's contribution to either sum has L2 norm at most 1 - 1e-6, so the sum changes by less than 1
between neighbours. A release of share s gets noise of standard deviation sigma / sqrt(s), which spends s / sigma^2 of the
Gaussian budget; `Releaser` refuses to spend more than 1 / sigma^2. Gaussian mechanisms compose exactly, also when a
query depends on earlier answers: releases whose shares sum to 1 are together one Gaussian mechanism of noise
multiplier sigma. Nothing is sampled, so nothing is assumed about sampling.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dpformer.errors import DataError, PrivacyError

Gaussian = Callable[[tuple[int, ...], float], Any]
"""`gaussian(shape, std)`: fresh independent N(0, std^2) values, an array or a CPU tensor."""

SCALE = 1 - 1e-6
"""Contributions are scaled by this, so that rounding cannot lift a norm above 1."""

# Cell weights further than this below the largest count as 0: their squares could not be summed exactly enough.
_LEAST_WEIGHT = 1e-9
# Pairs of items that are held at one time; bounds the memory, whatever the size of the log.
_PAIRS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Release:
    """What was released, and the share of the Gaussian budget that it took."""

    name: str
    share: float


class Releaser:
    """The only part that sees people. It answers with noise, and writes down what it released.

    items: integers [events], ids 1..item_count, 0 is skipped; offsets: [users + 1], as in `dpformer.data.Sequences`.
    noise_multiplier: sigma of all releases together. gaussian: where the noise comes from.
    """

    def __init__(
        self, items: np.ndarray, offsets: np.ndarray, item_count: int, noise_multiplier: float, gaussian: Gaussian
    ) -> None:
        if not (math.isfinite(noise_multiplier) and noise_multiplier > 0):
            raise PrivacyError(f"noise multiplier {noise_multiplier:g} is not above 0; a private release needs noise")
        check_log(items, offsets, item_count)
        self.item_count = item_count
        self.releases: tuple[Release, ...] = ()
        self._items, self._offsets = np.asarray(items), np.asarray(offsets)
        self._noise_multiplier, self._gaussian = noise_multiplier, gaussian

    def std(self, share: float) -> float:
        """The noise of a release with this share: sigma / sqrt(share)."""
        return self._noise_multiplier / math.sqrt(share)

    def histogram(self, share: float, last: int) -> np.ndarray:
        """`user_histogram` with noise, float64 [item_count + 1]; entry 0 is 0."""
        noisy = self._release(
            "item histogram", share, user_histogram(self._items, self._offsets, self.item_count, last)
        )
        noisy[0] = 0.0
        return noisy

    def transitions(self, name: str, share: float, weights: np.ndarray, head: np.ndarray, **lags: Any) -> np.ndarray:
        """`user_transitions` with noise, float64 [P, P]."""
        place = np.full(self.item_count + 1, -1)
        place[head] = np.arange(len(head))
        return self._release(name, share, user_transitions(place[self._items], self._offsets, weights, **lags))

    def _release(self, name: str, share: float, exact: np.ndarray) -> np.ndarray:
        spent = sum(release.share for release in self.releases)
        if not (share > 0 and spent + share <= 1 + 1e-9):
            raise PrivacyError(
                f"share {share:g} of {name!r} beside {spent:g} already released: shares are above 0 and sum to 1 at most"
            )
        # Written down first: what fails half-way counts as released.
        self.releases = (*self.releases, Release(name, share))
        return exact + np.asarray(self._gaussian(exact.shape, self.std(share)), dtype=np.float64)


def check_log(items: np.ndarray, offsets: np.ndarray, item_count: int) -> None:
    """Refuse flat sequences whose offsets or item ids are not what they have to be."""
    if item_count < 1:
        raise DataError(f"a catalogue of {item_count} items has nothing to recommend; give at least one")
    offsets = np.asarray(offsets)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(items) or (np.diff(offsets) < 0).any():
        raise DataError("offsets must rise from 0 to the number of events, one more of them than there are users")
    if len(items) and (np.min(items) < 0 or np.max(items) > item_count):
        raise DataError(f"an item id is outside 0..{item_count}; the catalogue must hold every item")


def user_histogram(items: np.ndarray, offsets: np.ndarray, item_count: int, last: int) -> np.ndarray:
    """The sum over users of their unit vectors of distinct items, float64 [item_count + 1]. Exact: not to be released.

    A user with distinct items D among the `last` events adds (1 - 1e-6) / sqrt(|D|) to each item of D.
    """
    user, keep = _recent(items != 0, offsets, last)
    key = np.unique(user[keep] * (item_count + 1) + items[keep])
    user, item = np.divmod(key, item_count + 1)
    size = np.bincount(user, minlength=len(offsets) - 1)
    return np.bincount(item, weights=SCALE / np.sqrt(size[user]), minlength=item_count + 1)


def user_transitions(
    places: np.ndarray, offsets: np.ndarray, weights: np.ndarray, *, last: int, lags: int, lag_power: float
) -> np.ndarray:
    """The sum over users of their unit vectors of transitions, float64 [P, P]. Exact: not to be released.

    places: [events], the place of each event's item in the head, 0..P-1, or -1 for items that are left out of the
    sequences altogether. Let s be a user's remaining sequence, its `last` events. The user's vector is

        v[i, j] = weights[i, j] * sum over k <= lags of k^-lag_power * #{t: s_t = i, s_{t+k} = j},

    and (1 - 1e-6) v / |v| is added; nothing, if v = 0. weights: [P, P], at least 0, any other choice is as private.
    """
    if not (np.isfinite(weights).all() and (weights >= 0).all()):
        raise PrivacyError("the weights of the cells must be finite and at least 0; nothing was released")
    if not _LEAST_WEIGHT <= lags**-lag_power <= 1 / _LEAST_WEIGHT:
        raise PrivacyError(f"lag_power = {lag_power:g} makes weights that cannot be squared; choose one nearer to 0")
    # Only ratios of weights matter, since every vector is normalised.
    weights = weights.ravel() / max(float(weights.max(initial=0.0)), np.finfo(float).tiny)
    weights = np.where(weights < _LEAST_WEIGHT, 0.0, weights)
    user, keep = _recent(places >= 0, offsets, last)
    user, places = user[keep], places[keep]
    total, size = np.zeros(len(weights)), math.isqrt(len(weights))
    start = 0
    while start < len(user):
        # Whole users only: a user cut in two would be normalised twice.
        end = int(np.searchsorted(user, user[min(start + _PAIRS_AT_ONCE // lags, len(user)) - 1], side="right"))
        _add_transitions(total, user[start:end] - user[start], places[start:end], size, weights, lags, lag_power)
        start = end
    return total.reshape(size, size)


def _add_transitions(
    total: np.ndarray,
    user: np.ndarray,
    place: np.ndarray,
    size: int,
    weights: np.ndarray,
    lags: int,
    lag_power: float,
) -> None:
    """Add the unit vectors of some whole users to `total`. user: ascending from 0; place: 0..size-1."""
    keys, values = [], []
    for k in range(1, min(lags, len(user) - 1) + 1):
        cell = place[:-k] * size + place[k:]
        used = (user[:-k] == user[k:]) & (weights[cell] > 0)
        keys.append(user[k:][used] * len(weights) + cell[used])
        values.append(weights[cell[used]] * k**-lag_power)
    if not keys:
        return
    key, value = np.concatenate(keys), np.concatenate(values)
    if len(key) == 0:
        return
    # A cell that a user fills several times is one coordinate of the user's vector: add it up before taking the norm.
    order = np.argsort(key)
    key = key[order]
    first = np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]]))
    owner, cell = np.divmod(key[first], len(weights))
    entry = np.add.reduceat(value[order], first)
    norm = np.sqrt(np.bincount(owner, weights=entry**2))
    total += np.bincount(cell, weights=SCALE * entry / norm[owner], minlength=len(total))


def _recent(kept: np.ndarray, offsets: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The user of each event, and the places of each user's `last` events among those that are `kept`."""
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    place = np.flatnonzero(kept)
    ends = np.cumsum(np.bincount(user[place], minlength=len(lengths)))
    return user, place[np.arange(len(place)) >= ends[user[place]] - last]
