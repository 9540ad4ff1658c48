"""People to try a run's queries on: the oddest of the log, and invented ones. And small data and recipes made of them."""

from __future__ import annotations

import math
import secrets
from pathlib import Path

import numpy as np
import polars as pl

from dpformer.data import Dataset, Sequences, save
from dpformer.data.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.sequences import starts
from dpformer.fit.recipe import Recipe, Tuning

# People spread over the log, and events of the person who repeats one item.
SPREAD, REPEATS = 12, 3000


def a_few(dataset: Dataset, longest: int) -> Sequences:
    """Some users of the log: spread over it, and the oddest; then the invented ones."""
    people, items = dataset.sequences, len(dataset.catalogue)
    count = np.bincount(people.items, minlength=items + 1)
    rarest = np.argsort(count[1:], kind="stable") + 1
    filled = np.flatnonzero(people.lengths)
    distinct = np.array([len(np.unique(people[int(k)])) for k in filled])
    popular = np.array([float(np.mean(count[people[int(k)]])) for k in filled])
    odd = [people.lengths[filled].argmax(), distinct.argmax(), popular.argmin(), popular.argmax()]
    odd += [people.lengths[filled].argmin(), (people.lengths[filled] - distinct).argmax()]
    spread = np.linspace(0, len(filled) - 1, SPREAD).astype(np.int64)
    places = filled[np.unique(np.concatenate([spread, odd]))]
    return joined([*(people[int(k)] for k in places), *invented(items, longest, rarest)])


def without_data(items: int, longest: int, count: int = SPREAD) -> Sequences:
    """Invented users alone, over a catalogue of so many items."""
    random = np.random.default_rng(1)
    lengths = random.integers(2, max(3, min(longest, 30)) + 3, count)
    own = invented(items, longest, random.permutation(items) + 1)
    return joined([*(random.integers(1, items + 1, length) for length in lengths), *own])


def invented(items: int, longest: int, rarest: np.ndarray) -> list[np.ndarray]:
    """A single item; one item thousands of times; two in turn; as long as can be without repetition; only rare items."""
    random = np.random.default_rng(2)
    return [
        np.array([1]),
        np.full(REPEATS, rarest[-1]),
        np.tile(random.integers(1, items + 1, 2), 5),
        random.permutation(items)[: longest + 3] + 1,
        rarest[: min(8, items)],
    ]


def joined(parts: list[np.ndarray]) -> Sequences:
    """People with these items, under invented names."""
    users = pl.Series("user_id", [f"sample-{k}" for k in range(len(parts))])
    return Sequences(users, np.concatenate(parts).astype(np.int32), starts(np.array([len(part) for part in parts])))


def emptied(people: Sequences, out: np.ndarray | list[int]) -> Sequences:
    """The neighbour: the same people, and those at the places `out` have no events."""
    kept = np.ones(len(people), dtype=bool)
    kept[out] = False
    lengths = np.where(kept, people.lengths, 0)
    return Sequences(people.users, people.items[np.repeat(kept, people.lengths)], starts(lengths))


def absent(people: Sequences, drawn: np.ndarray, out: int) -> tuple[Sequences, np.ndarray]:
    """The neighbour with a declared population: nobody has the place `out`, and others move up. And the same people drawn."""
    users = pl.concat([people.users[:out], people.users[out + 1 :]])
    left = Sequences(users, emptied(people, [out]).items, starts(np.delete(people.lengths, out)))
    kept = drawn[drawn != out]
    return left, kept - (kept > out)


def write_data(folder: Path, sequences: Sequences, catalogue: pl.DataFrame) -> Path:
    """A prepared folder with these sequences."""
    save(Dataset(sequences, catalogue, {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION}), folder)
    return folder


def small(recipe: Recipe, users: int) -> Recipe:
    """The same recipe with a few steps; seeded, by a new seed, so that it can be repeated."""
    return recipe.changed(
        {
            "epsilon": recipe.epsilon if math.isfinite(recipe.epsilon) else 8.0,
            "delta": min(recipe.delta, 0.1 / users),
            "seed": secrets.randbits(62),
            "population": None if recipe.population is None else users,
            "tuning": Tuning(),
            "distil.steps": 2,
            "dpsgd.batch_size": users // 2,
            "dpsgd.epochs": 4.0,
        }
    )
