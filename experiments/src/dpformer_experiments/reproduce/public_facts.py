"""Public facts about items (genres, years, words of titles), combined with the answers on transitions. They cost no budget.

Pairs of items fall into classes by public facts: how alike their genres are, how many years lie between them, whether their
titles share a rare word. The lift of a class is estimated from the noisy counts of all of its cells:

    lift_c = (sum over the cells of class c of P C / V + k) / (sum of P^2 / V + k),

the factor by which counts exceed the popularity product P, by weighted least squares, drawn to 1 by k. Its logarithm is
added to the score matrix. The noise of one cell is large; the mean over the thousands of cells of a class is almost exact.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dpformer.statistics.combine import Measured, off_diagonal, popularity_product

ALIKE = (0.01, 0.3, 0.45, 0.7, 0.99)
YEARS = (-15.0, -6.0, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 6.0, 15.0)
# A word in more titles than this says nothing; so do these.
COMMON, IDLE = 8, frozenset({"the", "and", "for", "from", "with"})
DRAWN, LEAST = 50.0, 0.05


@dataclass(frozen=True)
class Facts:
    """What is public of an item: its year (None if unknown), its genres, the words of its title."""

    year: int | None
    genres: frozenset[str]
    words: frozenset[str]


def facts(title: str, genres: Sequence[str]) -> Facts:
    """Facts of a title such as "Toy Story (1995)".

    >>> found = facts("Toy Story (1995)", ["Comedy"])
    >>> found.year, sorted(found.words)
    (1995, ['story', 'toy'])
    """
    year = re.search(r"\((\d{4})\)\s*$", title)
    name = title[: year.start()] if year else title
    words = frozenset(re.findall(r"[a-z0-9]{3,}", name.lower())) - IDLE
    return Facts(int(year[1]) if year else None, frozenset(genres), words)


def pair_classes(facts_of_items: Sequence[Facts]) -> np.ndarray:
    """The class of each ordered pair of items, int64 [P, P]: 6 grades of likeness x 11 spans of years x 2."""
    names = sorted({genre for one in facts_of_items for genre in one.genres})
    has = np.array([[name in one.genres for name in names] for one in facts_of_items], dtype=float).reshape(
        len(facts_of_items), -1
    )
    both, count = has @ has.T, has.sum(1)
    alike = both / np.maximum(count[:, None] + count - both, 1)
    years = np.array([np.nan if one.year is None else one.year for one in facts_of_items])
    apart = np.nan_to_num(years[None] - years[:, None], nan=100.0)
    places: dict[str, list[int]] = {}
    for place, one in enumerate(facts_of_items):
        for word in one.words:
            places.setdefault(word, []).append(place)
    shared = np.zeros(alike.shape, dtype=np.int64)
    for sharing in places.values():
        if len(sharing) <= COMMON:
            shared[np.ix_(sharing, sharing)] = 1
    return (np.digitize(alike, ALIKE) * (len(YEARS) + 1) + np.digitize(apart, YEARS)) * 2 + shared


def class_log_lift(measured: Measured, classes: np.ndarray) -> np.ndarray:
    """log lift of each cell's class, [P, P], from released counts alone; 0 on the diagonal."""
    P = popularity_product(measured.counts, measured.variance, measured.h)
    asked = off_diagonal(len(P))
    cell, p, weight = classes[asked], P[asked], 1 / measured.variance[asked]
    size = int(classes.max(initial=0)) + 1
    counted = np.bincount(cell, weight * p * measured.counts[asked], minlength=size)
    expected = np.bincount(cell, weight * p * p, minlength=size)
    lift = np.maximum((counted + DRAWN) / (expected + DRAWN), LEAST)
    return np.where(asked, np.log(lift)[classes], 0.0)
