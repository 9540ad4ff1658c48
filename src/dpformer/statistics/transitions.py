"""The transition query: what follows what, over the items of a head.

Guarantee: whatever head, cell weights and earlier answers are given, a person's vector has norm 1, or is 0; so replacing the
person's events by none changes the sum by a norm of at most 1.
"""

import numpy as np

from dpformer.errors import PrivacyError
from dpformer.privacy.query import SCALE, Statistic, Vectors
from dpformer.statistics.histogram import People, check_items, recent

# Cell weights further than this below the largest count as 0: their squares could not be summed exactly enough.
_LEAST_WEIGHT = 1e-9
# Pairs of items that are held at one time; bounds the memory, whatever the size of the log.
_PAIRS_AT_ONCE = 1 << 20


class Transitions(Statistic):
    """The sum over people of their unit vectors of transitions, [P, P].

    Items outside of the head are left out of the sequences. Let s be a person's remaining sequence, its `last` events. Then

        v[i, j] = weights[i, j] * sum over k <= lags of k^-lag_power * #{t: s_t = i, s_{t+k} = j},

    and v / |v| is added; nothing, if v = 0. head: [P], item numbers; weights: [P, P], at least 0.
    """

    def __init__(
        self, name: str, items: int, head: np.ndarray, weights: np.ndarray, last: int, lags: int, lag_power: float
    ) -> None:
        if not (np.isfinite(weights).all() and (weights >= 0).all()):
            raise PrivacyError("the weights of the cells must be finite and at least 0; nothing was released")
        if not _LEAST_WEIGHT <= lags**-lag_power <= 1 / _LEAST_WEIGHT:
            raise PrivacyError(
                f"lag_power = {lag_power:g} makes weights that cannot be squared; choose one nearer to 0"
            )
        self.name, self.shape = name, weights.shape
        # Only ratios of weights matter, since every vector is normalised.
        flat = weights.ravel() / max(float(weights.max(initial=0.0)), np.finfo(float).tiny)
        self._weights = np.where(flat < _LEAST_WEIGHT, 0.0, flat)
        self._place = np.full(items + 1, -1)
        self._place[head] = np.arange(len(head))
        self._last, self._lags, self._lag_power = last, lags, lag_power

    def vectors(self, people: People) -> Vectors:
        """The unit vectors of all people, some whole people at a time."""
        check_items(people, len(self._place) - 1)
        places = self._place[people.items]
        user, keep = recent(places >= 0, people.offsets, self._last)
        user, places = user[keep], places[keep]
        start = 0
        while start < len(user):
            # Whole people only: a person cut in two would be normalised twice.
            end = int(
                np.searchsorted(user, user[min(start + _PAIRS_AT_ONCE // self._lags, len(user)) - 1], side="right")
            )
            yield self._unit_vectors(user[start:end], places[start:end])
            start = end

    def _unit_vectors(self, user: np.ndarray, place: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The unit vectors of some whole people. user: ascending; place: 0..P-1."""
        size, cells, first_user = self.shape[0], len(self._weights), int(user[0])
        user = user - first_user
        keys, values = [np.empty(0, dtype=np.int64)], [np.empty(0)]
        for k in range(1, min(self._lags, len(user) - 1) + 1):
            cell = place[:-k] * size + place[k:]
            used = (user[:-k] == user[k:]) & (self._weights[cell] > 0)
            keys.append(user[k:][used] * cells + cell[used])
            values.append(self._weights[cell[used]] * k**-self._lag_power)
        key, value = np.concatenate(keys), np.concatenate(values)
        # A cell that a person fills several times is one coordinate: add it up before taking the norm.
        order = self._order(key)
        key = key[order]
        first = (
            np.flatnonzero(np.concatenate([[True], key[1:] != key[:-1]])) if len(key) else np.empty(0, dtype=np.int64)
        )
        owner, cell = np.divmod(key[first], cells)
        entry = np.add.reduceat(value[order], first) if len(first) else np.empty(0)
        norm = np.sqrt(np.bincount(owner, weights=entry**2))
        return owner + first_user, cell, SCALE * entry / norm[owner]

    def _order(self, key: np.ndarray) -> np.ndarray:
        """The order that sorts the keys. Stable: else the order, and the last bits, of a person's sums would depend on others."""
        return np.argsort(key, kind="stable")
