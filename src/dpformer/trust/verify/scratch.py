"""A small stand-in for a run: a few sequences, the same recipe, a real run folder that is thrown away."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import torch

from dpformer.data import Dataset, PoissonSampler, Sequences, save
from dpformer.data.outcome import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.splits import SHORTEST_SPLIT
from dpformer.privacy import NoiseSource
from dpformer.training.recipe import STATISTICS, Recipe

SAMPLES = 20
SEED = 20_231


def a_few(dataset: Dataset, longest: int) -> Sequences:
    """Some of the users of a data set, spread over it, and the awkward ones of `awkward`."""
    places = np.unique(np.linspace(0, len(dataset.sequences) - 1, SAMPLES).astype(np.int64))
    return _join([*(dataset.sequences[int(k)] for k in places), *_awkward(len(dataset.catalogue), longest)])


def invented(items: int, longest: int) -> Sequences:
    """Users that nobody is, over a catalogue of so many items."""
    random = np.random.default_rng(SEED)
    lengths = random.integers(2, max(3, min(longest, 30)) + 3, SAMPLES)
    return _join([*(random.integers(1, items + 1, length) for length in lengths), *_awkward(items, longest)])


def _awkward(items: int, longest: int) -> list[np.ndarray]:
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
    changes: dict[str, Any] = {"noise": "seeded", "seed": SEED, "tuning": "undeclared", "tried": ()}
    changes |= {"delta": min(recipe.delta, 0.1 / users)} | ({} if math.isfinite(recipe.epsilon) else {"epsilon": 8.0})
    if recipe.model not in STATISTICS:
        changes |= {"batch_size": users // 2, "epochs": 4.0, "dropout": 0.0, "weight_decay": 0.0}
        changes |= {"token_budget": 4 * (recipe.max_length + 1)}
    return recipe.model_copy(update=changes)


class Recorded(NoiseSource):
    """A noise source that keeps the sum before and after its noise, of the last step."""

    def __init__(self, inner: NoiseSource) -> None:
        self.inner, self.mode, self.insecure, self.dtype = inner, inner.mode, inner.insecure, inner.dtype
        self.before: dict[str, torch.Tensor] = {}
        self.after: dict[str, torch.Tensor] = {}

    def normal(self, count: int) -> np.ndarray:
        """As the inner source."""
        return self.inner.normal(count)

    def state(self) -> dict[str, Any]:
        """As the inner source."""
        return self.inner.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        """As the inner source."""
        self.inner.restore(state)

    def add_noise_(self, gradients: Iterable[tuple[str, torch.Tensor]], std: float) -> None:
        """As the inner source, watched."""
        named = list(gradients)
        self.before = {name: value.detach().clone() for name, value in named}
        self.inner.add_noise_(named, std)
        self.after = {name: value.detach().clone() for name, value in named}


class Chosen(PoissonSampler):
    """A sampler that draws whom it is told to: to see what the loop does with batches of a given size."""

    def __init__(self, users: int, rate: float) -> None:
        super().__init__(users, rate, SEED)
        self.next = np.arange(users)

    def draw(self) -> np.ndarray:
        """Whom it was told."""
        return self.next
