"""Decide which items there are, and their titles.

public   a file lists the items: events of other items are dropped, items without events stay
log      the items of the log; that this set is public is an assumption
private  the items of the log, of which `fit` selects some by noisy counts; the prepared folder is private
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from dpformer.data.features import describe, feature_columns
from dpformer.data.options import Options
from dpformer.data.read import read_items
from dpformer.data.read.columns import ITEM, TITLE, USER
from dpformer.data.read.ids import check_item_ids, id_expression, sorted_ids, whole_numbers
from dpformer.data.read.log import Log
from dpformer.errors import DataError
from dpformer.files import sha256_of

PUBLIC, LOG, PRIVATE = "public", "log", "private"


@dataclass(frozen=True)
class Catalogue:
    """Where the set of items comes from.

    mode: public, log or private. items: the public items (`item`, `item_id`, `title`, further columns of the file), or None.
    source, sha256: name and hash of the file. notes: how the file was read, and its features.
    """

    mode: str
    items: pl.DataFrame | None = None
    source: str | None = None
    sha256: str | None = None
    notes: Sequence[str] = ()

    def entry(self, items: int, outside: int) -> dict[str, Any]:
        """Return the manifest's entry. items: number of items; outside: events of items that are not in it."""
        source = {"mode": self.mode, "source": self.source, "sha256": self.sha256}
        return {**source, "items": items, "outside_events": outside}


def open_catalogue(options: Options) -> Catalogue:
    """Read the public catalogue, or take the word "log" or "private"."""
    given, title = options.catalogue, options.title
    if isinstance(given, str) and given == PRIVATE and title is not None:
        raise DataError(
            f"--title {title} cannot be used with --catalogue private, because titles in a log may reveal what one person "
            "did; give the titles in a public file with --catalogue FILE"
        )
    if isinstance(given, str) and given in (LOG, PRIVATE):
        if options.features:
            raise DataError(
                f"--features {options.features} needs a public list of items, --catalogue FILE: columns of a log come from "
                "people's events"
            )
        return Catalogue(given)
    log = read_items(given, item=options.item, title=title)
    items = _public_items(log)
    features = describe(feature_columns(options.features or "", items))
    if not log.files:
        return Catalogue(PUBLIC, items, "frame", notes=features)
    columns = ", ".join(f"{role.removesuffix('_id')} = {name}" for role, name in log.columns.items())
    note = f"catalogue of {len(items):,} items from {log.name} ({log.format}): {columns}"
    return Catalogue(PUBLIC, items, log.name, sha256_of(log.files), [note, *features])


def _public_items(log: Log) -> pl.DataFrame:
    """Read a file of items: sorted by id, numbered from 1, with all its columns."""
    frame = log.collect(log.frame.with_columns(id_expression(log, ITEM).alias(ITEM)))
    if not len(frame):
        raise DataError(f"{log.name}: has no rows; give a catalogue with at least one item")
    if frame.schema[ITEM] == pl.Categorical:
        frame = frame.with_columns(pl.col(ITEM).cast(pl.String))
    ids = frame[ITEM]
    check_item_ids(log, ids)
    again = ~ids.is_first_distinct()
    if again.any():
        row = int(again.arg_max() or 0)
        cure = f"every item needs one row: drop the others ({int(again.sum()):,} in all)"
        raise log.error(row, ITEM, f"the item {ids[row]} occurs twice", cure)
    if log.columns[ITEM] == "column_1":
        _check_places(log, frame)
    order = sorted_ids(ids, log.untyped_ids).alias(ITEM).to_frame()
    ordered = order.join(frame, on=ITEM, how="left", maintain_order="left")
    if TITLE in ordered.columns:
        text = pl.col(TITLE).cast(pl.String)
        ordered = ordered.with_columns(pl.when(text != "").then(text).alias(TITLE))
    numbers = whole_numbers(ordered[ITEM]) if log.untyped_ids else ordered[ITEM]
    if not numbers.null_count():  # decided by a public file, so no person's events can change it
        ordered = ordered.with_columns(numbers.alias(ITEM))
    first = [name for name in (ITEM, TITLE) if name in ordered.columns]
    return _numbered(ordered.select(*first, pl.exclude(*first)))


def _check_places(log: Log, frame: pl.DataFrame) -> None:
    """Refuse a file without a header in which a row has its number in the place of the title, and text in that of the id."""
    ids, titles = (whole_numbers(frame[role].cast(pl.String)) for role in (ITEM, TITLE))
    swapped = ids.is_null() & titles.is_not_null()
    # Ids that are text all over may have a title such as 1984.
    if swapped.any() and (ids.is_not_null().any() or swapped.all()):
        row = int(swapped.arg_max() or 0)
        cure = "swap them, or save the table as CSV with a first line that names the columns, such as item_id,title"
        raise log.error(row, ITEM, f"id {frame[ITEM][row]!r} and title {frame[TITLE][row]!r} look swapped", cure)


def title_votes(item: pl.Expr, user: pl.Expr, frame: pl.LazyFrame) -> pl.LazyFrame:
    """Collect which users have which title for which item, as text, each combination once.

    item, user: expressions that read the ids of events.
    """
    columns = {ITEM: item, TITLE: pl.col(TITLE), USER: user}
    texts = frame.select(expression.cast(pl.String).alias(role) for role, expression in columns.items())
    return texts.filter(pl.col(TITLE) != "").unique()


def chosen_titles(counted: pl.DataFrame) -> pl.DataFrame:
    """Choose for each item the title that most of its users have; of several, the smallest text.

    counted: `item_id`, `title` and `people`, the number of users who have this title for this item.
    """
    ranked = counted.sort(ITEM, "people", TITLE, descending=[False, True, False])
    return ranked.unique(ITEM, keep="first", maintain_order=True).select(ITEM, TITLE)


def title_notes(log: Log, mode: str) -> list[str]:
    """Return the note about a column that looks like titles but was not requested, if there is one."""
    name = log.unused_title
    if name is None or mode == PUBLIC:
        return []
    asking = f"give --title {name} if it contains titles of items (they are published), or --catalogue FILE"
    return [f"column {name!r} is not used: {asking if mode == LOG else 'titles come from --catalogue FILE only'}"]


def make_catalogue(ids: pl.Series, titles: pl.DataFrame | None) -> pl.DataFrame:
    """Number items 1..M in the order of `ids`, with titles where there are any."""
    catalogue = _numbered(pl.DataFrame({ITEM: ids}))
    if titles is None:
        return catalogue
    named = titles.select(key=pl.col(ITEM).cast(pl.String), title=pl.col(TITLE)).unique("key", keep="first")
    keyed = catalogue.with_columns(key=pl.col(ITEM).cast(pl.String))
    return keyed.join(named, on="key", how="left", maintain_order="left").drop("key")


def _numbered(items: pl.DataFrame) -> pl.DataFrame:
    return items.insert_column(0, pl.Series("item", np.arange(1, len(items) + 1, dtype=np.int32)))
