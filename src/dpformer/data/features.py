"""Public features of items: columns of a declared catalogue as zeros and ones."""

import itertools
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from dpformer.data.read.columns import ITEM
from dpformer.errors import DataError

# A value that fewer items have is not used; of the others those that most items have.
LEAST, MOST = 5, 128


def feature_columns(features: str, items: pl.DataFrame) -> dict[str, list[Any]]:
    """The values of all items in the columns that `features` names, such as "category,price:10"."""
    there = [name for name in items.columns if name not in ("item", ITEM)]
    columns = {}
    for feature in filter(None, (name.strip() for name in features.split(","))):
        name, colon, bins = feature.partition(":")
        if name not in there:
            raise DataError(
                f"--features {name}: is no column of the catalogue, which has: {', '.join(there) or 'none'}"
            )
        if colon and not (bins.isdecimal() and 2 <= int(bins) <= 100):
            raise DataError(f"--features {feature}: the number of bins must be from 2 to 100, such as {name}:10")
        columns[feature] = items[name].to_list()
    return columns


def encode(columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
    """Which item has which value, 0 or 1, float32 [items + 1, values]; row 0 is 0.

    columns: name to the values of all items. Each value is a class; a text is split at "|", and a list has several values. For
    a name such as "price:10" numbers are put into 10 bins with equally many items each.

    >>> encode({"genre": ["Drama|War"] * 5 + ["Drama", None]})[[1, 6, 7]]
    array([[1., 1.],
           [1., 0.],
           [0., 0.]], dtype=float32)
    """
    owners = _owners(columns)
    used = _used(owners)
    encoded = np.zeros((len(next(iter(columns.values()))) + 1, len(used)), dtype=np.float32)
    for place, key in enumerate(used):
        encoded[owners[key], place] = 1.0
    return encoded


def describe(columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """Say how each column is used: how many values, which are ignored and why, and how many items have none.

    >>> describe({"genre": ["Drama|War"] * 5 + ["Drama", "Noir"]})
    ["features: genre has 2 values in use ('Drama', 'War'); ignored: 1 that fewer than 5 items have ('Noir')"]
    """
    owners = _owners(columns)
    used, notes = set(_used(owners)), []
    for name, values in columns.items():
        own = {one: items for (of, one), items in owners.items() if of == name}
        parts = [f"features: {name} has {_named([one for one in own if (name, one) in used], 'in use')}"]
        rare = [one for one, items in own.items() if len(items) < LEAST]
        common = [one for one, items in own.items() if len(items) >= LEAST and (name, one) not in used]
        if rare:
            parts.append(f"ignored: {_named(rare, f'that fewer than {LEAST} items have', '')}")
        if common:
            parts.append(f"ignored: {_named(common, f'beyond the {MOST} that most items have', '')}")
        if without := len(values) - len({item for items in own.values() for item in items}):
            parts.append(f"{without:,} of {len(values):,} items {'has' if without == 1 else 'have'} none")
        notes.append("; ".join(parts))
    return notes


def _named(values: list[str], what: str, noun: str = "values") -> str:
    """How many values, and the first of them by name."""
    noun = noun.removesuffix("s") if len(values) == 1 else noun
    shown = ", ".join(repr(value) for value in values[:3]) + (", ..." if len(values) > 3 else "")
    return " ".join(filter(None, [f"{len(values):,}", noun, what, f"({shown})"]))


def _owners(columns: Mapping[str, Sequence[Any]]) -> dict[tuple[str, str], list[int]]:
    """Column and value to the items that have it, in the order of first appearance."""
    owners: dict[tuple[str, str], list[int]] = {}
    for name, values in columns.items():
        column, _, bins = name.partition(":")
        texts = _binned(column, values, int(bins)) if bins else [_texts(value) for value in values]
        for item, text in enumerate(texts, 1):
            for one in dict.fromkeys(text):
                owners.setdefault((name, one), []).append(item)
        if max((len(items) for (of, _), items in owners.items() if of == name), default=0) < LEAST:
            raise DataError(
                f"--features {shlex.quote(name)}: no value of the column is shared by {LEAST} items, so it predicts nothing; "
                f"leave it out, or put numbers into bins: --features {shlex.quote(f'{column}:10')}"
            )
    return owners


def _used(owners: Mapping[tuple[str, str], list[int]]) -> list[tuple[str, str]]:
    """The values in use, by number of items and by first appearance: not by spelling, which a file may change."""
    enough = [key for key, items in owners.items() if len(items) >= LEAST]
    return sorted(enough, key=lambda key: len(owners[key]), reverse=True)[:MOST]


def _texts(value: Any) -> list[str]:
    parts = value if isinstance(value, Sequence) and not isinstance(value, str) else str(value).split("|")
    return [] if value is None else [str(part).strip() for part in parts if str(part).strip()]


def _binned(column: str, values: Sequence[Any], bins: int) -> list[list[str]]:
    numbers = np.full(len(values), np.nan)
    for item, value in enumerate(values):
        try:
            numbers[item] = np.nan if value is None or value == "" else float(value)
        except (TypeError, ValueError):
            raise DataError(
                f"--features {shlex.quote(f'{column}:{bins}')}: {value!r} is not a number; write numbers as 12.99, or use "
                f"{column} without bins"
            ) from None
    given = np.isfinite(numbers)
    edges = np.unique(np.quantile(numbers[given], np.arange(1, bins) / bins)) if given.any() else np.empty(0)
    inner = [f"{low!r} to {high!r}" for low, high in itertools.pairwise(edges.tolist())]
    texts = [f"below {edges[0]}", *inner, f"from {edges[-1]}"] if len(edges) else ["any number"]
    return [[texts[place]] if ok else [] for place, ok in zip(np.digitize(numbers, edges), given, strict=True)]
