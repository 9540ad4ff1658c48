"""Publish a model: end a run so that no readable folder ever holds secrets beside the model.

1. The release is written aside, whole and synced: `private/release/`.
2. The checkpoints, which hold the keys of the noise, are unlinked, and the folder is synced.
3. The files of the release are renamed into place, the model last; `private/` is removed.

All files get the time of the oldest one, which was there before the first answer. Each answer is a file, folders are copied with
the times of files, and how long a step took tells who was drawn into it.

A crash before 2 resumes the run or its end. After 2 there is no secret left, and `resume` only renames. So a folder that has the
model has no secrets and is whole. `read.refuse_unfinished` refuses any other, for everything that opens a folder.
"""

from __future__ import annotations

import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from safetensors.torch import save as to_safetensors

from dpformer.artifact.card import model_card
from dpformer.artifact.layout import CARD, CONFIG, FILES, ITEMS, MODEL, PRIVACY, PRIVATE, RELEASE, SPEC
from dpformer.artifact.read import column_hashes, read_config
from dpformer.errors import DPFormerError
from dpformer.files import sha256, sync_folder, to_json, write_folder
from dpformer.models import Recommender
from dpformer.privacy import PrivacyStatement


def publish(folder: Path, model: Recommender, catalogue: pl.DataFrame, statement: PrivacyStatement) -> None:
    """End the run in `folder` with this model.

    Guarantee: when the model is in place, no secret state is left in the folder.

    Args:
        folder: of the run; it has config.json and the state in private/.
        model: made of answers alone.
        catalogue: its items, in the order of their numbers.
        statement: what was charged.
    """
    write_folder(folder / PRIVATE / RELEASE, _files(folder, model, catalogue, statement), mode=0o644)
    complete(folder)


def _files(
    folder: Path, model: Recommender, catalogue: pl.DataFrame, statement: PrivacyStatement
) -> Iterator[tuple[str, bytes]]:
    files = {
        SPEC: to_json(model.spec.model_dump(mode="json")),
        PRIVACY: statement.to_json().encode(),
        CARD: model_card(model.spec, statement, read_config(folder)).encode(),
        MODEL: to_safetensors({name: value.contiguous().cpu() for name, value in model.state_dict().items()}),
    }
    hashes: dict[str, Any] = {name: sha256(files[name]) for name in (SPEC, PRIVACY, MODEL)}
    yield from files.items()
    yield ITEMS, pack_catalogue(catalogue)
    yield FILES, to_json(hashes | {CONFIG: sha256(folder / CONFIG), ITEMS: column_hashes(catalogue)})


def pack_catalogue(catalogue: pl.DataFrame) -> bytes:
    """The content of `items.jsonl`: one JSON object per line, in the order of the item numbers.

    {"item":1,"item_id":"tt0113277","title":"Heat"}
    """
    lines = io.BytesIO()
    catalogue.write_ndjson(lines)
    return lines.getvalue()


def is_written(folder: Path) -> bool:
    """Is the release written, so that nothing is left to do but its end?"""
    return (folder / PRIVATE / RELEASE).is_dir() or ((folder / MODEL).exists() and (folder / PRIVATE).is_dir())


def complete(folder: Path) -> None:
    """Unlink all secrets, then put the release in place. It may be called again after a crash at any point of it."""
    private = folder / PRIVATE
    release = private / RELEASE
    try:
        for path in sorted(private.iterdir()):
            if path.name != RELEASE:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_folder(private)
        _same_times(folder)
        if release.is_dir():
            for name in sorted((path.name for path in release.iterdir()), key=lambda name: name == MODEL):
                os.replace(release / name, folder / name)
                sync_folder(folder)  # before the next one: the model must be last on the disk too
            release.rmdir()
        private.rmdir()
        _same_times(folder)
        sync_folder(folder)
    except OSError as error:
        raise DPFormerError(
            f"{private}: the end of the run could not be written ({error.strerror}); mend that, then: dpformer resume {folder}"
        ) from None


def _same_times(folder: Path) -> None:
    """Give all that is in a folder, and the folder, the time of its oldest file."""
    paths = list(folder.rglob("*"))
    oldest = min((path.stat().st_mtime_ns for path in paths if path.is_file()), default=0)
    for path in (*paths, folder):
        os.utime(path, ns=(oldest, oldest))
