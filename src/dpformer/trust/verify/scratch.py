"""A small stand-in for a run: a few sequences, the same recipe, a real run folder that is thrown away."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl

from dpformer.data import Dataset, Sequences, save
from dpformer.data.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.sequences import SHORTEST_SPLIT
from dpformer.fit.recipe import Recipe, Tuning

SAMPLES = 20
SEED = 20_231


def a_few(dataset: Dataset, longest: int) -> Sequences:
    """Some of the users of a data set, spread over it, and the awkward ones of `awkward`."""
    places = np.unique(np.linspace(0, len(dataset.sequences) - 1, SAMPLES).astype(np.int64))
    return _join([*(dataset.sequences[int(k)] for k in places), *awkward(len(dataset.catalogue), longest)])


def invented(items: int, longest: int, count: int = SAMPLES) -> Sequences:
    """Invented users over a catalogue of so many items, and the awkward ones of `awkward`."""
    random = np.random.default_rng(SEED)
    lengths = random.integers(2, max(3, min(longest, 30)) + 3, count)
    return _join([*(random.integers(1, items + 1, length) for length in lengths), *awkward(items, longest)])


def awkward(items: int, longest: int) -> list[np.ndarray]:
    """A single item; one item over and over, longer than is used; two items in turn; the whole length without repetition."""
    random = np.random.default_rng(SEED + 1)
    return [
        np.array([1]),
        np.full(longest + 5, random.integers(1, items + 1)),
        np.tile(random.integers(1, items + 1, 2), 5),
        random.permutation(items)[: longest + 3] + 1,
    ]


def _join(parts: list[np.ndarray]) -> Sequences:
    users = pl.Series("user_id", [f"sample-{k}" for k in range(len(parts))])
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(part) for part in parts])])
    return Sequences(users, np.concatenate(parts).astype(np.int32), offsets)


def write_data(folder: Path, sequences: Sequences, catalogue: pl.DataFrame) -> Path:
    """A prepared folder with these sequences."""
    long = int((sequences.lengths >= SHORTEST_SPLIT).sum())
    counts = {"evaluated_users": long, "short_users": len(sequences) - long}
    save(
        Dataset(sequences, catalogue, {"format": MANIFEST_FORMAT, "version": MANIFEST_VERSION, "counts": counts}),
        folder,
    )
    return folder


def small(recipe: Recipe, users: int) -> Recipe:
    """The same recipe with a few steps, seeded so that it can be repeated, and no dropout so that it can be compared."""
    return recipe.changed(
        {
            "epsilon": recipe.epsilon if math.isfinite(recipe.epsilon) else 8.0,
            "delta": min(recipe.delta, 0.1 / users),
            "seed": SEED,
            "population": None,
            "tuning": Tuning(),
            "network.dropout": 0.0,
            "distil.steps": 2,
            "dpsgd.batch_size": users // 2,
            "dpsgd.epochs": 4.0,
        }
    )


class Chosen:
    """Draws the people it is given, whatever the key: to see what a step does with a batch of a given size."""

    def __init__(self, users: int) -> None:
        self.next = np.arange(users)

    def __call__(self, key: bytes, users: int, rate: float) -> np.ndarray:
        """Places of the people drawn."""
        return self.next
