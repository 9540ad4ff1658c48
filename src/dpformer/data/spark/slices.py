"""Read a log in slices, one per Spark task, with the polars expressions of the other engine.

Spark's own readers have no row numbers for text, and different rules for CSV and for printing numbers. So workers read with
polars, and Spark counts, joins and sorts.
"""

from __future__ import annotations

import functools
import json
import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from dpformer.data.catalogue import title_votes
from dpformer.data.manifest import Record
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import id_expression, whole_numbers
from dpformer.data.read.log import READ_ERRORS, Log, first_line, scan
from dpformer.data.read.missing import NO_TIME, missing_rows, missing_values, no_time
from dpformer.data.read.times import NANOSECONDS, UNITS, bad_time, large_times, sound_times, time_expression, unit_of
from dpformer.files import sha256_joined, sha256_of_file

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

_BATCH = 1 << 16


@dataclass(frozen=True)
class Slice:
    """Events `start` to `start + rows` of a Parquet file; the first one is event `row` of the log."""

    file: str
    start: int
    rows: int
    row: int

    def first(self, wrong: pl.Series) -> int | None:
        """Row number in the log of the first event where `wrong`, bool [rows], is true."""
        return self.row + int(wrong.arg_max() or 0) if wrong.any() else None


@dataclass(frozen=True)
class Slices:
    """All slices, and how to read ids and times; this object is sent to workers.

    names: role to column in the files. expressions: role to expression over roles. untyped, nulls: of `Log`.
    """

    parts: list[Slice]
    names: dict[str, str]
    expressions: dict[str, pl.Expr]
    untyped: bool
    nulls: tuple[str, ...]

    def frame(self, number: int) -> pl.LazyFrame:
        """Read the events of one slice, with columns named by role."""
        part = self.parts[number]
        columns = [pl.col(name).alias(role) for role, name in self.names.items()]
        return scan(part.file).slice(part.start, part.rows).select(columns)

    def columns(self, number: int) -> pl.DataFrame:
        """Read ids (whole numbers or text) and times (numbers) of one slice."""
        expressions = [expression.alias(role) for role, expression in self.expressions.items()]
        return self.frame(number).select(expressions).collect().with_columns(pl.col(pl.Categorical).cast(pl.String))

    def look(self, number: int) -> dict[str, Any]:
        """Check one slice: rows without id, whether user ids are numbers, range of times."""
        part = self.parts[number]
        try:
            frame = self.columns(number)
        except READ_ERRORS as error:
            return {"fault": first_line(error)}
        missing = missing_rows(frame, self.nulls)
        none = functools.reduce(operator.or_, missing.values())
        seen: dict[str, Any] = {"rows": len(frame), "missing": int(none.sum())}
        for role, rows in missing.items():
            seen[role] = {"lacking": int(rows.sum()), "first": part.first(rows)}
        whole = frame.filter(~none)
        if self.untyped:
            seen["text"] = whole_numbers(whole[USER].unique()).null_count() > 0
        if TIME in frame.columns:
            times = frame[TIME]
            seen |= {"large": large_times(times), "low": whole[TIME].min(), "high": whole[TIME].max()}
            seen["bad"] = {unit.name: part.first(~sound_times(times, unit) & ~missing[TIME]) for unit in UNITS}
        return seen

    def events(self, types: dict[str, Any], number: int) -> pa.Table:
        """Read one slice, without rows that lack a value: `row` and the columns in `types`."""
        frame = self.columns(number).with_row_index("row", self.parts[number].row)
        whole = frame.filter(~functools.reduce(operator.or_, missing_rows(frame, self.nulls).values()))
        return to_arrow(whole.select(pl.col("row").cast(pl.Int64), *(pl.col(role).cast(types[role]) for role in types)))

    def votes(self, number: int) -> pa.Table:
        """Collect titles in one slice; see `title_votes`."""
        return to_arrow(title_votes(self.expressions[ITEM], self.expressions[USER], self.frame(number)).collect())


def cut(record: Record, aside: Path, rows: int) -> Slices:
    """Cut a log into slices of at most `rows` events."""
    log, files, names = _staged(record.log, aside, rows)
    record.log = log
    expressions = {role: id_expression(log, role) for role in (USER, ITEM)}
    if TIME in names:
        # -0.0 becomes 0.0: Spark and polars may order them differently.
        expressions |= {TIME: time_expression(log)[0] + 0, NO_TIME: no_time(log)}
    parts, row = [], 0
    for file in files:
        length = int(log.collect(scan(file).select(pl.len())).item())
        parts += [Slice(str(file.absolute()), at, min(rows, length - at), row + at) for at in range(0, length, rows)]
        row += length
    if not parts:
        raise record.no_rows()
    return Slices(parts, names, expressions, log.untyped_ids, log.nulls)


