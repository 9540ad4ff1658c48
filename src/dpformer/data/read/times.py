"""Times as sortable numbers: epoch seconds, milliseconds, dates, text.

Numbers stay as they are, because they are only compared; dates and ISO text become nanoseconds.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from zoneinfo import available_timezones

import polars as pl

from dpformer.data.read.columns import TIME
from dpformer.data.read.log import Log, first_row
from dpformer.errors import DataError

# 2100-01-01 in seconds. Milliseconds read as seconds are always later.
LATEST = 4_102_444_800
_CURE = (
    "write epoch seconds, milliseconds or ISO text (2020-05-17T12:00:00) from 1970 to 2099, give the format with --time-format, "
    "or drop that row"
)
# Dates that people may mean as times, whether or not they can be read without --time-format: 5/17/2025, 17-5-25, 17 May 2025.
_DATE = (
    r"(?i)^(\d{1,2}[-/.]\d{1,2}[-/.](\d{2}|\d{4})|\d{4}[/.]\d{1,2}[/.]\d{1,2}|"
    r"([a-z]{3,9},?\s+)?(\d{1,2}[-\s]+)?(jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]*[-.,\s]+\d{1,4})([,\sT]|$)"
)
# A named zone at the end of a time.
_REGION = r"\s([A-Za-z]+/[A-Za-z_+\-0-9/]+)$"


@dataclass(frozen=True)
class Unit:
    """A unit of time: units per second, and the smallest number accepted."""

    name: str
    per_second: int
    smallest: int = 0

    def text(self, value: float) -> str:
        """Format a value as UTC time, to the second."""
        return datetime.fromtimestamp(int(value) // self.per_second, UTC).strftime("%Y-%m-%d %H:%M:%S")


# 10**11 ms is 1973-03-03; 10**11 s is the year 5138, so the ranges of the units do not overlap.
SECONDS, MILLISECONDS, NANOSECONDS = Unit("seconds", 1), Unit("milliseconds", 1000, 10**11), Unit("dates", 10**9)


def time_expression(log: Log) -> tuple[pl.Expr, bool]:
    """Return how to read the column `timestamp`, and whether the result is nanoseconds.

    Values that cannot be read become null; `check_times` reports them.
    """
    time, dtype = pl.col(TIME), log.schema()[TIME]
    if log.time_format is not None and not dtype.is_temporal():
        return _formatted(time.cast(pl.String).str.strip_chars(), log.time_format), True
    if dtype.is_integer() or dtype.is_float() or dtype.is_decimal() or dtype == pl.Null:
        return time.cast(pl.Float64 if not dtype.is_integer() else pl.Int64, strict=False), False
    if dtype.is_temporal() and dtype not in (pl.Time, pl.Duration):
        units = (time.cast(pl.Datetime(unit), strict=False) for unit in ("us", "ns"))
        return _nanoseconds(*units), True
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        text = time.cast(pl.String).str.strip_chars()
        filled = text.is_not_null() & (text != "") & ~text.str.to_lowercase().is_in(log.nulls)
        number = text.cast(pl.Float64, strict=False)
        first = log.collect(log.frame.filter(filled).head(1).select(number=number, zone=text.str.extract(_REGION)))
        if len(first) and first["number"][0] is not None:
            return number, False
        zones: list[str] = []
        if len(first) and first["zone"][0] is not None:
            zones = log.collect(log.frame.select(text.str.extract(_REGION).drop_nulls().unique())).to_series().to_list()
        return text_times(text, zones), True
    raise DataError(f"{log.name}: column {log.columns[TIME]!r} has type {dtype}, which is not a time; {_CURE}")


def _nanoseconds(microseconds: pl.Expr, nanoseconds: pl.Expr | None = None) -> pl.Expr:
    """Physical nanoseconds of times between 1970 and 2099, else null: int64 nanoseconds do not hold every year."""
    sound = (microseconds.to_physical() // 10**6).is_between(0, LATEST - 1)
    return pl.when(sound).then(
        (microseconds.cast(pl.Datetime("ns")) if nanoseconds is None else nanoseconds).to_physical()
    )


def _formatted(text: pl.Expr, form: str) -> pl.Expr:
    """Parse by a strftime pattern; a `DataError` if it is none."""
    if "%z" in form or "%:z" in form or "%#z" in form:
        read = text.str.to_datetime(form, time_unit="us", time_zone="UTC", strict=False).dt.replace_time_zone(None)
    else:
        dates = text.str.to_date(form, strict=False).cast(pl.Datetime("us"), strict=False)
        read = pl.coalesce(text.str.to_datetime(form, time_unit="us", strict=False), dates)
    try:
        example = pl.DataFrame({TIME: [datetime(2025, 2, 1, tzinfo=UTC).strftime(form)]})
        reason = "it reads no date" if example.select(_nanoseconds(read)).item() is None else ""
    except (pl.exceptions.PolarsError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
    if reason:
        raise DataError(f"--time-format {form!r} cannot be used ({reason}); write one such as '%d/%m/%Y %H:%M'")
    return _nanoseconds(read)


def text_times(text: pl.Expr, zones: Sequence[str] = ()) -> pl.Expr:
    """Parse ISO 8601, or day.month.year: a date, or date and time, with or without fraction, and offset, UTC or a named zone.

    Without one it is UTC. zones: names of zones that occur, such as Europe/Berlin. Returns physical nanoseconds.
    """
    iso = text.str.replace(r"^(\d\d?)\.(\d\d?)\.(\d{4})", "${3}-${2}-${1}").str.replace(r"(\d)[Tt](\d)", "${1} ${2}")
    spaced = iso.str.replace(r"\[[^\]]*\]$", "").str.replace(r"\s*([Zz]|UTC|GMT)$", "+00:00")
    zone, plain = spaced.str.extract(_REGION), spaced.str.replace(_REGION, "")
    clocks = ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M")
    local = pl.coalesce(
        *(plain.str.to_datetime(form, time_unit="ns", strict=False) for form in clocks),
        plain.str.to_date("%Y-%m-%d", strict=False).cast(pl.Datetime("ns"), strict=False),
    )
    forms = [spaced.str.to_datetime(f"{form}%#z", time_unit="ns", time_zone="UTC", strict=False) for form in clocks]
    forms = [form.dt.replace_time_zone(None) for form in forms] + [pl.when(zone.is_null()).then(local)]
    for name in available_timezones().intersection(zones):
        there = local.dt.replace_time_zone(name, ambiguous="earliest", non_existent="null")
        forms.append(pl.when(zone == name).then(there.dt.convert_time_zone("UTC").dt.replace_time_zone(None)))
    # Years outside the range of int64 nanoseconds would wrap around to a valid time.
    year = iso.str.extract(r"^(\d{4})").cast(pl.Int32, strict=False)
    return pl.when(year.is_between(1970, 2099)).then(pl.coalesce(forms)).to_physical()


def looks_like_times(column: pl.Series, numbers: bool = True) -> bool:
    """Whether most values of a column are dates or times of any form; numbers: or seconds or milliseconds, 2001 to 2033."""
    values = column.drop_nulls()
    if column.dtype.is_temporal():
        return column.dtype not in (pl.Time, pl.Duration)
    if values.dtype == pl.String:
        values = values.str.strip_chars().replace("", None).drop_nulls()
    if not len(values) or not (values.dtype == pl.String or values.dtype.is_numeric()):
        return False
    number = values.cast(pl.Float64, strict=False)
    likely = (number.is_between(10**9, 2 * 10**9) | number.is_between(10**12, 2 * 10**12)) & numbers
    if values.dtype == pl.String:
        zones = values.str.extract(_REGION).drop_nulls().unique().to_list()
        read = values.to_frame(TIME).select(text_times(pl.col(TIME), zones)).to_series()
        likely = likely.fill_null(False) | read.is_not_null() | values.str.contains(_DATE)
    return 2 * int(likely.sum()) > len(values)


def check_times(log: Log, events: pl.LazyFrame, missing: pl.Expr, filled: int) -> Unit:
    """Return the unit of the times; raise an error for the first time that is unreadable or out of range.

    events: with the times as numbers. missing: where there is none; filled: how many there are.
    """
    time, unit = pl.col(TIME), NANOSECONDS
    if not time_expression(log)[1]:
        large = log.collect(events.select((time >= MILLISECONDS.smallest).sum())).item() or 0
        unit = MILLISECONDS if 2 * large > filled else SECONDS
    sound = time.is_between(unit.smallest, LATEST * unit.per_second - 1)
    if events.collect_schema()[TIME].is_float():
        sound = sound & time.is_not_nan()
    row = first_row(log, events, ~(sound.fill_null(False) | missing))
    if row is not None:
        raise _bad_time(log, row, log.collect(events.select(TIME).slice(row, 1)).item() is None, unit)
    return unit


def _bad_time(log: Log, row: int, unreadable: bool, unit: Unit) -> DataError:
    """Return the error for a time that is missing, unreadable or out of range."""
    raw = log.collect(log.frame.select(TIME).slice(row, 1)).item()
    if (isinstance(raw, int | float) and raw < 0) or str(raw).startswith("-"):
        return log.error(row, TIME, f"the time {raw} is negative", _CURE)
    if unreadable and isinstance(raw, str) and log.time_format is not None:
        cure = "give the format that the times have, or drop that row"
        return log.error(row, TIME, f"{raw!r} does not match --time-format {log.time_format!r}", cure)
    if unreadable and not isinstance(raw, datetime):
        return log.error(
            row, TIME, f"{raw!r} is not a recognised time" + (", unlike the first row" if row else ""), _CURE
        )
    return log.error(row, TIME, f"the time {raw} (read as {unit.name}) is out of range", _CURE)
