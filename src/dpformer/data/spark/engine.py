"""From a log to shards of sequences, by Spark: bit for bit what `prepare` makes of the same log.

    read, check      `slices`: polars in the workers, with the place of each event in the log
    filter, count    group-bys and semi-joins
    number items     the distinct ids in their order, joined back
    sort             each user's events by time, then by place: ties keep the order of the file
    write            users in the order of their ids, cut into shards

Events stay in Spark and on disk; only the catalogue, and one number a user and an item, come to the driver.
"""

from __future__ import annotations

import functools
import math
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from dpformer.data.catalogue import Catalogue, chosen_titles, make_catalogue, open_catalogue, title_votes
from dpformer.data.filters import Filter
from dpformer.data.manifest import (
    Options,
    check_together,
    count_lengths,
    count_outside,
    first_notes,
    make_manifest,
    nothing_left,
)
from dpformer.data.read import read_log
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import sorted_ids
from dpformer.data.read.log import Log, first_line
from dpformer.data.sequences import flat
from dpformer.data.spark.session import session
from dpformer.data.spark.slices import SLICE, Slice, Source, digest, each, events, look, source_of, to_arrow
from dpformer.data.store import ITEMS, SHARDS, finish, write_whole
from dpformer.data.summary import figures
from dpformer.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

# Events in one shard of the result: some 20 MB, so that a reader holds little beside what it keeps.
SHARD = 1 << 22