def _staged(log: Log, aside: Path, rows: int) -> tuple[Log, list[Path], dict[str, str]]:
    """Return the log as Parquet files. Other formats cannot be cut, so they are converted first, as a stream."""
    roles = log.schema().names()
    if log.format.startswith("Parquet") and log.keep is None:
        return log, list(log.files), {role: log.columns[role] for role in roles}
    file = aside / "log.parquet"
    text = [pl.col(name).cast(pl.String) for name, dtype in log.schema().items() if dtype == pl.Categorical]
    try:
        log.frame.with_columns(text).sink_parquet(file, row_group_size=rows)
    except READ_ERRORS as error:
        raise log.explain(error) from None
    return replace(log, frame=scan(file)), [file], {role: role for role in roles}


def check(spark: SparkSession, slices: Slices, record: Record) -> tuple[int, dict[str, Any]]:
    """Read and check the whole log; errors are those of the other engine.

    Returns the number of events, and role to type.
    """
    log, seen = record.log, gather(spark, len(slices.parts), slices.look)
    faults = [part["fault"] for part in seen if "fault" in part]
    if faults:
        raise log.explain(RuntimeError(faults[0]))
    roles = [role for role in slices.expressions if role != NO_TIME]
    counts = {role: sum(part[role]["lacking"] for part in seen) for role in roles}
    if any(counts.values()) and not record.options.drop_missing:
        raise missing_values(log, counts, {r: _least(part[r]["first"] for part in seen) for r in roles if counts[r]})
    expressions = [slices.expressions[role].alias(role) for role in roles]
    types: dict[str, Any] = dict(log.frame.select(expressions).collect_schema())
    types |= {role: pl.String for role in (USER, ITEM) if types[role] != pl.Int64}
    if slices.untyped and not any(part["text"] for part in seen):
        types[USER] = pl.Int64
    missing = sum(part["missing"] for part in seen)
    events = sum(part["rows"] for part in seen) - missing
    if TIME in types:
        nanoseconds = time_expression(log)[1]
        filled = events + missing - counts[TIME]
        unit = NANOSECONDS if nanoseconds else unit_of(sum(part["large"] for part in seen), filled)
        if any(part["bad"][unit.name] is not None for part in seen):
            row = _least(part["bad"][unit.name] for part in seen)
            value = log.collect(log.frame.select(slices.expressions[TIME]).slice(row, 1)).item()
            raise bad_time(log, row, value is None, unit)
    record.count_dropped(missing, events)
    if TIME in types:
        ends = [[part[end] for part in seen if part[end] is not None] for end in ("low", "high")]
        record.set_times(unit, min(ends[0]), max(ends[1]))
    return events, types


def _least(rows: Iterator[int | None]) -> int:
    return min(row for row in rows if row is not None)


def read_events(spark: SparkSession, slices: Slices, types: dict[str, Any]) -> DataFrame:
    """Read `row`, `user_id`, `item_id` (whole numbers or text), and `timestamp` if the log has times."""
    spark_types = {pl.String: "string", pl.Int64: "long", pl.Float64: "double"}
    schema = "row long, " + ", ".join(f"{role} {spark_types[dtype]}" for role, dtype in types.items())
    return each(spark, len(slices.parts), functools.partial(slices.events, types), schema)


def read_votes(spark: SparkSession, slices: Slices) -> DataFrame:
    """Read `item_id`, `title` and `people`, the number of users who have this title for this item."""
    from pyspark.sql import functions as f

    votes = each(spark, len(slices.parts), slices.votes, f"{ITEM} string, {TITLE} string, {USER} string")
    return votes.groupBy(ITEM, TITLE).agg(f.countDistinct(USER).alias("people"))


def digest(spark: SparkSession, files: tuple[Path, ...]) -> str | None:
    """Compute the SHA-256 of the log's files, one task per file."""
    paths = [file.absolute() for file in files]
    return sha256_joined(gather(spark, len(paths), lambda number: sha256_of_file(paths[number]))) if paths else None


def gather(spark: SparkSession, count: int, work: Callable[[int], Any]) -> list[Any]:
    """Run `work` for 0, 1, ..., count - 1, one task each, and return the results, sent as JSON."""

    def as_row(number: int) -> pa.Table:
        return to_arrow(pl.DataFrame({"number": [number], "result": [json.dumps(work(number))]}))

    rows = each(spark, count, as_row, "number long, result string").collect()
    return [json.loads(row["result"]) for row in sorted(rows, key=lambda row: row["number"])]


def each(spark: SparkSession, count: int, work: Callable[[int], pa.Table], schema: str) -> DataFrame:
    """Run `work` for 0, 1, ..., count - 1, one task each, and return a frame of all rows."""

    def tasks(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(number).to_batches(max_chunksize=_BATCH)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return spark.range(0, count, 1, count).mapInArrow(tasks, schema)


def to_arrow(frame: pl.DataFrame) -> pa.Table:
    """Convert to Spark's types: long, double and string."""
    import pyarrow as pa

    types: dict[Any, Any] = {pl.Int64: pa.int64(), pl.Float64: pa.float64(), pl.String: pa.string()}
    return frame.to_arrow().cast(pa.schema([(name, types[dtype]) for name, dtype in frame.schema.items()]))
