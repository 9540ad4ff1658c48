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
from dpformer.data.read.ids import encode_items, encode_users, id_expression
from dpformer.data.read.missing import NO_TIME, missing_rows, missing_values, no_time
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
    columns = _read(record)
    on_stage("numbering users and items")
    kept = reduce(_numbered(columns, record.log.untyped_ids), record, on_stage)
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


def _read(record: Record) -> pl.DataFrame:
    """Read and check the ids, and the times as numbers."""
    log = record.log
    wanted = [id_expression(log, role).alias(role) for role in (USER, ITEM)]
    if TIME in log.columns:
        expression, nanoseconds = time_expression(log)
        wanted += [expression.alias(TIME), no_time(log).alias(NO_TIME)]
    frame = log.collect(log.frame.select(wanted))
    missing = missing_rows(frame, log.nulls)
    counts = {role: int(rows.sum()) for role, rows in missing.items()}
    if any(counts.values()) and not record.options.drop_missing:
        raise missing_values(
            log, counts, {role: rows.arg_max() if counts[role] else None for role, rows in missing.items()}
        )
    unit = check_times(log, frame[TIME], missing[TIME], nanoseconds) if TIME in log.columns else None
    before = len(frame)
    if any(counts.values()):
        frame = frame.filter(~functools.reduce(operator.or_, missing.values()))
    record.count_dropped(before - len(frame), len(frame))
    if unit is not None:
        record.set_times(unit, frame[TIME].min(), frame[TIME].max())  # type: ignore[arg-type]
    return frame


def _numbered(columns: pl.DataFrame, untyped: bool) -> Events:
    """Number users and items. Takes columns out of the frame, to free their memory early."""
    items = encode_items(columns.drop_in_place(ITEM), untyped)
    users = encode_users(columns.drop_in_place(USER), untyped)
    return Events(users, items, columns.drop_in_place(TIME) if TIME in columns.columns else None)


def _titles(record: Record) -> pl.DataFrame:
    log = record.log
    votes = title_votes(id_expression(log, ITEM), id_expression(log, USER), log.frame)
    return chosen_titles(log.collect(votes.group_by(ITEM, TITLE).agg(people=pl.len())))
