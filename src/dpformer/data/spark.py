"""Prepare a log larger than one machine with Spark: the result equals `prepare`'s bit for bit. See docs/data.md.

    read, check      polars, as a stream, into a Parquet file; each event has its row number in the log
    filter, count    group-bys and semi-joins
    number items     distinct ids in sorted order, joined to the events
    sort             each user's events by time, then by row number
    write            users sorted by id, in shards

Events are on disk and in Spark, and each step is written to disk, so that it is not computed again. This process holds the
catalogue, the ids of users, and one number per user and item.
"""

from __future__ import annotations

import itertools
import math
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dpformer.data.catalogue import Catalogue, chosen_titles, make_catalogue
from dpformer.data.manifest import Record, open_log
from dpformer.data.options import SINGLE_PASS, Options
from dpformer.data.prepare import check, columns, reduce
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import NO_TIME, sorted_ids, whole_numbers
from dpformer.data.read.log import READ_ERRORS, Log, first_line, scan
from dpformer.data.sequences import TimeSplit, flat
from dpformer.data.store import ITEMS, SHARDS, finish, whole_folder
from dpformer.data.summary import figures
from dpformer.errors import DataError
from dpformer.files import sha256_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Events per shard: about 20 MB, the memory that `load` needs beside its result.
SHARD = 1 << 22
# Events per row group, which is what a task of Spark reads.
_GROUP = 1 << 20


def prepare_spark(
    log: Any,
    folder: Path | str,
    *,
    force: bool = False,
    shard_events: int = SHARD,
    on_stage: Callable[[str], None] = lambda stage: None,
    **options: Any,
) -> dict[str, Any]:
    """Turn a log into a folder of sequences, in shards of about `shard_events` events; read it with `load`.

    options: the fields of `Options`. All machines must have the folder at the same path.
    Returns the manifest, with the figures of `statistics` under "statistics".
    """
    record = open_log(log, Options(**options))
    on_stage("starting Spark")
    spark = session()
    from pyspark.errors import PySparkException

    try:
        with whole_folder(Path(folder), force=force) as aside, tempfile.TemporaryDirectory(dir=aside) as scratch:
            on_stage("reading")
            return _write(record, Disk(spark, Path(scratch)), aside, shard_events, on_stage)
    except PySparkException as error:
        raise DataError(f"{record.log.name}: Spark could not finish ({first_line(error)}); see Spark's log") from error


def session() -> SparkSession:
    """Return the session of this process or of `spark-submit`, or start a local one on all cores. Its tasks run no Python."""
    try:
        from pyspark.errors import PySparkException
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise DataError(f"--engine spark needs {error.name}; pip install 'dpformer[spark]'") from None
    if (active := SparkSession.getActiveSession()) is not None:
        return active
    settings = {"spark.app.name": "dpformer prepare", "spark.ui.showConsoleProgress": "false"}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # pandas is newer than pyspark's, and not used here
            return SparkSession.builder.config(map={**settings, "spark.log.level": "ERROR"}).getOrCreate()
    except (PySparkException, OSError, RuntimeError) as error:
        raise DataError(f"Spark does not start ({error}); install Java 17 or later, and check JAVA_HOME") from None


class Disk:
    """Spark frames as Parquet files in one folder, so that events do not pass through the driver's memory."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self._paths = spark, (folder / f"step-{number}.parquet" for number in itertools.count())

    def keep(self, frame: DataFrame) -> DataFrame:
        """Write a frame, and return it as read from disk."""
        return self.spark.read.schema(frame.schema).parquet(_pattern(self._write(frame)))

    def files(self, frame: DataFrame) -> list[Path]:
        """Write a frame, and return its files in order."""
        return sorted(self._write(frame).glob("part-*.parquet"))

    def collect(self, frame: DataFrame) -> pl.DataFrame:
        """Write a small frame, and read it into memory."""
        return pl.concat([scan(file) for file in self.files(frame)]).collect()

    def table(self, frame: pl.DataFrame) -> DataFrame:
        """Give a polars frame to Spark."""
        path = next(self._paths)
        frame.write_parquet(path)
        return self.read(path)

    def stream(self, log: Log, rows: pl.LazyFrame) -> Path:
        """Write rows of a log without holding them in memory."""
        path = next(self._paths)
        try:
            rows.sink_parquet(path, row_group_size=_GROUP)
        except READ_ERRORS as error:
            raise log.explain(error) from None
        return path

    def read(self, path: Path) -> DataFrame:
        """Open a file that `stream` wrote."""
        return self.spark.read.parquet(_pattern(path))

    def _write(self, frame: DataFrame) -> Path:
        path = next(self._paths)
        frame.write.parquet(_uri(path))
        return path


def _uri(path: Path) -> str:
    """A path on this machine's file system, which may not be Spark's default."""
    return f"file://{path.resolve()}"


def _pattern(path: Path) -> str:
    """A path for Spark's readers, which expect a pattern: special characters are escaped."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", _uri(path))


