"""Time as a number to sort by: epoch seconds or milliseconds, dates, ISO text.

Numbers stay as they are (nothing is gained by converting what is only compared); dates and ISO text become
nanoseconds. `Unit` says which, for the check of the range and for the span that is reported.
"""

from dataclasses import dataclass
from datetime import datetime, timezone

import polars as pl

from dpformer.data.read.columns import TIME
from dpformer.data.read.log import Log
from dpformer.errors import DataError

# 2100-01-01 in seconds: later than any log, and a number of milliseconds read as seconds always is.
LATEST = 4_102_444_800
_CURE = "write epoch seconds, milliseconds or ISO text (2020-05-17T12:00:00) from 1970 on, or drop that row"


@dataclass(frozen=True)
class Unit:
    """A unit of time: how many make a second, and the smallest number that it may have."""

    name: str
    per_second: int
    smallest: int = 0

    def text(self, value: float) -> str:
        """The UTC time of a value, to the second."""
        return datetime.fromtimestamp(int(value) // self.per_second, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")


# Milliseconds from 1973-03-03 on; as seconds that number would be the year 5138, so the units never overlap.
UNITS = SECONDS, MILLISECONDS, NANOSECONDS = (
    Unit("seconds", 1),
    Unit("milliseconds", 1000, 10**11),
    Unit("dates", 10**9),
)


def time_expression(log: Log) -> tuple[pl.Expr, bool]:
    """How the column `timestamp` becomes a number, and whether that is nanoseconds (else it is a number as found).

    What cannot be read becomes null; `check_times` then names its row.
    """
    time = pl.col(TIME)
    dtype = log.schema()[TIME]
    if dtype.is_integer() or dtype.is_float() or dtype.is_decimal() or dtype == pl.Null:
        return time.cast(pl.Float64 if not dtype.is_integer() else pl.Int64, strict=False), False
    if dtype.is_temporal() and dtype not in (pl.Time, pl.Duration):
        # Microseconds hold every year; the step to nanoseconds is taken only inside the range that is accepted.
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
    raise DataError(f"{log.name}: column {log.columns[TIME]!r} is of type {dtype}, which is no time; {_CURE}")


def _iso(text: pl.Expr) -> pl.Expr:
    """ISO 8601: a date, or a date and time with or without fraction and offset; without offset it is UTC."""
    spaced = text.str.replace("[Tt]", " ").str.replace("[Zz]$", "+00:00")
    clock = "%Y-%m-%d %H:%M:%S%.f"
    with_offset = spaced.str.to_datetime(clock + "%#z", time_unit="ns", time_zone="UTC", strict=False)
    forms = [
        with_offset.dt.replace_time_zone(None),
        spaced.str.to_datetime(clock, time_unit="ns", strict=False),
        spaced.str.to_datetime("%Y-%m-%d %H:%M", time_unit="ns", strict=False),
        spaced.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("ns"), strict=False),
    ]
    # A year with four digits that nanoseconds cannot hold would wrap round into an innocent one.
    plausible = text.str.slice(0, 4).cast(pl.Int32, strict=False).is_between(1970, 2099)
    return pl.when(plausible).then(pl.coalesce(forms)).to_physical()


def check_times(log: Log, times: pl.Series, nanoseconds: bool) -> Unit:
    """The unit of the times; a `DataError` names the first event whose time is missing, unreadable or absurd."""
    unit = NANOSECONDS if nanoseconds else unit_of(large_times(times), len(times))
    sound = sound_times(times, unit)
    if sound.all():
        return unit
    row = int((~sound).arg_max() or 0)
    raise bad_time(log, row, times[row] is None, unit)


def large_times(times: pl.Series) -> int:
    """How many of the numbers are as large as milliseconds are."""
    return int((times >= MILLISECONDS.smallest).sum() or 0)


def unit_of(large: int, events: int) -> Unit:
    """The unit of numbers: milliseconds if most are as large as milliseconds are."""
    return MILLISECONDS if 2 * large > events else SECONDS


def sound_times(times: pl.Series, unit: Unit) -> pl.Series:
    """Which of the times lie between 1970 and 2100, bool."""
    sound = times.is_between(unit.smallest, LATEST * unit.per_second - 1).fill_null(False)
    return sound & times.is_not_nan().fill_null(False) if times.dtype.is_float() else sound


def bad_time(log: Log, row: int, unreadable: bool, unit: Unit) -> DataError:
    """The line about the time of an event, which is missing, unreadable or absurd."""
    raw = log.collect(log.frame.select(TIME).slice(row, 1)).item()
    if raw is None or raw == "":
        return log.error(row, TIME, "no time", _CURE)
    if (isinstance(raw, int | float) and raw < 0) or str(raw).startswith("-"):
        return log.error(row, TIME, f"the time {raw} is negative", _CURE)
    if unreadable and not isinstance(raw, datetime):
        return log.error(row, TIME, f"{raw!r} is no time" + (" as in the first row" if row else ""), _CURE)
    return log.error(row, TIME, f"the time {raw} is absurd (read as {unit.name})", _CURE)
