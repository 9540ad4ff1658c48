"""The sequences of the training benchmark: the paper's two data sets, or generated ones of the same shape.

If a set is present (`$DPFORMER_ML_1M`, `$DPFORMER_AMAZON_GAMES`, or the cache that `dpformer prepare` downloads into), its
users are used. Else lengths and items are drawn from distributions fitted to the two sets once:

    length of a user      log-normal, with the mean and standard deviation of the logarithm of the set's lengths,
                          cut at the 1 % quantile and the longest of them
    item at rank r        probability proportional to (r + shift)^-power; shift and power by least cross-entropy to the
                          set's item counts on a grid (0.2 % above the entropy of the counts themselves)
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.data import Sequences
from dpformer.data.named import AMAZON_GAMES, ML_1M, NamedSet, cache_folder, prepare_set


@dataclass(frozen=True)
class Shape:
    """A data set in numbers: the length that is used, and the distributions of lengths and items."""

    L: int
    users: int
    items: int
    log_mean: float
    log_std: float
    shortest: int
    longest: int
    shift: float
    power: float


# By numpy from the prepared sets: mean and standard deviation of log(lengths), the 1 % quantile and the maximum of lengths.
SHAPES = {
    "ml-1m": Shape(200, 6_040, 3_416, 4.6047, 0.9906, 20, 2_277, 3_000, 6.0),
    "games": Shape(50, 31_013, 23_715, 2.0117, 0.5411, 3, 860, 300, 1.1),
}
SETS: dict[str, tuple[NamedSet, str]] = {
    "ml-1m": (ML_1M, "DPFORMER_ML_1M"),
    "games": (AMAZON_GAMES, "DPFORMER_AMAZON_GAMES"),
}


@dataclass(frozen=True)
class Workload:
    """Sequences, the catalogue's size and the greatest length used. `source`: where the sequences come from."""

    name: str
    L: int
    items: int
    sequences: Sequences
    source: str

    def tokens(self, users: np.ndarray | None = None) -> int:
        """The number of items predicted for some users, by place (all users by default): all but the first, at most L each."""
        lengths = self.sequences.lengths if users is None else self.sequences.lengths[users]
        return int(np.clip(lengths - 1, 0, self.L).sum())

    def save(self, path: Path) -> None:
        """Write it for `load`, in another process."""
        about = np.array([self.L, self.items])
        s = self.sequences
        np.savez(path, items=s.items, offsets=s.offsets, about=about, names=np.array([self.name, self.source]))

    def describe(self) -> dict[str, Any]:
        """Sizes, ready for JSON."""
        lengths = np.clip(self.sequences.lengths - 1, 0, self.L)
        return {
            "source": self.source,
            "L": self.L,
            "items": self.items,
            "users": len(self.sequences),
            "tokens": self.tokens(),
            "median_tokens": float(np.median(lengths)),
        }


def load(path: str) -> Workload:
    """Read what `Workload.save` wrote."""
    with np.load(path) as file:  # allow_pickle is off by default and must stay off
        L, items = map(int, file["about"])
        name, source = map(str, file["names"])
        return Workload(name, L, items, _sequences(file["items"], file["offsets"]), source)


def find(name: str) -> Workload:
    """A workload by name: the real set if it is present, else a generated one of its shape."""
    named, variable = SETS[name]
    given = os.environ.get(variable)
    path = Path(given) if given else cache_folder() / named.name / named.file
    if not path.exists():
        return generate(name, SHAPES[name])
    dataset = prepare_set(named, path, on_stage=lambda stage: None)
    return Workload(name, SHAPES[name].L, len(dataset.catalogue), dataset.sequences, f"{named.name}, the real data")


def generate(name: str, shape: Shape, seed: int = 0) -> Workload:
    """Sequences drawn as the module's docstring says."""
    random = np.random.default_rng(seed)
    drawn = np.exp(random.normal(shape.log_mean, shape.log_std, shape.users))
    lengths = np.clip(np.round(drawn), shape.shortest, shape.longest).astype(np.int64)
    weights = (np.arange(1, shape.items + 1) + shape.shift) ** -shape.power
    edges = np.cumsum(weights) / weights.sum()
    items = np.minimum(np.searchsorted(edges, random.random(lengths.sum())), shape.items - 1) + 1
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(lengths)])
    return Workload(name, shape.L, shape.items, _sequences(items.astype(np.int32), offsets), "generated in its shape")


def uniform(users: int, length: int, items: int, L: int, seed: int = 0) -> Workload:
    """All users have `length` items to predict; items as in ML-1M."""
    s = SHAPES["ml-1m"]
    fixed = Shape(L, users, items, float(np.log(length + 1)), 0.0, length + 1, length + 1, s.shift, s.power)
    return generate(f"length {length}", fixed, seed)


def enlarge(workload: Workload, users: int, seed: int = 0) -> Workload:
    """Repeat users until there are at least this many: for batches larger than the data set."""
    s, n = workload.sequences, len(workload.sequences)
    if n >= users:
        return workload
    taken = np.concatenate([np.arange(n), np.random.default_rng(seed).integers(0, n, users - n)])
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(s.lengths[taken])])
    items = np.concatenate([s[int(user)] for user in taken])
    source = f"{workload.source}, users repeated"
    return Workload(workload.name, workload.L, workload.items, _sequences(items, offsets), source)


def _sequences(items: np.ndarray, offsets: np.ndarray) -> Sequences:
    return Sequences(pl.Series(np.arange(len(offsets) - 1)), items, offsets)
