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
        if sha256_of([folder / name]) != manifest.get("files", {}).get(name):
            raise DataError(f"{folder / name}: is not what the manifest says (sha256 differs); {again}")
    sequences = Sequences.from_frame(pl.read_parquet(folder / SEQUENCES))
    del manifest["files"]
    return Dataset(sequences, pl.read_parquet(folder / ITEMS), manifest)


def _manifest(folder: Path) -> dict[str, Any] | None:
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError):
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
