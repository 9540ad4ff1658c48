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
