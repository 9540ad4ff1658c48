"""The item histogram: its query, its bound, and what is read from the answer.

Guarantee: a person's distinct items make a 0/1 vector, which is divided by its L2 norm; so replacing the person's events
by none changes the sum by a norm of at most 1. All that follows is post-processing.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpformer.errors import DataError
from dpformer.privacy.query import SCALE, Answer, Statistic, Vectors

HISTOGRAM = "histogram"


class People(Protocol):
    """All people's items in one array, those of person k at `offsets[k] : offsets[k + 1]`; `data.Sequences` are such."""

    @property
    def items(self) -> np.ndarray:
        """Item numbers, oldest first within each person."""

    @property
    def offsets(self) -> np.ndarray:
        """int64 [people + 1]."""

    def __len__(self) -> int:
        """The number of people."""


class Histogram(Statistic):
    """The sum over people of the unit vectors of their distinct items among the `last` ones; [items + 1], entry 0 is 0."""

    def __init__(self, items: int, last: int = 2000, name: str = HISTOGRAM) -> None:
        self.name, self.shape, self._last = name, (items + 1,), last

    def vectors(self, people: People) -> Vectors:
        """1 / sqrt(n) for each of a person's n distinct items."""
        items = self.shape[0] - 1
        check_items(people, items)
        user, item = distinct_items(people, items, self._last)
        count = np.bincount(user, minlength=len(people))
        yield user, item, SCALE / np.sqrt(count[user])


@dataclass(frozen=True)
class ItemFrequencies:
    """`probability[i]` in (0, 1] for item i; entry 0, padding, is 1. Bounded from below by `floor`."""

    probability: np.ndarray
    floor: float


def frequencies(answer: Answer, users: int) -> ItemFrequencies:
    """Document frequencies p_i, the share of users whose sequence holds item i, from the answer to a `Histogram`.

    If every user had k distinct items, the sum would be h_i = n_i / sqrt(k) and its total H = N sqrt(k), so
    p_i = n_i / N = h_i H / N^2: that is the estimate. With users of different lengths it understates what long sequences
    hold; the order of the items is unaffected. The floor is one standard deviation of the noise, below which a count cannot be
    distinguished from 0, and at least 1 / users.
    """
    noisy = histogram_of(answer)
    total = max(float(noisy.sum()), float(users))  # at least one item a user: keeps pure noise from a negative scale
    scale = total / users**2
    floor = min(max(answer.noise_std * scale, 1 / users), 1.0)
    bounded = np.clip(noisy * scale, floor, 1.0)
    bounded[0] = 1.0
    return ItemFrequencies(bounded, floor)


def histogram_of(answer: Answer) -> np.ndarray:
    """The noisy histogram, float64 [items + 1]; entry 0, which no item has, is set to 0."""
    noisy = answer.values[answer.name].copy()
    noisy[0] = 0.0
    return noisy


def standing_out(answer: Answer) -> int:
    """How many items have more than noise alone would give any: `noise_std sqrt(2 log n)`, about the largest of n draws."""
    noisy = histogram_of(answer)[1:]
    return int((noisy > answer.noise_std * math.sqrt(2 * math.log(len(noisy)))).sum())


def distinct_items(people: People, items: int, last: int) -> tuple[np.ndarray, np.ndarray]:
    """(user, item) pairs, each once, in order, without padding, among each user's last events."""
    user, keep = recent(people.items != 0, people.offsets, last)
    key = np.unique(user[keep] * (items + 1) + people.items[keep])
    return key // (items + 1), key % (items + 1)


def recent(kept: np.ndarray, offsets: np.ndarray, last: int) -> tuple[np.ndarray, np.ndarray]:
    """The user of each event, and the places of each user's `last` events among those that are `kept`."""
    lengths = np.diff(offsets)
    user = np.repeat(np.arange(len(lengths)), lengths)
    place = np.flatnonzero(kept)
    ends = np.cumsum(np.bincount(user[place], minlength=len(lengths)))
    return user, place[np.arange(len(place)) >= ends[user[place]] - last]


def check_items(people: People, items: int) -> None:
    """Refuse sequences whose offsets or item numbers are not what they have to be."""
    offsets = np.asarray(people.offsets)
    if items < 1:
        raise DataError(f"a catalogue of {items} items has nothing to recommend; give at least one")
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != len(people.items) or (np.diff(offsets) < 0).any():
        raise DataError("offsets must rise from 0 to the number of events, one more of them than there are users")
    if len(people.items) and (np.min(people.items) < 0 or np.max(people.items) > items):
        raise DataError(f"an item number is outside 0..{items}; the catalogue must hold every item")
