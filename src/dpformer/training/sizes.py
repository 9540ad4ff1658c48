"""What is checked of a released folder before memory is taken for it: it may come from a stranger.

Nothing in such a folder is code. What is left to a stranger is size: a few kilobytes that ask for gigabytes. So the headers are
read first (of Parquet: rows, columns and the size of each page; of safetensors: the shape of each tensor), and must agree with
one another and with the recipe.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
import torch
from safetensors import safe_open

from dpformer.data.log import READ_ERRORS
from dpformer.errors import DPFormerError
from dpformer.training.files import sha256, to_json
from dpformer.training.pages import PageError, unpacked
from dpformer.training.recipe import STATISTICS, Recipe

# What a small folder may ask for whatever its size: numbers of a model, bytes of a catalogue.
SOME = 1 << 20
# Id, title and what else is known of an item, on the average; a value takes some bytes in memory however it is packed.
ITEM_BYTES, VALUE_BYTES = 10_000, 16
AGAIN = "copy the released folder again"


def catalogue_rows(path: Path) -> int:
    """How many items `items.parquet` has, from its headers."""
    try:
        scan = pl.scan_parquet(path, glob=False, hive_partitioning=False)
        schema, rows = scan.collect_schema(), int(scan.select(pl.len()).collect().item())
        packed, values = unpacked(path)
    except (*READ_ERRORS, PageError) as error:
        raise DPFormerError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); {AGAIN}") from None
    size = packed + VALUE_BYTES * values
    if not {"item", "item_id"} <= set(schema) or not schema["item"].is_integer():
        raise DPFormerError(f"{path}: is no catalogue of item and item_id; {AGAIN}")
    if any(schema[name].is_nested() for name in ("item_id", "title") if name in schema):
        raise DPFormerError(f"{path}: holds more than one id or title in a cell; {AGAIN}")
    if rows < 1 or size > SOME + ITEM_BYTES * rows:
        raise DPFormerError(f"{path}: unpacks to {size:,} bytes for {rows:,} items; no catalogue does, do not trust it")
    return rows


def read_catalogue(path: Path) -> pl.DataFrame:
    """`items.parquet`: items 1..M, their ids, and titles if there are any. Call it when its size has been checked."""
    try:
        catalogue = pl.read_parquet(path, glob=False, hive_partitioning=False)
    except READ_ERRORS as error:
        raise DPFormerError(f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); {AGAIN}") from None
    numbers = np.arange(1, len(catalogue) + 1)
    if catalogue["item_id"].null_count() or not np.array_equal(catalogue["item"].to_numpy(), numbers):
        raise DPFormerError(f"{path}: does not number its items 1, 2, 3, ...; {AGAIN}")
    return catalogue


def column_hashes(catalogue: pl.DataFrame) -> dict[str, str]:
    """Hashes of ids and titles. Not of the file: whoever serves a model may add columns to filter on."""
    names = [name for name in ("item_id", "title") if name in catalogue.columns]
    return {name: sha256(to_json(catalogue[name].cast(pl.String).to_list())) for name in names}


def check_tensors(path: Path, recipe: Recipe, items: int) -> None:
    """A `ValueError` if the recipe and the catalogue ask for much more than the file holds, or a tensor is not what it may be.

    A file's tensors cannot be larger than the file: safetensors sees to that. So memory is bounded by what is on the disk.
    """
    held = 0
    with safe_open(path, framework="pt") as file:
        names = list(file.keys())
        for name in names:
            part = file.get_slice(name)
            if part.get_dtype() not in ("F32", "I64", "I32", "BOOL"):
                raise ValueError(f"{name} is of type {part.get_dtype()}")
            if name == "popularity" and part.get_shape() != [items + 1]:
                raise ValueError(f"popularity has shape {part.get_shape()}, and the catalogue {items} items")
            held += math.prod(part.get_shape())
        wanted = items
        if recipe.model not in STATISTICS and items <= 4 * held + SOME:
            with torch.device("meta"):  # shapes without memory
                wanted = sum(value.numel() for value in recipe.build(items).state_dict().values())
        if wanted > 4 * held + SOME:
            raise ValueError(f"recipe and catalogue ask for {wanted:,} numbers, and the file has {held:,}")
        for name in names:
            if bool(file.get_tensor(name).isnan().any()):
                raise ValueError(f"{name} holds values that are no numbers")