@dataclass(frozen=True)
class SparkEvents:
    """Events on disk; same interface as `dpformer.data.prepare.Events`.

    frame: `row` (row number in the log), `user_id`, `item_id`, and `timestamp` if the log has times. number: of events.
    people: all users, with or without events; None: users with events. public: the public catalogue, after `inside`; item ids
    are then text.
    """

    disk: Disk
    frame: DataFrame
    number: int
    people: DataFrame | None = None
    public: pl.DataFrame | None = None

    def __len__(self) -> int:
        return self.number

    def sizes(self) -> dict[str, int]:
        users = self.active_users() if self.people is None else self.people.count()
        items = self._distinct(ITEM).count() if self.public is None else len(self.public)
        return {"users": users, "items": items, "events": self.number}

    def active_users(self) -> int:
        return self._distinct(USER).count()

    def without_duplicates(self) -> SparkEvents:
        keys = [name for name in self.frame.columns if name != "row"]
        return self._keep(self.frame.groupBy(keys).agg({"row": "min"}).withColumnRenamed("min(row)", "row"))

    def inside(self, catalogue: Catalogue) -> SparkEvents:
        assert catalogue.items is not None
        ids = self.disk.table(catalogue.items.select(pl.col(ITEM).cast(pl.String)))
        texts = self.frame.withColumn(ITEM, self.frame[ITEM].cast("string"))
        return replace(self._with_people()._keep(texts.join(ids, ITEM, "left_semi")), public=catalogue.items)

    def of_busy_users(self, least: int) -> SparkEvents:
        return self._with_people()._keep(self.frame.join(self._busy(USER, least), USER, "left_semi"))

    def frequent(self, least: int, rule: str) -> SparkEvents:
        kept, before = self, -1
        while len(kept) != before and (before < 0 or rule != SINGLE_PASS):
            before = len(kept)
            users, items = kept._busy(USER, least), kept._busy(ITEM, least)
            kept = kept._keep(kept.frame.join(users, USER, "left_semi").join(items, ITEM, "left_semi"))
        return replace(kept, people=None)

    def _busy(self, role: str, least: int) -> DataFrame:
        return self.frame.groupBy(role).count().where(f"count >= {least}").select(role)

    def _distinct(self, role: str) -> DataFrame:
        return self.frame.select(role).distinct()

    def _with_people(self) -> SparkEvents:
        """The same events; from here on users stay when they have no events."""
        return self if self.people is not None else replace(self, people=self.disk.keep(self._distinct(USER)))

    def _keep(self, frame: DataFrame) -> SparkEvents:
        stored = self.disk.keep(frame)
        return replace(self, frame=stored, number=stored.count())


