"""Events that Spark holds, and which of them stay. Each step goes through the disk, so that the next one does not do it again."""

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
from dpformer.data.read.log import scan

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


class Disk:
    """Frames of Spark as Parquet files in one folder; in this way nothing passes through the driver's memory."""

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self.spark, self.folder, self._numbers = spark, folder, itertools.count()

    def keep(self, frame: DataFrame) -> DataFrame:
        """Write a frame, and read it from there."""
        return self.spark.read.schema(frame.schema).parquet(_pattern(self._write(frame)))

    def files(self, frame: DataFrame) -> list[Path]:
        """Write a frame; its files in their order."""
        return sorted(self._write(frame).glob("part-*.parquet"))

    def collect(self, frame: DataFrame) -> pl.DataFrame:
        """A small frame of Spark, read into memory."""
        return pl.concat([scan(file) for file in self.files(frame)]).collect()

    def table(self, frame: pl.DataFrame) -> DataFrame:
        """A polars frame for Spark."""
        file = self._new()
        frame.write_parquet(file)
        return self.spark.read.parquet(_pattern(file))

    def _write(self, frame: DataFrame) -> Path:
        folder = self._new()
        frame.write.parquet(_uri(folder))
        return folder

    def _new(self) -> Path:
        return self.folder / f"step-{next(self._numbers)}.parquet"


def _uri(path: Path) -> str:
    """The path for Spark, whose default may be another file system than this machine's."""
    return f"file://{path.resolve()}"


def _pattern(path: Path) -> str:
    """The path where Spark expects a pattern: its special characters stand for themselves."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", _uri(path))


@dataclass(frozen=True)
class SparkEvents:
    """Events on disk; with the methods of `dpformer.data.events.Events`.

    frame: `row` (place in the log), `user_id`, `item_id` and, if the log has times, `timestamp`. number: of events.
    people: everybody who has a place, with or without events; None: those with events. public: the public catalogue, once
    events are reduced to it; items are then text.
    """

    disk: Disk
    frame: DataFrame
    number: int
    people: DataFrame | None = None
    public: pl.DataFrame | None = None

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
        """The same events; people keep their places from here on."""
        return self if self.people is not None else replace(self, people=self.disk.keep(self._distinct(USER)))

    def _keep(self, frame: DataFrame) -> SparkEvents:
        stored = self.disk.keep(frame)
        return replace(self, frame=stored, number=stored.count())
