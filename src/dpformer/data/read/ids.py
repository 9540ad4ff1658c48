"""Ids of any type, numbered 0..n-1, and missing values.

Ids are numbered in sorted order, never by frequency or first appearance: the catalogue is published with a model, and its
order must reveal nothing about the users.
"""

from dataclasses import dataclass

import numpy as np
import polars as pl

from dpformer.data.read.columns import ITEM, TIME, USER
from dpformer.data.read.log import Log, first_row
from dpformer.errors import DataError

# Spellings of "no value", compared without case and surrounding blanks. A blank value is always missing.
NULLS = ("null", "nan", "none", "n/a", "na", "nil", "undefined")
# Bool: whether an event has no time; a time that cannot be read is another matter.
NO_TIME = "no time"


@dataclass(frozen=True)
class Coded:
    """A column of ids. codes: int32 [events], indices into `ids`; ids: distinct and sorted, whole numbers or text."""

    codes: np.ndarray
    ids: pl.Series


def id_expression(log: Log, role: str) -> pl.Expr:
    """Read ids as whole numbers or as categorical text, which takes four bytes per event."""
    column, dtype = pl.col(role), log.schema()[role]
    if dtype.is_integer() and dtype not in (pl.UInt64, pl.Int128, pl.UInt128):
        return column.cast(pl.Int64)
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = column.cast(pl.String)
        if log.fold_users and role == USER:
            text = text.str.strip_chars().str.to_lowercase()
        return pl.when(text != "").then(text).cast(pl.Categorical)
    if dtype == pl.Binary:
        return column.bin.encode("hex").cast(pl.Categorical)
    if dtype.is_float():
        return _whole_floats(log, role)
    if dtype.is_numeric() or dtype.is_temporal() or dtype in (pl.Boolean, pl.Null):
        return column.cast(pl.String).cast(pl.Categorical)
    name = log.columns[role]
    raise DataError(f"{log.name}: column {name!r} has type {dtype}, which is not an id; give whole numbers or text")


def _whole_floats(log: Log, role: str) -> pl.Expr:
    """Whole numbers beside missing values, as pandas has them, are whole numbers: one missing id changes nobody else's."""
    column = pl.col(role).fill_nan(None)
    row = first_row(log, log.frame, ~((column == column.floor()) & (column.abs() < 2**53)).fill_null(True))
    if row is not None:
        raise log.error(row, role, "this float is not an id", "give whole numbers below 2^53, or text")
    return column.cast(pl.Int64)


def check_item_ids(log: Log, ids: pl.Series) -> None:
    """Raise an error for the first item of a catalogue without an id."""
    if lacking := ids.null_count():
        cure = f"every item needs one: fill it in or drop that row ({lacking:,} rows)"
        raise log.error(int(ids.is_null().arg_max() or 0), ITEM, "no item", cure)


def whole_numbers(ids: pl.Series) -> pl.Series:
    """Parse whole numbers; null for other text and for other notations (`007`, `+7`)."""
    numbers = ids.cast(pl.Int64, strict=False)
    return numbers.set(~(numbers.cast(pl.String) == ids).fill_null(False), None)


def sorted_ids(ids: pl.Series, untyped: bool) -> pl.Series:
    """Sort distinct ids: numbers by value, text by code point.

    untyped: ids from text formats, in natural order: whole numbers by value, then other text by code point. The order of two
    ids never depends on a third.

    >>> sorted_ids(pl.Series(["b", "10", "007", "9"]), untyped=True).to_list()
    ['9', '10', '007', 'b']
    """
    if not untyped:
        return ids.sort()
    return pl.DataFrame({"number": whole_numbers(ids), "id": ids}).sort("number", "id", nulls_last=True)["id"]


def encode_items(column: pl.Series, untyped: bool) -> Coded:
    """Number item ids. Text stays text, so that one id cannot change the type of the others."""
    if column.dtype != pl.Categorical:
        return _encode_numbers(column)
    return _encode_text(column, sorted_ids(column.unique().cast(pl.String), untyped))


def encode_users(column: pl.Series, untyped: bool) -> Coded:
    """Number user ids. untyped: if all are whole numbers, they become numbers."""
    if column.dtype != pl.Categorical:
        return _encode_numbers(column)
    ids = column.unique().cast(pl.String)
    numbers = whole_numbers(ids)
    if not untyped or numbers.null_count():
        return _encode_text(column, ids.sort())
    return Coded(_encode_text(column, sorted_ids(ids, untyped=True)).codes, numbers.sort())


def _encode_text(column: pl.Series, ids: pl.Series) -> Coded:
    """Index a categorical column's values in `ids`, which contains all of them."""
    physical = ids.cast(column.dtype).to_physical().to_numpy()
    place = np.zeros(int(physical.max(initial=0)) + 1, dtype=np.int32)
    place[physical] = np.arange(len(physical), dtype=np.int32)
    return Coded(place[column.to_physical().to_numpy()], ids)


