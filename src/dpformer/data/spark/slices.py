"""The events of a log in slices, each read by one task with the polars expressions of the other engine.

Spark's own readers have no row numbers for text, cut CSV by other rules, and print numbers in Java's way. So the workers read
with polars what the other engine would read, and Spark gets numbers and text, with the place of each event in the log: it counts,
joins and sorts.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dpformer.data.manifest import no_rows, time_origin
from dpformer.data.read.columns import ITEM, TIME, USER
from dpformer.data.read.ids import id_expression, missing_id, whole_numbers
from dpformer.data.read.log import READ_ERRORS, Log, first_line
from dpformer.data.read.times import (
    MILLISECONDS,
    NANOSECONDS,
    SECONDS,
    SMALLEST_MS,
    bad_time,
    sound_times,
    time_expression,
    unit_of,
)
from dpformer.files import sha256_joined, sha256_of_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Events that one task reads at once: some tens of megabytes in a worker.
SLICE = 1 << 20
_BATCH = 1 << 16


@dataclass(frozen=True)
class Slice:
    """Events `start` to `start + rows` of a Parquet file; the first is event `row` of the log."""

    file: str
    start: int
    rows: int
    row: int

    def frame(self) -> pl.LazyFrame:
        """Its events as they stand in the file."""
        scan = pl.scan_parquet(self.file, glob=False, hive_partitioning=False)
        return scan.slice(self.start, self.rows)


@dataclass(frozen=True)
class Source:
    """A log in slices of Parquet files, and how its columns become ids and times.

    log: its frame has the columns by role. names: role to column in the files. expressions: role to expression over roles.
    """

    log: Log
    slices: list[Slice]
    names: dict[str, str]
    expressions: dict[str, pl.Expr]
    nanoseconds: bool


def staged(log: Log, aside: Path, rows: int) -> tuple[Log, list[Path], dict[str, str]]:
    """The log in Parquet files. Other formats have no places to cut at, so they are rewritten once, as a stream."""
    if log.format.startswith("Parquet"):
        return log, list(log.files), dict(log.columns)
    file = aside / "log.parquet"
    text = [pl.col(name).cast(pl.String) for name, dtype in log.schema().items() if dtype == pl.Categorical]
    try:
        log.frame.with_columns(text).sink_parquet(file, row_group_size=rows)
    except READ_ERRORS as error:
        raise log.explain(error) from None
    log = replace(log, frame=pl.scan_parquet(file, glob=False, hive_partitioning=False))
    return log, [file], {role: role for role in log.schema().names()}


def source_of(log: Log, aside: Path, rows: int = SLICE) -> Source:
    """Cut a log into slices of at most `rows` events."""
    log, files, names = staged(log, aside, rows)
    roles = [role for role in (USER, ITEM, TIME) if role in names]
    expressions = {role: id_expression(log, role) for role in roles if role != TIME}
    nanoseconds = False
    if TIME in roles:
        expression, nanoseconds = time_expression(log)
        # Spark and polars might disagree on -0.0 < 0.0.
        expressions[TIME] = expression + 0
    slices, row = [], 0
    for file in files:
        scan = pl.scan_parquet(file, glob=False, hive_partitioning=False).select(pl.len())
        length = int(log.collect(scan).item())
        slices += [Slice(str(file.absolute()), at, min(rows, length - at), row + at) for at in range(0, length, rows)]
        row += length
    if not slices:
        raise no_rows(log)
    return Source(log, slices, names, expressions, nanoseconds)


def _columns(piece: Slice, names: dict[str, str], expressions: dict[str, pl.Expr]) -> pl.DataFrame:
    """Ids as whole numbers or text, times as numbers, of one slice."""
    roles = piece.frame().select(pl.col(names[role]).alias(role) for role in expressions)
    frame = roles.select(expression.alias(role) for role, expression in expressions.items()).collect()
    return frame.with_columns(pl.col(pl.Categorical).cast(pl.String))


def each(spark: SparkSession, count: int, work: Callable[[int], pa.Table], schema: str) -> DataFrame:
    """The rows that `work` makes of 0, 1, ..., count - 1, each in a task of its own."""

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number).to_batches(max_chunksize=_BATCH)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return spark.range(0, count, 1, count).mapInArrow(tasks, schema)


def to_arrow(frame: pl.DataFrame) -> pa.Table:
    """The rows as Spark takes them: long, double and string."""
    import pyarrow as pa

    types: dict[Any, Any] = {pl.Int64: pa.int64(), pl.Float64: pa.float64(), pl.String: pa.string()}
    return frame.to_arrow().cast(pa.schema([(name, types[dtype]) for name, dtype in frame.schema.items()]))


def _row(values: dict[str, Any], schema: str) -> pa.Table:
    types = {"long": pl.Int64, "string": pl.String}
    kinds = dict(field.split() for field in schema.split(", "))
    return to_arrow(pl.DataFrame([values], schema={name: types[kind] for name, kind in kinds.items()}))


_LOOK = (
    "fault string, rows long, no_user long, first_no_user long, no_item long, first_no_item long, "
    "text_user long, large long, bad_s long, bad_ms long, bad_ns long, low string, high string"
)
_KINDS = ((USER, "user"), (ITEM, "item"))


def _look(
    slices: list[Slice], names: dict[str, str], expressions: dict[str, pl.Expr], untyped: bool, number: int
) -> pa.Table:
    """Look at one slice: events without an id and the first of them, whether users' ids are numbers, the range of times."""
    piece = slices[number]
    found: dict[str, Any] = dict.fromkeys(field.split()[0] for field in _LOOK.split(", "))
    try:
        frame = _columns(piece, names, expressions)
    except READ_ERRORS as error:
        return _row({**found, "fault": first_line(error)}, _LOOK)
    found["rows"] = len(frame)
    for role, kind in _KINDS:
        column = frame[role]
        found[f"no_{kind}"] = column.null_count()
        found[f"first_no_{kind}"] = _first(column.is_null(), piece.row)
        if untyped and role == USER:
            found["text_user"] = int(whole_numbers(column.unique().drop_nulls()).null_count() > 0)
    if TIME in frame.columns:
        times = frame[TIME]
        found["large"] = int((times >= SMALLEST_MS).sum() or 0)
        for unit, name in ((SECONDS, "bad_s"), (MILLISECONDS, "bad_ms"), (NANOSECONDS, "bad_ns")):
            found[name] = _first(~sound_times(times, unit), piece.row)
        found["low"], found["high"] = repr(times.min()), repr(times.max())  # a double would not hold all nanoseconds
    return _row(found, _LOOK)


