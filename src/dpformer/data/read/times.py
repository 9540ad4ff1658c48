"""Times as sortable numbers: epoch seconds, milliseconds, dates, ISO text.

Numbers stay as they are, because they are only compared; dates and ISO text become nanoseconds.
"""

from dataclasses import dataclass
from datetime import datetime, timezone

import polars as pl

from dpformer.data.read.columns import TIME
from dpformer.data.read.log import Log
from dpformer.errors import DataError

# 2100-01-01 in seconds. Milliseconds read as seconds are always later.
LATEST = 4_102_444_800
_CURE = "write epoch seconds, milliseconds or ISO text (2020-05-17T12:00:00) from 1970 to 2099, or drop that row"


@dataclass(frozen=True)
class Unit:
    """A unit of time: units per second, and the smallest number accepted."""

    name: str
    per_second: int
    smallest: int = 0

    def text(self, value: float) -> str:
        """Format a value as UTC time, to the second."""
        return datetime.fromtimestamp(int(value) // self.per_second, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


# 10**11 ms is 1973-03-03; 10**11 s is the year 5138, so the ranges of the units do not overlap.
SECONDS, MILLISECONDS, NANOSECONDS = Unit("seconds", 1), Unit("milliseconds", 1000, 10**11), Unit("dates", 10**9)
UNITS = (SECONDS, MILLISECONDS, NANOSECONDS)


def time_expression(log: Log) -> tuple[pl.Expr, bool]:
    """Return how to read the column `timestamp`, and whether the result is nanoseconds.

    Values that cannot be read become null; `check_times` reports them.
    """
    time, dtype = pl.col(TIME), log.schema()[TIME]
    if dtype.is_integer() or dtype.is_float() or dtype.is_decimal() or dtype == pl.Null:
        return time.cast(pl.Float64 if not dtype.is_integer() else pl.Int64, strict=False), False
    if dtype.is_temporal() and dtype not in (pl.Time, pl.Duration):
        # int64 nanoseconds do not hold every year, so check the range in microseconds first.
        second = time.cast(pl.Datetime("us"), strict=False).to_physical() // 10**6
        nanoseconds = time.cast(pl.Datetime("ns"), strict=False).to_physical()
        return pl.when(second.is_between(0, LATEST - 1)).then(nanoseconds), True
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = time.cast(pl.String).str.strip_chars()
        number = text.cast(pl.Float64, strict=False)
        first = log.collect(log.frame.filter(text.is_not_null()).head(1).select(number))
        if len(first) and first.item() is not None:
            return number, False
        return _iso(text), True
    raise DataError(f"{log.name}: column {log.columns[TIME]!r} has type {dtype}, which is not a time; {_CURE}")


def _iso(text: pl.Expr) -> pl.Expr:
    """Parse ISO 8601: a date, or date and time, with or without fraction and offset. Without offset it is UTC."""
    spaced = text.str.replace("[Tt]", " ").str.replace("[Zz]$", "+00:00")
    clock = "%Y-%m-%d %H:%M:%S%.f"
    with_offset = spaced.str.to_datetime(clock + "%#z", time_unit="ns", time_zone="UTC", strict=False)
    forms = [
        with_offset.dt.replace_time_zone(None),
        spaced.str.to_datetime(clock, time_unit="ns", strict=False),
        spaced.str.to_datetime("%Y-%m-%d %H:%M", time_unit="ns", strict=False),
        spaced.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("ns"), strict=False),
    ]
    # Years outside the range of int64 nanoseconds would wrap around to a valid time.
    plausible = text.str.slice(0, 4).cast(pl.Int32, strict=False).is_between(1970, 2099)
    return pl.when(plausible).then(pl.coalesce(forms)).to_physical()


def check_times(log: Log, times: pl.Series, nanoseconds: bool) -> Unit:
    """Return the unit of the times; raise an error for the first time that is missing or out of range."""
    unit = NANOSECONDS if nanoseconds else unit_of(large_times(times), len(times))
    sound = sound_times(times, unit)
    if sound.all():
        return unit
    row = int((~sound).arg_max() or 0)
    raise bad_time(log, row, times[row] is None, unit)


def large_times(times: pl.Series) -> int:
    """Count numbers that are large enough to be milliseconds."""
    return int((times >= MILLISECONDS.smallest).sum() or 0)


def unit_of(large: int, events: int) -> Unit:
    """Choose the unit of numbers: milliseconds if most are large enough."""
    return MILLISECONDS if 2 * large > events else SECONDS


def sound_times(times: pl.Series, unit: Unit) -> pl.Series:
    """Which times are between 1970 and 2100, bool."""
    sound = times.is_between(unit.smallest, LATEST * unit.per_second - 1).fill_null(False)
    return sound & times.is_not_nan().fill_null(False) if times.dtype.is_float() else sound


def bad_time(log: Log, row: int, unreadable: bool, unit: Unit) -> DataError:
    """Return the error for a time that is missing, unreadable or out of range."""
    raw = log.collect(log.frame.select(TIME).slice(row, 1)).item()
    if raw is None or raw == "":
        return log.error(row, TIME, "no time", _CURE)
    if (isinstance(raw, int | float) and raw < 0) or str(raw).startswith("-"):
        return log.error(row, TIME, f"the time {raw} is negative", _CURE)
    if unreadable and not isinstance(raw, datetime):
        return log.error(
            row, TIME, f"{raw!r} is not a recognised time" + (", unlike the first row" if row else ""), _CURE
        )
    return log.error(row, TIME, f"the time {raw} (read as {unit.name}) is out of range", _CURE)