def prepare_spark(
    log: Any,
    folder: Path | str,
    *,
    catalogue: Any = "log",
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    title: str | None = None,
    min_events: int = 0,
    filter: Filter | str = Filter.SINGLE_PASS,
    min_user_events: int = 0,
    dedupe: bool = False,
    titles: pl.DataFrame | None = None,
    force: bool = False,
    slice_events: int = SLICE,
    shard_events: int = SHARD,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> dict[str, Any]:
    """Turn a log into a folder of sequences, in shards of about `shard_events` events; read it with `load`.

    The options are those of `prepare`. All machines of Spark must see the log and the folder under the same paths.
    Returns the manifest and, under "statistics", the figures of `statistics`.
    """
    from pyspark.errors import PySparkException

    options = Options(min_events, filter, min_user_events, dedupe)
    chosen = open_catalogue(catalogue, item=item, title=title)
    check_together(options, chosen, titles)
    source = read_log(log, user=user, item=item, time=time, title=title if chosen.items is None else None)
    on_stage("starting Spark")
    spark = session()
    told: dict[str, Any] = {}

    def write(aside: Path) -> None:
        scratch = aside / "scratch"
        scratch.mkdir()
        told.update(
            _write(spark, source, chosen, aside, scratch, options, titles, slice_events, shard_events, on_stage)
        )
        shutil.rmtree(scratch)

    try:
        write_whole(Path(folder), write, force=force)
    except PySparkException as error:
        raise DataError(f"{source.name}: Spark could not finish ({first_line(error)}); see what it logged") from error
    return told


def _write(
    spark: SparkSession,
    log: Log,
    chosen: Catalogue,
    aside: Path,
    scratch: Path,
    options: Options,
    titles: pl.DataFrame | None,
    slice_events: int,
    shard_events: int,
    on_stage: Callable[[str], None],
) -> dict[str, Any]:
    on_stage("reading")
    source = source_of(log, scratch, slice_events)
    seen = look(spark, source)
    kept = Kept(_through_disk(spark, events(spark, source, seen), scratch / "events"), seen.events, chosen)
    counts: dict[str, Any] = {"read": kept.sizes()}
    notes = first_notes(log, chosen, titles)
    on_stage("filtering")
    kept = _reduced(spark, kept, log, options, scratch, counts, notes)
    on_stage("naming items")
    if titles is None and TITLE in log.columns:
        titles = _titles(spark, source, scratch)
    catalogue = chosen.items
    if catalogue is None:
        ids = _read(_through(kept.events.select(ITEM).distinct(), scratch / "ids")).collect().to_series()
        catalogue = make_catalogue(sorted_ids(ids, log.untyped_ids), titles)
    catalogue.write_parquet(aside / ITEMS)
    on_stage("sorting by time")
    shards = _shards(spark, kept, catalogue, aside, scratch, max(1, math.ceil(kept.number / shard_events)))
    on_stage("counting")
    lengths, item_events = _counted(shards, len(catalogue))
    count_lengths(log, lengths, counts, notes)
    counts = {"users": len(lengths), "items": len(catalogue), "events": int(lengths.sum())} | counts
    on_stage("hashing the input")
    manifest = make_manifest(log, digest(spark, log.files), seen.origin, chosen, options, counts, notes)
    names = [f"{SHARDS}/{shard.name}" for shard in shards]
    finish(aside, len(lengths), item_events, manifest, [*names, ITEMS])
    return {**manifest, "statistics": figures(lengths, item_events, counts)}


@dataclass(frozen=True)
class Kept:
    """The events that stay. people: everybody who has a place, with or without events; None: those with events."""

    events: DataFrame
    number: int
    chosen: Catalogue
    people: DataFrame | None = None

    def everybody(self) -> DataFrame:
        """The ids of the people who have a place."""
        return self.events.select(USER).distinct() if self.people is None else self.people

    def sizes(self) -> dict[str, int]:
        """How many users, items and events there are; items of the log unless it is reduced to a public catalogue."""
        public = self.people is not None and self.chosen.items is not None
        items = len(self.chosen.items) if public else self.events.select(ITEM).distinct().count()  # type: ignore[arg-type]
        return {"users": self.everybody().count(), "items": items, "events": self.number}


def _reduced(
    spark: SparkSession,
    kept: Kept,
    log: Log,
    options: Options,
    scratch: Path,
    counts: dict[str, Any],
    notes: list[str],
) -> Kept:
    """See `pipeline._reduced`. Each step goes through the disk, so that the next one does not do it again."""

    def store(events: DataFrame, name: str, people: DataFrame | None) -> Kept:
        stored = _through_disk(spark, events, scratch / name)
        return Kept(stored, stored.count(), kept.chosen, people)

    if options.dedupe:
        keys = [name for name in kept.events.columns if name != "row"]
        first = kept.events.groupBy(keys).agg({"row": "min"}).withColumnRenamed("min(row)", "row")
        before, kept = kept, store(first, "first", None)
        counts["duplicates"] = before.number - kept.number
    if kept.chosen.items is not None:
        ids = kept.chosen.items.select(pl.col(ITEM).cast(pl.String))
        ids.write_parquet(scratch / "public.parquet")
        public = spark.read.parquet(_pattern(scratch / "public.parquet"))
        texts = kept.events.withColumn(ITEM, kept.events[ITEM].cast("string"))
        people = _through_disk(spark, kept.everybody(), scratch / "people")
        before, kept = kept, store(texts.join(public, ITEM, "left_semi"), "inside", people)
        count_outside(log, kept.chosen, before.number, kept.number, counts, notes)
    if options.min_user_events > 1:
        busy = kept.events.groupBy(USER).count().where(f"count >= {options.min_user_events}").select(USER)
        before, kept = kept, store(kept.events.join(busy, USER, "left_semi"), "busy", kept.everybody())
        users = (frame.events.select(USER).distinct().count() for frame in (before, kept))
        counts["emptied"] = {"users": next(users) - next(users), "events": before.number - kept.number}
    if options.min_events > 1:
        before_sizes = kept.sizes()
        frame, number = _frequent(spark, kept.events, kept.number, options.min_events, options.filter, scratch)
        kept = Kept(frame, number, kept.chosen, None if kept.people is None else frame.select(USER).distinct())
        counts["removed"] = {key: before_sizes[key] - after for key, after in kept.sizes().items()}
    if not kept.number:
        raise nothing_left(log, counts, options)
    return kept


def _frequent(
    spark: SparkSession, kept: DataFrame, number: int, minimum: int, rule: Filter, scratch: Path
) -> tuple[DataFrame, int]:
    """The events of users and items that have enough; see `filters`."""
    for turn in range(number):
        users = kept.groupBy(USER).count().where(f"count >= {minimum}").select(USER)
        items = kept.groupBy(ITEM).count().where(f"count >= {minimum}").select(ITEM)
        still = kept.join(users, USER, "left_semi").join(items, ITEM, "left_semi")
        # On disk, so that the next turn does not do this one again.
        kept = _through_disk(spark, still, scratch / f"turn-{turn}")
        before, number = number, kept.count()
        if rule is Filter.SINGLE_PASS or number == before:
            break
    return kept, number


def _titles(spark: SparkSession, source: Source, scratch: Path) -> pl.DataFrame:
    """The title that most people have, for each item; see `chosen_titles`."""
    from pyspark.sql import functions as f

    ids = {role: source.expressions[role] for role in (ITEM, USER)}
    work = functools.partial(_votes, source.slices, source.names, ids)
    votes = each(spark, len(source.slices), work, f"{ITEM} string, {TITLE} string, {USER} string")
    counted = votes.groupBy(ITEM, TITLE).agg(f.countDistinct(USER).alias("people"))
    return chosen_titles(source.log.collect(_read(_through(counted, scratch / "titles"))))


def _votes(slices: list[Slice], names: dict[str, str], ids: dict[str, pl.Expr], number: int) -> pa.Table:
    frame = slices[number].frame().select(pl.col(names[role]).alias(role) for role in (ITEM, USER, TITLE))
    return to_arrow(title_votes(ids[ITEM], ids[USER], frame).collect())


def _shards(
    spark: SparkSession, kept: Kept, catalogue: pl.DataFrame, aside: Path, scratch: Path, count: int
) -> list[Path]:
    """One row a user, its items sorted by time and place, users in the order of their ids, in files part-00000, ..."""
    from pyspark.sql import functions as f

    # In a public catalogue items are matched by their text.
    key = pl.col(ITEM) if kept.chosen.items is None else pl.col(ITEM).cast(pl.String)
    catalogue.select(key, "item").write_parquet(scratch / "numbers.parquet")
    numbers = spark.read.parquet(_pattern(scratch / "numbers.parquet"))
    order = [name for name in (TIME, "row") if name in kept.events.columns]
    numbered = kept.events.join(numbers, ITEM).select(USER, f.struct(*order, "item").alias("event"))
    lists = numbered.groupBy(USER).agg(f.sort_array(f.collect_list("event"))["item"].alias("items"))
    if kept.people is not None:
        nothing = f.array().cast("array<int>")
        lists = kept.people.join(lists, USER, "left").select(USER, f.coalesce("items", nothing).alias("items"))
    ordered = lists.repartitionByRange(count, USER).sortWithinPartitions(USER)
    (aside / SHARDS).mkdir()
    written = sorted(_through(ordered, scratch / "shards").glob("part-*.parquet"))
    full = [file for file in written if len(pl.read_parquet(file, columns=[USER], glob=False, hive_partitioning=False))]
    return [file.rename(aside / SHARDS / f"part-{place:05}.parquet") for place, file in enumerate(full)]


def _counted(shards: list[Path], items: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths of the sequences, int64 [N], and events of each item, int64 [M]; one shard in memory at a time."""
    lengths, counts = [], np.zeros(items + 1, dtype=np.int64)
    for shard in shards:
        lists = pl.read_parquet(shard, columns=["items"], glob=False, hive_partitioning=False)["items"]
        lengths.append(lists.list.len().to_numpy().astype(np.int64))
        counts += np.bincount(flat(lists).to_numpy(), minlength=items + 1)
    return np.concatenate(lengths), counts[1:]


def _through(frame: DataFrame, folder: Path) -> Path:
    """Write a frame as Parquet; in this way nothing passes through the driver's memory."""
    frame.write.parquet(_uri(folder))
    return folder


def _through_disk(spark: SparkSession, frame: DataFrame, folder: Path) -> DataFrame:
    return spark.read.schema(frame.schema).parquet(_pattern(_through(frame, folder)))


def _read(folder: Path) -> pl.LazyFrame:
    return pl.scan_parquet(sorted(folder.glob("part-*.parquet")), glob=False, hive_partitioning=False)


def _uri(path: Path) -> str:
    """The path for Spark, whose default may be another file system than this machine's."""
    return f"file://{path.resolve()}"


def _pattern(path: Path) -> str:
    """The path where Spark expects a pattern: its special characters stand for themselves."""
    return re.sub(r"([\\*?\[\]{}])", r"\\\1", _uri(path))