def _encode_numbers(column: pl.Series) -> Coded:
    """Number whole numbers: by a table over their range if it is small enough, else by a hash table."""
    numbers = column.to_numpy()
    low, high = int(numbers.min()), int(numbers.max())
    span = high - low + 1
    if span <= 4 * len(numbers) + 1_000_000:
        return compact(Coded(numbers - low, pl.Series(np.arange(span) + low)))
    ids = column.unique().sort()
    return Coded(column.replace_strict(ids, np.arange(len(ids), dtype=np.int32)).to_numpy(), ids)


def compact(coded: Coded) -> Coded:
    """Renumber codes without the ids that do not occur."""
    present = np.bincount(coded.codes, minlength=len(coded.ids)) > 0
    place = np.cumsum(present, dtype=np.int32) - np.int32(1)
    return Coded(place[coded.codes], coded.ids.filter(pl.Series(present)))


def no_time(log: Log) -> pl.Expr:
    """Whether the time is missing."""
    time, dtype = pl.col(TIME), log.schema()[TIME]
    if dtype.is_float():
        return time.is_null() | time.is_nan()
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = time.cast(pl.String).str.strip_chars()
        return text.is_null() | (text.str.len_bytes() == 0) | text.str.to_lowercase().is_in(log.nulls)
    return time.is_null()


def missing_rows(log: Log, events: pl.LazyFrame) -> dict[str, pl.Expr]:
    """Which rows have no user, no item or no time: role to a condition. events: as read by `id_expression` and `no_time`."""
    rows = {role: pl.col(role).is_null() | _means_missing(log, events, role) for role in (USER, ITEM)}
    return rows | ({TIME: pl.col(NO_TIME)} if TIME in log.columns else {})


def _means_missing(log: Log, events: pl.LazyFrame, role: str) -> pl.Expr:
    if events.collect_schema()[role].is_integer():
        numbers = pl.Series(log.nulls, dtype=pl.String).cast(pl.Int64, strict=False).drop_nulls().to_list()
        return pl.col(role).is_in(numbers).fill_null(False)
    # There are far fewer ids than events.
    texts = log.collect(events.select(pl.col(role).unique())).to_series().cast(pl.String).drop_nulls()
    spelled = texts.filter(texts.str.strip_chars().str.to_lowercase().is_in([*log.nulls, ""])).to_list()
    return pl.col(role).cast(pl.String).is_in(spelled).fill_null(False) if spelled else pl.lit(False)


def missing_values(log: Log, lacking: dict[str, int], first: dict[str, int]) -> DataError:
    """Return the error for rows without a value. lacking, first: role to the number of such rows, and to the first of them."""
    role = min(lacking, key=lambda one: first[one])
    row = first[role]
    raw = log.collect(log.frame.select(role).slice(row, 1)).item()
    spelled = raw is not None and str(raw).strip()
    what = {name: name.removesuffix("_id").replace(TIME, "time") for name in lacking}
    each = ", ".join(f"{lacking[name]:,} without {what[name]}" for name in lacking)
    cure = f"every event needs one: fill it in, or drop such rows with --drop-missing (rows: {each})"
    if spelled:
        cure += f"; if {raw!r} is a real value, give what means missing with --null-values"
    return log.error(row, role, f"no {what[role]}" + (f" ({raw!r} means missing)" if spelled else ""), cure)


# Ids that often stand for many people.
PLACEHOLDERS = ("unknown", "anonymous", "anon", "guest", "test", "default", "deleted")
# Times the median number of events.
TOO_MANY = 100


def suspicious_users(ids: pl.Series, lengths: np.ndarray) -> list[str]:
    """Name ids that may be many people, and ids that may be one person; in sentences. lengths: events of each, int [N]."""
    notes, most = [], TOO_MANY * float(np.median(lengths[lengths > 0])) if lengths.any() else 0.0
    plain = ids.cast(pl.String).str.strip_chars().str.to_lowercase()
    several = (plain.is_in(PLACEHOLDERS) | pl.Series(lengths > max(most, 1))).to_numpy()
    for place in np.flatnonzero(several)[np.argsort(-lengths[several], kind="stable")][:5].tolist():
        notes.append(
            f"WARNING: user {ids[place]!r} has {lengths[place]:,} events and may be many people, whom the guarantee protects as "
            "one; if so, drop these events with --null-values or --where"
        )
    if several.sum() > 5:
        notes.append(
            f"WARNING: {several.sum() - 5:,} more users have over {TOO_MANY} times the median number of events"
        )
    twins = plain.is_duplicated() if ids.dtype == pl.String else pl.Series([], dtype=pl.Boolean)
    if twins.any():
        pair = ids.filter(plain == plain.filter(twins)[0]).head(2).to_list()
        notes.append(
            f"WARNING: {int(twins.sum()):,} users differ only in letter case or blanks, such as {pair[0]!r} and {pair[1]!r}: if "
            "they are one person, give --fold-users, since the guarantee is for one id"
        )
    return notes
