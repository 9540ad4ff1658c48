"""The folder that `prepare` writes: all of it, or nothing."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.dataset import Dataset
from dpformer.data.hashing import sha256_of
from dpformer.data.log import READ_ERRORS, first_line
from dpformer.data.pipeline import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.sequences import Sequences
from dpformer.errors import DataError

SEQUENCES, ITEMS, MANIFEST, PLOT = "sequences.parquet", "items.parquet", "manifest.json", "long-tail.png"


def check_target(folder: Path, force: bool) -> None:
    """Refuse to write over anything that `prepare` did not write, and over that unless forced to."""
    if folder.is_dir() and not any(folder.iterdir()):
        return
    if not folder.exists():
        return
    if _manifest(folder) is None:
        raise DataError(f"{folder}: exists and was not written by prepare; choose another folder with -o")
    if not force:
        raise DataError(
            f"{folder}: holds prepared data already; say --force to write it anew, or choose another with -o"
        )


def save(dataset: Dataset, folder: Path | str, *, force: bool = False) -> None:
    """Write sequences.parquet, items.parquet, manifest.json and long-tail.png."""
    from dpformer.data.plot import draw_long_tail

    def write(aside: Path) -> None:
        dataset.sequences.frame().write_parquet(aside / SEQUENCES)
        dataset.catalogue.write_parquet(aside / ITEMS)
        draw_long_tail(dataset, aside / PLOT)
        hashes = {name: sha256_of([aside / name]) for name in (SEQUENCES, ITEMS)}
        text = json.dumps({**dataset.manifest, "files": hashes}, indent=2, ensure_ascii=False)
        (aside / MANIFEST).write_text(text + "\n", encoding="utf-8")

    folder = Path(folder)
    check_target(folder, force)
    try:
        _write_whole(folder, write)
    except OSError as error:
        raise DataError(
            f"{folder}: cannot be written ({error.strerror or error}); choose another folder with -o"
        ) from None


def load(folder: Path | str) -> Dataset:
    """Read what `save` wrote; a `DataError` tells what is missing, of another version, or changed since."""
    folder = Path(folder)
    manifest = _manifest(folder)
    if manifest is None:
        raise DataError(
            f"{folder}: holds no prepared data (no sound {MANIFEST}); make a folder of it with: dpformer prepare LOG -o DIR"
        )
    again = "run dpformer prepare again"
    if manifest.get("version") != MANIFEST_VERSION:
        found = manifest.get("version")
        raise DataError(f"{folder}: is of version {found}, and this dpformer reads {MANIFEST_VERSION}; {again}")
    for name in (SEQUENCES, ITEMS):
        if not (folder / name).is_file():
            raise DataError(f"{folder / name}: is missing; {again}")
        known = manifest.get("files")
        if not isinstance(known, dict) or sha256_of([folder / name]) != known.get(name):
            raise DataError(f"{folder / name}: is not what the manifest says (sha256 differs); {again}")
    try:
        sequences, catalogue = pl.read_parquet(folder / SEQUENCES), pl.read_parquet(folder / ITEMS)
        _check(sequences, catalogue)
    except (*READ_ERRORS, ValueError) as error:
        raise DataError(f"{folder}: was not written by dpformer prepare ({first_line(error)}); {again}") from None
    del manifest["files"]
    return Dataset(Sequences.from_frame(sequences), catalogue, manifest)


def _check(sequences: pl.DataFrame, catalogue: pl.DataFrame) -> None:
    """A `ValueError` unless the sequences hold numbers of the catalogue: a hash says that a file is whole, not whose it is."""
    if "user_id" not in sequences.columns or sequences.schema.get("items") != pl.List(pl.Int32) or not len(sequences):
        raise ValueError(f"{SEQUENCES} has no columns user_id and items")
    if not {"item", "item_id"} <= set(catalogue.columns) or not catalogue.schema["item"].is_integer():
        raise ValueError(f"{ITEMS} has no columns item and item_id")
    if not catalogue["item"].equals(pl.Series("item", range(1, len(catalogue) + 1), dtype=catalogue.schema["item"])):
        raise ValueError(f"{ITEMS} does not number its items 1, 2, 3, ...")
    lists = sequences["items"]
    if lists.null_count() or (lists.list.len() == 0).any():
        raise ValueError(f"{SEQUENCES} has somebody without items")
    items = lists.explode()
    if items.null_count() or not items.is_between(1, len(catalogue)).all():
        raise ValueError(f"{SEQUENCES} holds items that are not in {ITEMS}")


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == MANIFEST_FORMAT else None


def _write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Write into a folder beside, then rename: a reader sees the old one, the new one, or none, never half of one."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = folder.parent / f".{folder.name}.{os.getpid()}.partial"
    old = folder.parent / f".{folder.name}.{os.getpid()}.old"
    try:
        aside.mkdir(mode=0o700)  # it holds what people did: for its owner only
        write(aside)
        if folder.exists():
            folder.rename(old)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)
