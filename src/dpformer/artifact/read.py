"""Read a released folder that is not trusted: check hashes and sizes before memory is allocated.

Nothing in a folder is code. An attacker can only try to make a few kilobytes ask for gigabytes. Tensors cannot be larger than
their file (safetensors checks that), and the spec must ask for exactly the tensors of the file. JSON lines are not compressed:
their size in memory is bounded by their size on disk, if all lines have the same fields and no value is an object; both are
checked.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file

from dpformer.artifact.artifact import Artifact
from dpformer.artifact.layout import (
    CHECKPOINT,
    CONFIG,
    FILES,
    FORMAT,
    ITEMS,
    MODEL,
    OLD_FORMAT,
    PRIVACY,
    PRIVATE,
    SPEC,
    TRAINING,
    VERSION,
)
from dpformer.errors import DPFormerError
from dpformer.files import read_json, read_small, readable, sha256, to_json
from dpformer.models import Recommender, Spec, parse_spec, restore
from dpformer.privacy import PrivacyStatement, parse_statement

# Bytes that any catalogue may have, and that one line may have; and, on average, bytes of an item: id, title, added fields.
SOME, ITEM_BYTES = 1 << 20, 10_000
AGAIN = "copy the released folder again"
_WRONG = (OSError, ValueError, TypeError, LookupError, SafetensorError, RuntimeError)


def load(folder: Path | str) -> Artifact:
    """Load the released model of a run folder. No code of the folder runs.

    Raises:
        DPFormerError: the folder is unfinished, damaged, of another format, or asks for more memory than it has bytes.
    """
    folder = Path(folder)
    config = read_config(folder)
    check_version(folder, config)
    refuse_unfinished(folder)
    columns = check_files(folder)
    spec = read_spec(folder)
    try:
        model = _read_model(folder / MODEL, spec)
    except _WRONG as error:
        raise DPFormerError(f"{folder / MODEL}: does not fit {SPEC} or is damaged ({_short(error)})") from None
    catalogue = read_catalogue(folder / ITEMS, spec.items)
    hashes = column_hashes(catalogue)
    for name, expected in columns.items():
        if hashes.get(name) != expected:
            raise DPFormerError(f"{folder / ITEMS}: column {name!r} is damaged or was changed; {AGAIN}")
    return Artifact(model, catalogue, read_statement(folder), config)


def read_config(folder: Path) -> dict[str, Any]:
    """The content of config.json, of any version."""
    if (folder / TRAINING).exists():
        raise DPFormerError(
            f"{folder}: is a run of PrivateTraining: its record is privacy.json and the ledger; to check its clipping, use "
            "dpformer verify --module FILE:FACTORY"
        )
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != FORMAT:
        raise DPFormerError(f"{folder}: is not a run folder")
    return config


def check_version(folder: Path, config: dict[str, Any]) -> None:
    """Refuse folders of another format."""
    if config.get("version") == 1:
        raise DPFormerError(f"{folder}: {OLD_FORMAT}")
    if config.get("version") != VERSION:
        raise DPFormerError(f"{folder}: is of format {config.get('version')!r}, not {VERSION}; update dpformer")
    if not isinstance(config.get("recipe"), dict):
        raise DPFormerError(f"{folder / CONFIG}: is damaged (it has no recipe); {AGAIN}")


def refuse_unfinished(folder: Path) -> None:
    """Refuse a folder whose run has not ended, or that holds secret state, with which the noise can be subtracted."""
    cure = f"finish it with: dpformer resume {folder}"
    private = folder / PRIVATE
    if has_checkpoint(folder):
        beside = "beside the model" if (folder / MODEL).exists() else "and no released model yet"
        raise DPFormerError(
            f"{folder}: holds secret state of its run ({PRIVATE}/, keys of the noise) {beside}, so it is not opened; {cure}"
        )
    if private.exists() or not (folder / MODEL).is_file():
        raise DPFormerError(f"{folder}: holds no released model yet; {cure}")


def has_checkpoint(folder: Path) -> bool:
    """Is there any checkpoint, whole or half written? It holds the keys of the noise."""
    private = folder / PRIVATE
    return private.is_dir() and any(CHECKPOINT in path.name for path in private.iterdir())


def check_files(folder: Path) -> dict[str, Any]:
    """Compare the files of a finished run with their hashes; returns the hashes of the catalogue's columns."""
    hashes = read_json(folder / FILES)
    hashed = (CONFIG, SPEC, PRIVACY, MODEL)
    columns = hashes.get(ITEMS) if isinstance(hashes, dict) else None
    if not isinstance(columns, dict) or "item_id" not in columns or not set(hashed) <= hashes.keys():
        raise DPFormerError(f"{folder / FILES}: is damaged; {AGAIN}")
    for name in hashed:
        if sha256(folder / name) != hashes[name]:
            raise DPFormerError(f"{folder / name}: is damaged or was changed (sha256 differs); {AGAIN}")
    return columns


