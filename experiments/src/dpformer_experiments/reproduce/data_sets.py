"""The paper's figure of its data: sizes, lengths and long tails; and how results locate the data sets."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dpformer.data import Dataset, load, prepare_named, save
from dpformer.data.named import NAMED
from dpformer.data.store import MANIFEST
from dpformer.data.summary import item_counts, statistics
from dpformer.errors import DataError
from dpformer_experiments.reproduce.page import Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

VARIABLES = {"ml-1m": "DPFORMER_ML_1M", "amazon-games": "DPFORMER_AMAZON_GAMES"}


def parse_data(texts: Sequence[str]) -> dict[str, Path]:
    """Parse `NAME=PATH` for each data set: its file, the folder of the file, or a folder made by `dpformer prepare`."""
    paths = {}
    for text in texts:
        name, equals, path = text.partition("=")
        if not equals or name not in NAMED:
            raise DataError(f"--data {text!r} is not NAME=PATH with a NAME of {', '.join(NAMED)}")
        paths[name] = Path(path).expanduser()
    return paths


def find_set(name: str, data: Mapping[str, Path]) -> Dataset:
    """Load a data set from the given path, from the path in its variable, or from the cache (downloaded into it)."""
    path = data.get(name)
    if path is None and os.environ.get(VARIABLES[name]):
        path = Path(os.environ[VARIABLES[name]])
    if path is None or not (path / MANIFEST).is_file():
        return prepare_named(name, path)
    dataset = load(path)
    own_name = (dataset.manifest.get("dataset") or {}).get("name")
    if own_name != name:
        raise DataError(
            f"{path}: contains {own_name or 'another log'}, not {name}; prepare it with: dpformer prepare {name}"
        )
    return dataset


def prepare_sets(names: Sequence[str], data: Mapping[str, Path], root: Path) -> dict[str, Path]:
    """Folders of prepared data below `root`, for runs to train on."""
    folders = {}
    for name in names:
        dataset, folder = find_set(name, data), root / "data" / name
        if not (folder / MANIFEST).is_file() or fingerprint(load(folder)) != fingerprint(dataset):
            save(dataset, folder, force=True)
        folders[name] = folder
    return folders


def fingerprint(dataset: Dataset) -> str:
    """A hash of sequences, catalogue size and split by time, by which a cell recognises its data."""
    digest, split = hashlib.sha256(), dataset.sequences.split
    of_split = () if split is None else (split.before,)
    for array in (dataset.sequences.items, dataset.sequences.offsets, np.array(len(dataset.catalogue)), *of_split):
        digest.update(str((array.shape, array.dtype.str)).encode())
        digest.update(np.ascontiguousarray(array).reshape(-1).data)
    return digest.hexdigest()


def run(*, data: Mapping[str, Path] | None = None) -> dict[str, Any]:
    """Statistics of both data sets, and the counts of their items, most frequent first."""
    rows, counts = [], {}
    for name in VARIABLES:
        dataset = find_set(name, data or {})
        rows.append({"dataset": name, **statistics(dataset)})
        counts[name] = item_counts(dataset).tolist()
    return {"rows": rows, "counts": counts}


def page(figures: dict[str, Any]) -> Page:
    """Sizes and tails."""
    rows = [
        (
            row["dataset"],
            *(f"{row[key]:,}" for key in ("users", "items", "events")),
            f"{100 * row['density']:.3f} %",
            f"{row['length']['median']:g} / {row['length']['mean']:.1f} / {row['length']['longest']:g}",
            *(f"{100 * share:.1f} %" for share in list(row["tail"].values())[:3]),
            f"{row['tail']['gini']:.3f}",
        )
        for row in figures["rows"]
    ]
    headings: tuple[str, ...] = (
        "data",
        "users",
        "items",
        "events",
        "density",
        "length: median / mean / longest",
        "events of the top tenth",
    )
    headings += ("items of the last fifth of events", "items with at most 10 events", "Gini")
    note = "Counts are exact, of people's data: not private. The paper shows the same as a figure without numbers in its text."
    return Page("The data sets and their long tails", "dpformer reproduce data -o docs/results", headings, rows, [note])


def draw(figures: dict[str, Any]) -> Figure:
    """Draw the events of an item against its rank."""
    figure, axes = new_figure()
    for name, counts in figures["counts"].items():
        axes[0, 0].plot(np.arange(1, len(counts) + 1), counts, label=name)
    axes[0, 0].set(xscale="log", yscale="log", xlabel="item, by rank of frequency", ylabel="events")
    axes[0, 0].legend(frameon=False)
    return figure
