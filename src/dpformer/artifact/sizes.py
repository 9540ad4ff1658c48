"""Check the sizes in a released folder before memory is taken for it: it may come from a stranger.

Nothing in such a folder is code. What is left to a stranger is size: a few kilobytes that ask for gigabytes. So the header of
the model is read first (the shape of each tensor), and must agree with the recipe and the catalogue. `catalogue` bounds that one.
"""

from __future__ import annotations

import math
from pathlib import Path

import polars as pl
import torch
from safetensors import safe_open

from dpformer.files import sha256, to_json
from dpformer.fit.recipe import STATISTICS, Recipe

# Numbers that a model may have, whatever the size of its file.
SOME = 1 << 20


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
