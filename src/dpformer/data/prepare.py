"""Prepare a log: read, check, number, filter, and sort by time within each user."""

import functools
import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl

from dpformer.data.catalogue import chosen_titles, make_catalogue, title_votes
from dpformer.data.events import Events, reduce
from dpformer.data.manifest import Record, open_log
from dpformer.data.options import Options
from dpformer.data.read.columns import ITEM, TIME, TITLE, USER
from dpformer.data.read.ids import (
    NO_TIME,
    encode_items,
    encode_users,
    id_expression,
    missing_rows,
    missing_values,
    no_time,
    untyped_users,
)
from dpformer.data.read.log import Log, first_row
from dpformer.data.read.times import check_times, time_expression
from dpformer.data.sequences import Dataset, TimeSplit
from dpformer.files import sha256_of


def prepare(log: Any, *, on_stage: Callable[[str], None] = lambda stage: None, **options: Any) -> Dataset:
    """Turn a log into sequences.

    Args:
        log: a path (docs/data.md lists the formats) or a pandas, polars or Arrow frame.
        on_stage: called with the name of each step.
        options: the fields of `Options`, such as `min_events=5`.

    Raises:
        DataError: the log, the catalogue or an option is wrong; the message names file, row, column and cure.
    """
    on_stage("reading")
    record = open_log(log, Options(**options))
    read = record.log.collect(columns(record.log))
    events = check(record, read.lazy()).collect()
    del read
    on_stage("numbering users and items")
    kept = reduce(_numbered(events, record.log), record, on_stage)
    on_stage("sorting by time")
    sequences = kept.sequences()
    if record.cut is not None:
        sequences = replace(sequences, split=TimeSplit(str(record.options.date), kept.before(record.cut)))
    record.count_lengths(sequences.users, sequences.lengths, sequences.split)
    on_stage("naming items")
    catalogue = record.catalogue.items
    if catalogue is None:
        catalogue = make_catalogue(kept.items.ids, _titles(record) if TITLE in record.log.columns else None)
    on_stage("hashing the input")
    sha256 = sha256_of(record.log.files) if record.log.files else None
    return Dataset(sequences, catalogue, record.manifest(kept.sizes(), sha256))


def columns(log: Log, *further: pl.Expr) -> pl.LazyFrame:
    """The ids and the times of a log as numbers, and further columns; not read yet."""
    wanted = [id_expression(log, role).alias(role) for role in (USER, ITEM)]
    if TIME in log.columns:
        # -0.0 becomes 0.0: engines may order them differently.
        wanted += [(time_expression(log)[0] + 0).alias(TIME), no_time(log).alias(NO_TIME)]
    return log.frame.select(*wanted, *further)


def check(record: Record, events: pl.LazyFrame) -> pl.LazyFrame:
    """Check `columns`, in memory or on disk; record what is missing, and return the events that lack nothing."""
    log = record.log
    missing = missing_rows(log, events)
    any_missing = functools.reduce(operator.or_, missing.values())
    sums = {role: rows.sum() for role, rows in missing.items()} | {"any": any_missing.sum(), "rows": pl.len()}
    counts = {name: int(count or 0) for name, count in log.collect(events.select(**sums)).row(0, named=True).items()}
    rows, dropped = counts.pop("rows"), counts.pop("any")
    if dropped and not record.options.drop_missing:
        lacking = {role: count for role, count in counts.items() if count}
        raise missing_values(log, lacking, {role: first_row(log, events, missing[role]) or 0 for role in lacking})
    unit = check_times(log, events, missing[TIME], rows - counts[TIME]) if TIME in log.columns and rows else None
    record.count_dropped(dropped, rows - dropped)
    kept = events.filter(~any_missing) if dropped else events
    if unit is not None:
        record.set_times(unit, *log.collect(kept.select(low=pl.col(TIME).min(), high=pl.col(TIME).max())).row(0))
    return kept


def _numbered(events: pl.DataFrame, log: Log) -> Events:
    """Number users and items. Takes columns out of the frame, to free their memory early."""
    items = encode_items(events.drop_in_place(ITEM), log.untyped_ids)
    users = encode_users(events.drop_in_place(USER), untyped_users(log))
    return Events(users, items, events.drop_in_place(TIME) if TIME in events.columns else None)


def _titles(record: Record) -> pl.DataFrame:
    log = record.log
    votes = title_votes(id_expression(log, ITEM), id_expression(log, USER), log.frame)
    return chosen_titles(log.collect(votes.group_by(ITEM, TITLE).agg(people=pl.len())))
