"""From any log to sequences: read, check, number, filter, sort by time within each user."""

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl

from dpformer import __version__
from dpformer.data.columns import ITEM, TIME, TITLE, USER
from dpformer.data.dataset import Dataset
from dpformer.data.filters import Filter, keep_frequent
from dpformer.data.hashing import sha256_of
from dpformer.data.ids import Coded, check_ids, compact, encode, id_expression
from dpformer.data.log import Log
from dpformer.data.read import read_log
from dpformer.data.sequences import Sequences
from dpformer.data.splits import SHORTEST_SPLIT
from dpformer.data.times import check_times, time_expression
from dpformer.errors import DataError

MANIFEST_FORMAT, MANIFEST_VERSION = "dpformer-sequences", 1


def prepare(
    log: Any,
    *,
    user: str | None = None,
    item: str | None = None,
    time: str | None = None,
    min_events: int = 0,
    filter: Filter | str = Filter.SINGLE_PASS,
    dedupe: bool = False,
    titles: pl.DataFrame | None = None,
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Dataset:
    """Turn a log into sequences.

    log: a path (any of the formats in docs/data.md) or a pandas, polars or Arrow frame.
    user, item, time: column names that the usual aliases do not find.
    min_events, filter: the least events of a user and of an item, counted once or until nothing changes.
    dedupe: keep only the first of events that agree in user, item and time.
    titles: `item_id` and `title` of items, if the log itself has none.
    on_stage: told what is being done, for whoever shows it.
    """
    rule = _checked_options(min_events, filter)
    on_stage("reading")
    source = read_log(log, user=user, item=item, time=time)
    columns, origin = _events(source)
    on_stage("numbering users and items")
    items = encode(columns.pop(ITEM), source.untyped_ids)
    users = encode(columns.pop(USER), source.untyped_ids)
    times = columns.pop(TIME, None)
    counts: dict[str, Any] = {"read": _sizes(users, items)}
    notes: list[str] = []

    if dedupe:
        on_stage("dropping duplicates")
        kept = _first_of_equals(users, items, times)
        users, items, times = _keep(kept, users, items, times)
        counts["duplicates"] = int((~kept).sum())
    if min_events > 1:
        on_stage("filtering")
        before = _sizes(users, items)
        kept = keep_frequent(users.codes, items.codes, min_events, rule)
        users, items, times = _keep(kept, users, items, times)
        counts["removed"] = {key: before[key] - after for key, after in _sizes(users, items).items()}
        if not len(users.codes):
            raise DataError(
                f"{source.name}: no event is left of {before['events']:,} after --min-events {min_events} "
                f"({rule.value}); lower it"
            )
    on_stage("sorting by time")
    sequences = _sort(users, items, times)
    _count_lengths(source, sequences, counts, notes)
    counts = _sizes(users, items) | counts
    on_stage("naming items")
    if titles is None and TITLE in source.columns:
        titles = _titles(source, notes)
    catalogue = _catalogue(items.ids, titles)
    on_stage("hashing the input")
    manifest = {
        "format": MANIFEST_FORMAT,
        "version": MANIFEST_VERSION,
        "dpformer": __version__,
        "input": _input(source) | origin,
        "options": {"min_events": min_events, "filter": rule.value if min_events > 1 else None, "dedupe": dedupe},
        "counts": counts,
        "notes": notes,
    }
    return Dataset(sequences, catalogue, manifest)


def _checked_options(min_events: int, filter: Filter | str) -> Filter:
    if min_events < 0:
        raise DataError(f"--min-events {min_events} is negative; give 0 (keep all) or more")
    try:
        return Filter(filter)
    except ValueError:
        raise DataError(f"--filter {filter!r} is unknown; give {' or '.join(rule.value for rule in Filter)}") from None


def _events(log: Log) -> tuple[dict[str, pl.Series], dict[str, Any]]:
    """Read and check the columns (ids, and times as numbers); also what the manifest says of the times."""
    origin: dict[str, Any] = {"time": None}
    wanted = [id_expression(log, role).alias(role) for role in (USER, ITEM)]
    nanoseconds = False
    if TIME in log.columns:
        expression, nanoseconds = time_expression(log)
        wanted.append(expression.alias(TIME))
    frame = log.collect(log.frame.select(wanted))
    if not len(frame):
        raise DataError(f"{log.name}: has no rows; give a log with at least one event")
    for role in (USER, ITEM):
        check_ids(log, role, frame[role])
    if TIME in log.columns:
        unit = check_times(log, frame[TIME], nanoseconds)
        first, last = frame[TIME].min(), frame[TIME].max()
        origin = {"time": unit.name, "from": unit.text(first), "to": unit.text(last)}  # type: ignore[arg-type]
    return {name: frame[name] for name in frame.columns}, origin


def _sizes(users: Coded, items: Coded) -> dict[str, int]:
    return {"users": len(users.ids), "items": len(items.ids), "events": len(users.codes)}


def _keep(
    kept: np.ndarray, users: Coded, items: Coded, times: pl.Series | None
) -> tuple[Coded, Coded, pl.Series | None]:
    return compact(users, kept), compact(items, kept), times if times is None else times.filter(pl.Series(kept))


def _first_of_equals(users: Coded, items: Coded, times: pl.Series | None) -> np.ndarray:
    """The first of the events that agree in user, item and time (in a log without time: in user and item)."""
    frame = pl.DataFrame({"user": users.codes, "item": items.codes})
    if times is not None:
        frame = frame.with_columns(times.alias("time"))
    return frame.select(pl.struct(pl.all()).is_first_distinct()).to_series().to_numpy()


def _sort(users: Coded, items: Coded, times: pl.Series | None) -> Sequences:
    """Group by user, sort each group stably by time: ties keep the order of the file.

    Many small sorts take half the time of sorting all events (measured at 50 million).
    """
    frame = pl.DataFrame({"user": users.codes, "items": items.codes + np.int32(1)})
    ordered = pl.col("items")
    if times is not None:
        frame = frame.with_columns(times.alias("time"))
        ordered = ordered.sort_by("time", maintain_order=True)
    lists = frame.lazy().group_by("user").agg(ordered).sort("user").select(pl.col("items").explode()).collect()
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(np.bincount(users.codes))])
    return Sequences(users.ids.alias(USER), lists["items"].to_numpy(), offsets)