def _first(wrong: pl.Series, row: int) -> int | None:
    return row + int(wrong.arg_max() or 0) if wrong.any() else None


@dataclass(frozen=True)
class Look:
    """What a first reading told: events, the ids that are text, and what the manifest says of the times."""

    events: int
    text: dict[str, bool]
    origin: dict[str, Any]


def look(spark: SparkSession, source: Source) -> Look:
    """Read everything once and check it; the `DataError`s are those of the other engine."""
    log = source.log
    work = functools.partial(_look, source.slices, source.names, source.expressions, log.untyped_ids)
    rows = [row.asDict() for row in each(spark, len(source.slices), work, _LOOK).collect()]
    faults = [row["fault"] for row in rows if row["fault"] is not None]
    if faults:
        raise log.explain(RuntimeError(faults[0]))
    events = sum(row["rows"] for row in rows)
    for role, kind in _KINDS:
        lacking = sum(row[f"no_{kind}"] for row in rows)
        if lacking:
            raise missing_id(log, role, _least(rows, f"first_no_{kind}"), lacking)
    schema = log.frame.select(
        expression.alias(role) for role, expression in source.expressions.items()
    ).collect_schema()
    text = {role: schema[role] != pl.Int64 for role in (USER, ITEM)}
    if log.untyped_ids:
        text[USER] = any(row["text_user"] for row in rows)
    if TIME not in source.expressions:
        return Look(events, text, {"time": None})
    unit = NANOSECONDS if source.nanoseconds else unit_of(sum(row["large"] for row in rows), events)
    name = {SECONDS: "bad_s", MILLISECONDS: "bad_ms", NANOSECONDS: "bad_ns"}[unit]
    if any(row[name] is not None for row in rows):
        row = _least(rows, name)
        value = log.collect(log.frame.select(source.expressions[TIME]).slice(row, 1)).item()
        raise bad_time(log, row, value is None, unit)
    number = float if schema[TIME].is_float() else int
    low, high = min(number(row["low"]) for row in rows), max(number(row["high"]) for row in rows)
    return Look(events, text, time_origin(unit, low, high))


def _least(rows: list[dict[str, Any]], name: str) -> int:
    return min(row[name] for row in rows if row[name] is not None)


def _events(
    slices: list[Slice], names: dict[str, str], expressions: dict[str, pl.Expr], types: dict[str, Any], number: int
) -> pa.Table:
    piece = slices[number]
    frame = _columns(piece, names, expressions).select(pl.col(role).cast(dtype) for role, dtype in types.items())
    return to_arrow(frame.with_row_index("row", piece.row).with_columns(pl.col("row").cast(pl.Int64)))


def events(spark: SparkSession, source: Source, seen: Look) -> DataFrame:
    """`row` (place in the log), `user_id`, `item_id` (whole numbers or text) and, if the log has times, `timestamp`."""
    types: dict[str, Any] = {role: pl.String if seen.text[role] else pl.Int64 for role in (USER, ITEM)}
    if TIME in source.expressions:
        types[TIME] = source.log.frame.select(source.expressions[TIME].alias(TIME)).collect_schema()[TIME]
    spark_types = {pl.String: "string", pl.Int64: "long", pl.Float64: "double"}
    schema = "row long, " + ", ".join(f"{role} {spark_types[type_]}" for role, type_ in types.items())
    work = functools.partial(_events, source.slices, source.names, source.expressions, types)
    return each(spark, len(source.slices), work, schema)


_DIGEST = "file long, sha256 string"


def digest(spark: SparkSession, files: tuple[Path, ...]) -> str | None:
    """The SHA-256 of the log's files, each read by one task."""
    if not files:
        return None
    paths = [str(file.absolute()) for file in files]
    rows = each(spark, len(paths), functools.partial(_digest, paths), _DIGEST).collect()
    return sha256_joined([row["sha256"] for row in sorted(rows, key=lambda row: row["file"])])


def _digest(paths: list[str], number: int) -> pa.Table:
    return _row({"file": number, "sha256": sha256_of_file(Path(paths[number]))}, _DIGEST)
