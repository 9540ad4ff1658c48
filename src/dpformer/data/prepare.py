"""From any log to sequences: read, check, number, filter, sort by time within each user."""

from collections.abc import Callable
from typing import Any

import polars as pl

from dpformer.data.catalogue import Catalogue, chosen_titles, make_catalogue, open_catalogue, title_votes
from dpformer.data.events import Events
from dpformer.data.filters import Filter
from dpformer.data.manifest import (
    Options,
    check_together,
    count_lengths,
    count_outside,
    first_notes,
    make_manifest,
    no_rows,
    nothing_left,
    time_origin,
)
from dpformer.data.read import read_log
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import check_ids, encode_items, encode_users, id_expression
from dpformer.data.read.log import Log
from dpformer.data.read.times import check_times, time_expression
from dpformer.data.sequences import Dataset
from dpformer.files import sha256_of


def prepare(
    log: Any,
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
    on_stage: Callable[[str], None] = lambda stage: None,
) -> Dataset:
    """Turn a log into sequences.

    log: a path (any of the formats in docs/data.md) or a pandas, polars or Arrow frame.
    catalogue: the public items, one a row (a path or a frame); "log": those of the log, assumed public; "private": those of
        the log, of which `fit` selects some by noisy counts. A `Path` is always a file, also one called log or private.
    user, item, time: column names that the usual aliases do not find.
    title: the column of titles, of the catalogue's file if there is one, else of the log: an item gets the title that most
        of its people have.
    min_events, filter: the least events of a user and of an item, counted once or until nothing changes. This counts over
        people, so the manifest says that it is outside of the guarantee.
    min_user_events: a person with fewer events keeps the place among the people, without events.
    dedupe: keep only the first of events that agree in user, item and time.
    titles: `item_id` and `title` of items, in place of a column of the log.
    on_stage: told what is being done, for whoever shows it.
    """
    options = Options(min_events, filter, min_user_events, dedupe)
    chosen = open_catalogue(catalogue, item=item, title=title)
    check_together(options, chosen, titles)
    on_stage("reading")
    source = read_log(log, user=user, item=item, time=time, title=title if chosen.items is None else None)
    columns, origin = _events(source)
    on_stage("numbering users and items")
    items = encode_items(columns.pop(ITEM), source.untyped_ids)
    events = Events(encode_users(columns.pop(USER), source.untyped_ids), items, columns.pop(TIME, None))
    counts: dict[str, Any] = {"read": events.sizes()}
    notes = first_notes(source, chosen, titles)
    events = _reduced(events, source, chosen, options, counts, notes, on_stage)
    on_stage("sorting by time")
    sequences = events.sequences()
    count_lengths(source, sequences.lengths, counts, notes)
    counts = events.sizes() | counts
    on_stage("naming items")
    if titles is None and TITLE in source.columns:
        titles = _titles(source)
    made = make_catalogue(events.items.ids, titles) if chosen.items is None else chosen.items
    on_stage("hashing the input")
    sha256 = sha256_of(source.files) if source.files else None
    manifest = make_manifest(source, sha256, origin, chosen, options, counts, notes)
    return Dataset(sequences, made, manifest)


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
        raise no_rows(log)
    for role in (USER, ITEM):
        check_ids(log, role, frame[role])
    if TIME in log.columns:
        unit = check_times(log, frame[TIME], nanoseconds)
        first, last = frame[TIME].min(), frame[TIME].max()
        origin = time_origin(unit, first, last)  # type: ignore[arg-type]
    return {name: frame[name] for name in frame.columns}, origin


def _reduced(
    events: Events,
    log: Log,
    chosen: Catalogue,
    options: Options,
    counts: dict[str, Any],
    notes: list[str],
    on_stage: Callable[[str], None],
) -> Events:
    """The events that stay: without duplicates, in the catalogue, of people and items with enough of them."""
    if options.dedupe:
        on_stage("dropping duplicates")
        before, events = events, events.without_duplicates()
        counts["duplicates"] = before.sizes()["events"] - events.sizes()["events"]
    if chosen.items is not None:
        on_stage("looking items up in the catalogue")
        before, events = events, events.inside(chosen.places(events.items.ids), chosen.items[ITEM])
        count_outside(log, chosen, before.sizes()["events"], events.sizes()["events"], counts, notes)
    if options.min_user_events > 1:
        on_stage("filtering users by their own events")
        before, events = events, events.of_busy_users(options.min_user_events)
        counts["emptied"] = {
            "users": before.active_users() - events.active_users(),
            "events": before.sizes()["events"] - events.sizes()["events"],
        }
    if options.min_events > 1:
        on_stage("filtering")
        before, events = events, events.frequent(options.min_events, options.filter)
        counts["removed"] = {key: before.sizes()[key] - after for key, after in events.sizes().items()}
    if not events.sizes()["events"]:
        raise nothing_left(log, counts, options)
    return events


def _titles(log: Log) -> pl.DataFrame:
    votes = title_votes(id_expression(log, ITEM), id_expression(log, USER), log.frame)
    return chosen_titles(log.collect(votes.group_by(ITEM, TITLE).agg(people=pl.len())))
