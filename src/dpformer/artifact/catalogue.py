"""Write and read the released catalogue, `items.jsonl`: one JSON object a line, in the order of the item numbers.

    {"item":1,"item_id":"tt0113277","title":"Heat"}

The folder may come from a stranger. JSON lines are not compressed: what they take in memory is bounded by their size on disk,
if all lines have the same fields and no value is an object, and both are checked. Whoever serves a model may add fields.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.read.log import READ_ERRORS
from dpformer.errors import DPFormerError
from dpformer.files import readable

# Bytes that any catalogue may have, and that one line may have; and, on average, bytes of an item: id, title, added fields.
SOME, ITEM_BYTES = 1 << 20, 10_000
AGAIN = "copy the released folder again"


def pack_catalogue(catalogue: pl.DataFrame) -> bytes:
    """The content of `items.jsonl`."""
    lines = io.BytesIO()
    catalogue.write_ndjson(lines)
    return lines.getvalue()


def read_catalogue(path: Path, items: int) -> pl.DataFrame:
    """Items 1..`items` of `items.jsonl`: `item`, `item_id` (whole numbers or text), `title` if known, and any added columns."""
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
    found = len(columns.get("item", ()))
    if found != items:
        raise DPFormerError(f"{path}: has {found:,} items and does not fit config.json, which has {items:,}; {AGAIN}")
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
    except (*READ_ERRORS, TypeError, ValueError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DPFormerError(f"{path}: field {name!r} has values of different types ({reason}); {AGAIN}") from None
    if series.dtype == pl.Object:
        raise DPFormerError(f"{path}: field {name!r} has values of different types; {AGAIN}")
    return series


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


def _damaged(path: Path, line: int, reason: str) -> DPFormerError:
    return DPFormerError(f"{path}: line {line:,} {' '.join(reason.split())[:200]}; {AGAIN}")
