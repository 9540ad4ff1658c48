"""JSON lines: strict JSON is read by polars, Amazon's Python literals (2014) line by line."""

import ast
import functools
import io
import json
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.read.columns import ITEM, TIME, USER, Wanted, find_columns
from dpformer.data.read.log import READ_ERRORS, SAMPLE_ROWS, Log, first_line
from dpformer.data.read.text import numbered_lines
from dpformer.errors import DataError

# Reviews have some thousand characters; longer lines are refused, to protect the parser.
LONGEST_LINE = 1 << 20
_KINDS = {str: "text", bool: "true/false", int: "a number", float: "a number", list: "a list", dict: "an object"}


def read_json_lines(path: Path, wanted: Wanted) -> Log:
    """Open a file with one object per line; its first line shows whether it is JSON or Python literals."""
    first = next(line for _, line in numbered_lines(path) if line.strip())
    strict = _is_json(first)
    # The first lines show the columns of a log; a catalogue may have further columns in any line.
    sample = list(islice(_records(path), None if wanted.items else SAMPLE_ROWS))
    names = list(dict.fromkeys(name for _, record in sample for name in record))
    columns = find_columns(names, wanted, str(path))
    roles = {name: role for role, name in wanted.used(columns).items()}
    schema = {name: _dtype(path, roles.get(name, ""), name, sample) for name in wanted.needed(columns, names)}
    by_polars = strict and not wanted.items
    frame = pl.scan_ndjson(path, schema=schema) if by_polars else _parsed(path, schema, whole=wanted.items)
    form = "JSON lines" if strict else "Python-literal lines"
    explain = functools.partial(_fault, path, schema)
    texts = {name: [_text(record.get(name)) for _, record in sample[:SAMPLE_ROWS]] for name in names}
    shown = pl.DataFrame(texts, schema=dict.fromkeys(names, pl.String))
    return Log(frame, str(path), form, columns, explain, (path,), sample=shown.lazy(), named_by_rows=True)


def looks_like_json(path: Path, first: str) -> bool:
    """Whether the first line is an object, or starts like JSON and no other format fits."""
    if first.lstrip()[0] not in "{[":
        return False
    try:
        return bool(_parse(path, 1, first.strip()))
    except DataError:
        return "::" not in first


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parse lines that are not blank, with their line numbers."""
    for number, line in numbered_lines(path):
        if line.strip():
            yield number, _parse(path, number, line.strip())


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    """Parse one object. `ast.literal_eval` builds literals and runs no code."""
    if len(line) > LONGEST_LINE:
        raise DataError(f"{path}: line {number} has {len(line)} characters; write one event per line")
    record: Any = None
    for parse in (_loads, ast.literal_eval):
        with suppress(ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
            record = parse(line)
            break
    if line.startswith("["):
        raise DataError(f"{path}: line {number} starts a JSON array; write one object per line (jq -c '.[]' OLD > NEW)")
    if not isinstance(record, dict) or not all(isinstance(name, str) for name in record):
        raise DataError(f"{path}: line {number} is not a JSON object; write one {{...}} per line")
    return record


def _loads(line: str) -> Any:
    """Parse JSON. Of equal keys the first counts, as for polars: which of the two reads a line is decided by the first line."""
    return json.loads(line, object_pairs_hook=lambda pairs: {**dict(pairs), **dict(reversed(pairs))})


def _dtype(path: Path, role: str, name: str, sample: list[tuple[int, dict[str, Any]]]) -> pl.DataType:
    """Choose a column's type by its first value.

    Text ids are categorical: polars then refuses a number among text ids, since 7 and "7" may be one user or two. Ids are text
    or whole numbers: after a first id 1.0, the ids of all other users would be read as 1.0, 2.0, ...
    """
    number, value = next(((n, record[name]) for n, record in sample if record.get(name) is not None), (0, None))
    where = f"{path}: line {number}, column {name!r}"
    if role in (USER, ITEM) and isinstance(value, bool | float):
        raise DataError(f'{where}: {json.dumps(value)} is not an id; write ids as whole numbers (1) or as text ("1")')
    if (role == TIME and isinstance(value, int | float)) or (role == "" and type(value) in (int, float)):
        return pl.Float64()
    if isinstance(value, str) or value is None:
        return pl.Categorical() if role in (USER, ITEM) else pl.String()
    if isinstance(value, bool | int | float):
        return {bool: pl.Boolean(), int: pl.Int64(), float: pl.Float64()}[type(value)]
    raise DataError(f"{where}: {_kind(value)} where one value is needed; flatten it first")


def _text(value: object) -> str | None:
    return str(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None


def _kind(value: object) -> str:
    return _KINDS.get(type(value), type(value).__name__)


def _parsed(path: Path, schema: dict[str, pl.DataType], whole: bool) -> pl.LazyFrame:
    """Parse lines in Python, then let polars read them as JSON. whole: keep columns that are not in `schema`."""
    lines = io.BytesIO()
    try:
        for _, record in _records(path):
            kept = record if whole else {name: record.get(name) for name in schema}
            text = json.dumps(kept, default=str if whole else None, ensure_ascii=False)
            lines.write(text.encode() + b"\n")
        return pl.read_ndjson(lines.getvalue(), infer_schema_length=None, schema_overrides=schema).lazy()
    except (*READ_ERRORS, TypeError, ValueError) as error:
        raise _fault(path, schema, error) from None


def _fault(path: Path, schema: dict[str, pl.DataType], error: BaseException) -> DataError:
    """Find the line that differs from the lines before. Only errors need this."""
    kinds: dict[str, str] = {}
    try:
        for number, record in _records(path):
            for name, value in ((name, record[name]) for name in schema if record.get(name) is not None):
                where, kind = f"{path}: line {number}, column {name!r}", kinds.setdefault(name, _kind(value))
                if _kind(value) != kind:
                    return DataError(f"{where}: {_kind(value)} where lines before have {kind}; use one type per column")
                if schema[name] == pl.Int64 and not (isinstance(value, int) and -(2**63) <= value < 2**63):
                    return DataError(f"{where}: {value} is not a whole number of 64 bits; write all ids as text")
    except DataError as fault:
        return fault
    return DataError(f"{path}: cannot be read ({first_line(error)}); write it again as JSON lines")
