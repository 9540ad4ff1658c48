"""Missing values: counted once for all columns, and dropped if that is asked for. Each row is judged by itself."""

import polars as pl

from dpformer.data.read.columns import ITEM, TIME, USER
from dpformer.data.read.log import Log
from dpformer.errors import DataError

# Spellings of "no value", compared without case and surrounding blanks. A blank value is always missing.
NULLS = ("null", "nan", "none", "n/a", "na", "nil", "undefined")
# Bool: whether an event has no time; a time that cannot be read is another matter.
NO_TIME = "no time"


def no_time(log: Log) -> pl.Expr:
    """Whether the time is missing."""
    time, dtype = pl.col(TIME), log.schema()[TIME]
    if dtype.is_float():
        return time.is_null() | time.is_nan()
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = time.cast(pl.String).str.strip_chars()
        return text.is_null() | (text.str.len_bytes() == 0) | text.str.to_lowercase().is_in(log.nulls)
    return time.is_null()


def missing_rows(frame: pl.DataFrame, nulls: tuple[str, ...]) -> dict[str, pl.Series]:
    """Which rows have no user, no item or no time: role to bool [events]. frame: as read by `id_expression` and `no_time`."""
    rows = {role: _missing(frame[role], nulls) for role in (USER, ITEM)}
    return rows | ({TIME: frame[NO_TIME]} if NO_TIME in frame.columns else {})


def _missing(ids: pl.Series, nulls: tuple[str, ...]) -> pl.Series:
    if ids.dtype.is_integer():
        numbers = pl.Series(nulls, dtype=pl.String).cast(pl.Int64, strict=False).drop_nulls()
        return ids.is_null() | ids.is_in(numbers.implode()).fill_null(False)
    texts = ids.unique().cast(pl.String).drop_nulls()  # there are far fewer ids than events
    plain = texts.str.strip_chars().str.to_lowercase()
    blank = texts.filter(plain.is_in([*nulls, ""]))
    return ids.is_null() | (ids.cast(pl.String).is_in(blank.implode()).fill_null(False) if len(blank) else False)


def missing_values(log: Log, counts: dict[str, int], first: dict[str, int | None]) -> DataError:
    """Return the error for rows without a value. counts, first: role to the number of such rows, and to the first of them."""
    lacking = [role for role in counts if counts[role]]
    role = min(lacking, key=lambda one: first[one] or 0)
    row = first[role] or 0
    raw = log.collect(log.frame.select(role).slice(row, 1)).item()
    spelled = raw is not None and str(raw).strip()
    what = {name: name.removesuffix("_id").replace(TIME, "time") for name in lacking}
    each = ", ".join(f"{counts[name]:,} without {what[name]}" for name in lacking)
    cure = f"every event needs one: fill it in, or drop such rows with --drop-missing (rows: {each})"
    if spelled:
        cure += f"; if {raw!r} is a real value, give what means missing with --null-values"
    return log.error(row, role, f"no {what[role]}" + (f" ({raw!r} means missing)" if spelled else ""), cure)