def _write(
    record: Record, disk: Disk, aside: Path, shard_events: int, on_stage: Callable[[str], None]
) -> dict[str, Any]:
    log = record.log
    titles = [pl.col(TITLE).cast(pl.String)] if TITLE in log.columns else []
    staged = disk.stream(log, columns(log, *titles).with_columns(pl.col(pl.Categorical).cast(pl.String)))
    kept = check(record, scan(staged)).drop(NO_TIME, TITLE, strict=False).with_row_index("row")
    ids = log.collect(kept.select(pl.col(USER).unique())).to_series() if log.untyped_ids else pl.Series([None])
    if not whole_numbers(ids.cast(pl.String)).null_count():
        kept = kept.with_columns(pl.col(USER).cast(pl.Int64))
    frame = disk.read(disk.stream(log, kept))
    events = reduce(SparkEvents(disk, frame, frame.count()), record, on_stage)
    on_stage("naming items")
    catalogue = record.catalogue.items
    if catalogue is None:
        found = disk.collect(events.frame.select(ITEM).distinct()).to_series()
        named = chosen_titles(disk.collect(_votes(disk.read(staged)))) if titles else None
        catalogue = make_catalogue(sorted_ids(found, log.untyped_ids), named)
    catalogue.write_parquet(aside / ITEMS)
    on_stage("sorting by time")
    shards = _shards(events, catalogue, aside, max(1, math.ceil(len(events) / shard_events)), record.cut)
    on_stage("counting")
    people, item_events = _counted(shards, len(catalogue))
    lengths = people["length"].to_numpy()
    split = None if record.cut is None else TimeSplit(str(record.options.date), people["before"].to_numpy())
    record.count_lengths(people["user_id"], lengths, split)
    on_stage("hashing the input")
    sizes = {"users": len(lengths), "items": len(catalogue), "events": int(lengths.sum())}
    manifest = record.manifest(sizes, sha256_of(log.files) if log.files else None)
    finish(aside, len(lengths), item_events, manifest, [*(f"{SHARDS}/{shard.name}" for shard in shards), ITEMS])
    return {**manifest, "statistics": figures(lengths, item_events, split)}


def _votes(rows: DataFrame) -> DataFrame:
    """`item_id`, `title` and `people`, the number of users who have this title for this item; see `title_votes`."""
    from pyspark.sql import functions as f

    texts = rows.select(f.col(ITEM).cast("string").alias(ITEM), TITLE, USER).where(f"{TITLE} != ''").distinct()
    return texts.groupBy(ITEM, TITLE).agg(f.count("*").alias("people"))


def _shards(events: SparkEvents, catalogue: pl.DataFrame, aside: Path, count: int, cut: int | None) -> list[Path]:
    """Write one row per user, items sorted by time and row, users sorted by id, to part-00000, ...

    cut: the time of a split, whose earlier events are counted in `before`.
    """
    from pyspark.sql import functions as f

    # Items of a public catalogue are matched by text.
    key = pl.col(ITEM) if events.public is None else pl.col(ITEM).cast(pl.String)
    numbers = events.disk.table(catalogue.select(key, "item"))
    order = [name for name in (TIME, "row") if name in events.frame.columns]
    numbered = events.frame.join(numbers, ITEM).select(USER, f.struct(*order, "item").alias("event"))
    columns = [f.sort_array(f.collect_list("event"))["item"].alias("items")]
    if cut is not None:
        columns.append(f.count_if(f.col(f"event.{TIME}") < cut).alias("before"))
    lists = numbered.groupBy(USER).agg(*columns)
    if events.people is not None:
        empty = {"items": f.array().cast("array<int>"), "before": f.lit(0)}
        filled = [f.coalesce(name, empty[name]).alias(name) for name in lists.columns if name != USER]
        lists = events.people.join(lists, USER, "left").select(USER, *filled)
    written = events.disk.files(lists.repartitionByRange(count, USER).sortWithinPartitions(USER))
    full = [file for file in written if scan(file).select(pl.len()).collect().item()]
    (aside / SHARDS).mkdir()
    return [file.rename(aside / SHARDS / f"part-{place:05}.parquet") for place, file in enumerate(full)]


def _counted(shards: list[Path], items: int) -> tuple[pl.DataFrame, np.ndarray]:
    """Users with `length` and, split by time, `before`; and events per item, int64 [M]. One shard is in memory at a time."""
    users, counts = [], np.zeros(items + 1, dtype=np.int64)
    for shard in shards:
        frame = scan(shard).collect()
        users.append(frame.with_columns(length=pl.col("items").list.len().cast(pl.Int64)).drop("items"))
        counts += np.bincount(flat(frame["items"]).to_numpy(), minlength=items + 1)
    return pl.concat(users), counts[1:]