def _count_lengths(log: Log, sequences: Sequences, counts: dict[str, Any], notes: list[str]) -> None:
    """Who can be evaluated; nobody with two events means that there is no sequence at all."""
    lengths = sequences.lengths
    if lengths.max() < 2 and "removed" in counts:
        raise DataError(
            f"{log.name}: nobody has two events left after the filter, so there are no sequences; lower --min-events"
        )
    if lengths.max() < 2:
        raise DataError(
            f"{log.place(0)}, column {log.columns[USER]!r}: this user has one event, as all {len(lengths):,} have, so "
            "there are no sequences; is this the column of the user? (--user NAME)"
        )
    short = int((lengths < SHORTEST_SPLIT).sum())
    counts["evaluated_users"], counts["short_users"] = len(lengths) - short, short
    if short:
        notes.append(
            f"{short:,} of {len(lengths):,} users have fewer than {SHORTEST_SPLIT} events: they stay in training and "
            "are left out of evaluation"
        )


def _titles(log: Log, notes: list[str]) -> pl.DataFrame | None:
    """The titles of the items, if the column names items at all.

    A title goes into the catalogue, which is released. A column that differs between events of one item was written
    by people (the headline of a review, say), and must not.
    """
    column = pl.col(TITLE).cast(pl.String)
    spread = log.collect(
        log.frame.select(id_expression(log, ITEM).cast(pl.String).alias(ITEM), column.alias(TITLE))
        .filter(pl.col(TITLE) != "")
        .group_by(ITEM)
        .agg(pl.col(TITLE).min(), last=pl.col(TITLE).max())
        .sort(ITEM)
    )
    differing = spread.filter(pl.col(TITLE) != pl.col("last"))
    if len(differing):
        notes.append(
            f"column {log.columns[TITLE]!r} differs between events of one item (first: {differing[ITEM][0]}), so it "
            "does not name items and is left out"
        )
        return None
    return spread.drop("last")


def _catalogue(ids: pl.Series, titles: pl.DataFrame | None) -> pl.DataFrame:
    catalogue = pl.DataFrame({"item": np.arange(1, len(ids) + 1, dtype=np.int32), ITEM: ids})
    if titles is None:
        return catalogue
    named = titles.select(key=pl.col(ITEM).cast(pl.String), title=pl.col(TITLE)).unique("key", keep="first")
    return catalogue.join(
        named, left_on=pl.col(ITEM).cast(pl.String), right_on="key", how="left", maintain_order="left"
    ).select("item", ITEM, TITLE)


def _input(log: Log) -> dict[str, Any]:
    used = {role: name for role, name in log.columns.items() if role in (USER, ITEM, TIME, TITLE)}
    return {
        "name": log.name,
        "format": log.format,
        "files": len(log.files),
        "bytes": sum(file.stat().st_size for file in log.files),
        "sha256": sha256_of(log.files) if log.files else None,
        "columns": used,
    }