def read_spec(folder: Path) -> Spec:
    """The spec of the released model."""
    try:
        return parse_spec(read_json(folder / SPEC))
    except ValueError as error:
        raise DPFormerError(f"{folder / SPEC}: is damaged or of another version ({_short(error)}); {AGAIN}") from None


def read_statement(folder: Path) -> PrivacyStatement:
    """The privacy statement of a finished run."""
    return parse_statement(read_small(folder / PRIVACY))


def _read_model(path: Path, spec: Spec) -> Recommender:
    """The model; a ValueError if the file does not hold the tensors of the spec."""
    with safe_open(path, framework="pt") as file:
        for name in file.keys():  # noqa: SIM118
            if bool(file.get_tensor(name).isnan().any()):
                raise ValueError(f"{name} holds values that are not numbers")
    return restore(spec, load_file(path))


def column_hashes(catalogue: pl.DataFrame) -> dict[str, str]:
    """Hashes of ids and titles. Not of the file: who serves a model may add columns to filter on."""
    names = [name for name in ("item_id", "title") if name in catalogue.columns]
    return {name: sha256(to_json(catalogue[name].cast(pl.String).to_list())) for name in names}


def read_catalogue(path: Path, items: int) -> pl.DataFrame:
    """Read `items.jsonl`: `item` 1..`items`, `item_id` (whole numbers or text), `title` if there is one, any added columns."""
    columns: dict[str, list[Any]] = {}
    with readable(path):
        if (size := path.stat().st_size) > SOME + ITEM_BYTES * items:
            raise DPFormerError(f"{path}: has {size:,} bytes for {items:,} items; no catalogue does, do not trust it")
        with path.open("rb") as file:
            for number, row in enumerate(_rows(path, file), 1):
                if number == 1:
                    columns = {name: [] for name in row}
                if row.keys() != columns.keys() or type(row.get("item")) is not int or row["item"] != number:
                    raise _damaged(path, number, "is not an item with the next number and the fields of the first line")
                for name, value in row.items():
                    if any(isinstance(one, (dict, list)) for one in (value if isinstance(value, list) else [value])):
                        raise _damaged(path, number, f"holds an object or a list of lists in {name!r}")
                    columns[name].append(value)
    count = len(columns.get("item", ()))
    if count != items:
        raise DPFormerError(f"{path}: has {count:,} items and does not fit model.json, which has {items:,}; {AGAIN}")
    if {type(value) for value in columns.get("item_id", ())} not in ({int}, {str}):
        raise DPFormerError(f"{path}: has item ids that are neither all whole numbers nor all text; {AGAIN}")
    if any(isinstance(title, list) for title in columns.get("title", ())):
        raise DPFormerError(f"{path}: holds more than one title in a line; {AGAIN}")
    return pl.DataFrame([_series(path, name, values) for name, values in columns.items()])


def _rows(path: Path, file: io.BufferedReader) -> Iterator[dict[str, Any]]:
    number = 0
    while line := file.readline(SOME + 1):
        number += 1
        try:
            if len(line) > SOME:
                raise ValueError(f"is longer than {SOME:,} bytes")
            row = json.loads(line.decode("utf-8"), parse_constant=_refuse)
            if not isinstance(row, dict):
                raise ValueError("is no JSON object")
        except (ValueError, RecursionError) as error:
            raise _damaged(path, number, str(error)) from None
        yield row


def _series(path: Path, name: str, values: list[Any]) -> pl.Series:
    if {type(value) for value in values} - {type(None)} == {int, float}:
        values = [None if value is None else float(value) for value in values]
    try:
        series = pl.Series(name, values, dtype=pl.Int32 if name == "item" else None, strict=True)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException, TypeError, ValueError, OverflowError) as error:
        raise DPFormerError(
            f"{path}: field {name!r} has values of different types ({_short(error)}); {AGAIN}"
        ) from None
    if series.dtype == pl.Object:
        raise DPFormerError(f"{path}: field {name!r} has values of different types; {AGAIN}")
    return series


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _damaged(path: Path, line: int, reason: str) -> DPFormerError:
    return DPFormerError(f"{path}: line {line:,} {_short(reason)}; {AGAIN}")


def _short(reason: object) -> str:
    return " ".join(str(reason).split())[:200]
