"""Write and read the folder of `prepare`. A write is complete or leaves nothing."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.manifest import MANIFEST_FORMAT, MANIFEST_VERSION
from dpformer.data.options import BY_TIME
from dpformer.data.read.log import READ_ERRORS, first_line, scan
from dpformer.data.sequences import Dataset, Sequences, flat
from dpformer.data.summary import draw_long_tail
from dpformer.errors import DataError
from dpformer.files import sha256_of, to_json

SEQUENCES, ITEMS, MANIFEST, PLOT = "sequences.parquet", "items.parquet", "manifest.json", "long-tail.svg"
_AGAIN = "run dpformer prepare again"


def check_target(folder: Path, force: bool) -> None:
    """Refuse to overwrite a folder that `prepare` did not write, or any folder without `force`."""
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return
    if _manifest(folder) is None:
        raise DataError(f"{folder}: exists and was not written by prepare; choose another folder with -o")
    if not force:
        raise DataError(f"{folder}: holds prepared data already; add --force to replace it, or choose another folder")


def save(dataset: Dataset, folder: Path | str, *, force: bool = False) -> None:
    """Write sequences.parquet, items.parquet, manifest.json and long-tail.svg, readable by their owner only.

    Raises:
        DataError: the folder exists (see `force`), is not prepared data, or cannot be written.
    """
    with _whole_folder(Path(folder), force=force) as aside:
        with polars_writes():
            dataset.sequences.frame().write_parquet(aside / SEQUENCES)
            dataset.catalogue.write_parquet(aside / ITEMS)
        draw_long_tail(dataset, aside / PLOT)
        hashes = {name: sha256_of([aside / name]) for name in (SEQUENCES, ITEMS)}
        (aside / MANIFEST).write_bytes(to_json({**dataset.manifest, "files": hashes}))


@contextmanager
def polars_writes() -> Iterator[None]:
    """Turn the errors of its own that polars has for a disk that fails or is full into an `OSError`."""
    try:
        yield
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise OSError(first_line(error)) from None


def load(folder: Path | str) -> Dataset:
    """Read a folder that `prepare` wrote, and check the hashes of its files.

    Raises:
        DataError: a file is missing, changed, or of another version.
    """
    folder = Path(folder)
    manifest = _read_manifest(folder)
    hashes = manifest.get("files")
    for file in (folder / SEQUENCES, folder / ITEMS):
        if not file.is_file():
            raise DataError(f"{file}: is missing; {_AGAIN}")
        if not isinstance(hashes, dict) or sha256_of([file]) != hashes.get(file.name):
            raise DataError(f"{file}: is not what the manifest says (sha256 differs); {_AGAIN}")
    try:
        catalogue = scan(folder / ITEMS).collect()
        _check_catalogue(catalogue)
        date = _date(manifest)
        sequences = Sequences.from_frame(_checked(folder / SEQUENCES, catalogue, date), date)
    except (*READ_ERRORS, ValueError) as error:
        raise DataError(f"{folder}: was not written by dpformer prepare ({first_line(error)}); {_AGAIN}") from None
    # A user in two rows would be sampled and clipped as two users, and the guarantee is for one.
    if twice := len(sequences.users) - sequences.users.n_unique():
        raise DataError(f"{folder}: {twice} users are in it more than once; {_AGAIN}")
    del manifest["files"]
    return Dataset(sequences, catalogue, manifest)


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest = _manifest(folder)
    if manifest is None:
        raise DataError(f"{folder}: holds no prepared data (no valid {MANIFEST}); run dpformer prepare LOG -o DIR")
    if (version := manifest.get("version")) != MANIFEST_VERSION:
        raise DataError(
            f"{folder}: has version {version}, but this dpformer reads version {MANIFEST_VERSION}; {_AGAIN}"
        )
    return manifest


def _check_catalogue(catalogue: pl.DataFrame) -> None:
    if not {"item", "item_id"} <= set(catalogue.columns) or not catalogue.schema["item"].is_integer():
        raise ValueError(f"{ITEMS} has no columns item and item_id")
    if not catalogue["item"].equals(pl.Series("item", range(1, len(catalogue) + 1), dtype=catalogue.schema["item"])):
        raise ValueError(f"{ITEMS} does not number its items 1, 2, 3, ...")


def _date(manifest: dict[str, Any]) -> str | None:
    """The date of a split by time."""
    options = manifest.get("options", {})
    return str(options["date"]) if options.get("split") == BY_TIME else None


def _checked(file: Path, catalogue: pl.DataFrame, date: str | None) -> pl.DataFrame:
    """Read sequences; a `ValueError` unless all items are in the catalogue (a hash does not prove who wrote a file)."""
    sequences = scan(file).collect()
    if "user_id" not in sequences.columns or sequences.schema.get("items") != pl.List(pl.Int32) or not len(sequences):
        raise ValueError(f"{file.name} has no columns user_id and items")
    lists = sequences["items"]
    if lists.null_count():
        raise ValueError(f"{file.name} has a user without a list of items")
    items = flat(lists)
    if items.null_count() or not items.is_between(1, len(catalogue)).all():
        raise ValueError(f"{file.name} holds items that are not in {ITEMS}")
    if ("before" in sequences.columns) != (date is not None):
        raise ValueError(f"{file.name} and {MANIFEST} differ about a split by time")
    if date is not None and not (sequences["before"].is_between(0, lists.list.len()).fill_null(False)).all():
        raise ValueError(f"{file.name} counts more items before {date} than there are")
    return sequences


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return manifest if isinstance(manifest, dict) and manifest.get("format") == MANIFEST_FORMAT else None


@contextmanager
def _whole_folder(folder: Path, *, force: bool) -> Iterator[Path]:
    """Give a temporary folder to write into, then rename it: a reader never sees a partial folder."""
    check_target(folder, force)
    aside, old = (folder.parent / f".{folder.name}.{os.getpid()}.{end}" for end in ("partial", "old"))
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            aside.mkdir(mode=0o700)  # private data: for the owner only
            yield aside
            if folder.exists():
                folder.rename(old)
            aside.rename(folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{folder}: cannot be written ({reason}); choose another folder") from None
