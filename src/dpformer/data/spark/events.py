"""Events in Spark, with the filters of `dpformer.data.events`. Each step is written to disk, and not computed again."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from dpformer.data.catalogue import Catalogue
from dpformer.data.options import SINGLE_PASS
from dpformer.data.read.columns import ITEM, USER
from dpformer.data.read.log import READ_ERRORS, Log, scan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

# Events per row group, which is what a task of Spark reads.
_GROUP = 1 << 20


class Disk:
    """Spark frames as Parquet files in one folder, so that events do not pass through the driver's memory."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self._numbers = spark, folder, itertools.count()

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
        return self.read(self._write(frame))

    def stream(self, log: Log, rows: pl.LazyFrame) -> Path:
        """Write rows of a log without holding them in memory."""
        path = self._next()
        try:
            rows.sink_parquet(path, row_group_size=_GROUP)
        except READ_ERRORS as error:
            raise log.explain(error) from None
        return path

    def read(self, path: Path) -> DataFrame:
        """Open a file that `stream` wrote."""
        return self.spark.read.parquet(_pattern(path))

    def _write(self, frame: DataFrame | pl.DataFrame) -> Path:
        path = self._next()
        frame.write_parquet(path) if isinstance(frame, pl.DataFrame) else frame.write.parquet(_uri(path))
        return path

    def _next(self) -> Path:
        return self.folder / f"step-{next(self._numbers)}.parquet"


def _uri(path: Path) -> str:
    """A path on this machine's file system, which may not be Spark's default."""
    return f"file://{path.resolve()}"


def _pattern(path: Path) -> str:
    """A path for Spark's readers, which expect a pattern: special characters are escaped."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", _uri(path))


@dataclass(frozen=True)
class SparkEvents:
    """Events on disk; same interface as `dpformer.data.events.Events`.

    frame: `row` (row number in the log), `user_id`, `item_id`, and `timestamp` if the log has times. number: of events.
    people: all users, with or without events; None: users with events. public: the public catalogue, after `inside`; item ids
    are then text.
    """

    disk: Disk
    frame: DataFrame
    number: int
    people: DataFrame | None = None
    public: pl.DataFrame | None = None

    @classmethod
    def read(cls, disk: Disk, path: Path) -> SparkEvents:
        """Events that `Disk.stream` wrote."""
        frame = disk.read(path)
        return cls(disk, frame, frame.count())

    def __len__(self) -> int:
        return self.number

    def sizes(self) -> dict[str, int]:
        users = self._distinct(USER).count() if self.people is None else self.people.count()
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
