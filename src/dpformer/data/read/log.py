"""A log before its events are read, and the text that errors use to describe it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl

from dpformer.errors import DataError
from dpformer.where import Condition

# A damaged Parquet file can make polars panic; a panic is not a `PolarsError`.
READ_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)
# Rows that show what a column holds.
SAMPLE_ROWS = 100


@dataclass(frozen=True)
class Log:
    """Events in file order, not yet read.

    frame: `user_id`, `item_id`, and `timestamp` if the log has times; `title` if requested; types as in the file.
    name: the log in messages. columns: role to the column's own name. explain: turns a reader's exception into an error message.
    files: none for a frame in memory. parts: the rows of each file. untyped_ids: ids come from a format without types (CSV).
    unused_title: a column that looks like titles and was not requested. sample: rows with all columns, if `frame` has not all.
    raw: the table before `keep`, the condition on rows, if there is one. nulls: spellings of missing values. time_format: how
    times are written, if that was given. fold_users: whether letter case and blanks of user ids are ignored.
    named_by_rows: whether people's rows say which columns there are: JSON lines, and files without a header.
    """

    frame: pl.LazyFrame
    name: str
    format: str
    columns: dict[str, str]
    explain: Callable[[BaseException], DataError]
    files: tuple[Path, ...] = ()
    untyped_ids: bool = False
    unused_title: str | None = None
    sample: pl.LazyFrame | None = None
    raw: pl.LazyFrame | None = None
    keep: Condition | None = None
    nulls: tuple[str, ...] = ()
    time_format: str | None = None
    fold_users: bool = False
    named_by_rows: bool = False
    parts: tuple[pl.LazyFrame, ...] = ()

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Read `frame` as a stream."""
        try:
            return frame.collect(engine="streaming")
        except READ_ERRORS as error:
            raise self.explain(error) from None

    def schema(self) -> pl.Schema:
        """Names and types of the columns."""
        return self.collect(self.frame.head(0)).schema

    def place(self, row: int) -> str:
        """Return file and row (from 1, without header) of an event."""
        if self.raw is not None and self.keep is not None:
            kept = self.raw.with_row_index("row").filter(self.keep.expression).select("row")
            row = int(self.collect(kept.slice(row, 1)).item())
        place = 0
        while place < len(self.parts) - 1 and row >= (rows := self.parts[place].select(pl.len()).collect().item()):
            place, row = place + 1, row - rows
        return f"{self.files[place] if self.files else self.name}: row {row + 1}"

    def error(self, row: int, role: str, wrong: str, cure: str) -> DataError:
        """Return the error for a bad value: file, row, column, problem, cure."""
        return DataError(f"{self.place(row)}, column {self.columns[role]!r}: {wrong}; {cure}")

    def dropped(self) -> int:
        """Count the rows that the condition drops; an error for the first value that it cannot read."""
        if self.raw is None or self.keep is None:
            return 0
        for name, (kind, unreadable) in self.keep.unreadable.items():
            wrong = self.collect(self.raw.with_row_index("row").filter(unreadable).select("row", name).head(1))
            if len(wrong):
                where = replace(self, keep=None).place(int(wrong["row"][0]))
                raise DataError(
                    f"{where}, column {name!r}: {wrong[name][0]!r} is not {kind}, which --where needs; correct that row"
                )
        counts = self.collect(self.raw.select(pl.len(), kept=self.keep.expression.sum()))
        return int(counts["len"][0]) - int(counts["kept"][0])


def scan(file: Path | str) -> pl.LazyFrame:
    """Open one Parquet file. `[a]` in its path is not a pattern, and a folder `user=7` is not a column."""
    return pl.scan_parquet(file, glob=False, hive_partitioning=False)


def first_row(log: Log, events: pl.LazyFrame, wrong: pl.Expr) -> int | None:
    """The number of the first event that meets a condition."""
    rows = log.collect(events.with_row_index("row").filter(wrong).select("row").head(1))
    return int(rows["row"][0]) if len(rows) else None


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: polars adds stack traces and internal advice.

    Ctrl-C while polars calls Python makes it panic. That is no fault of the file: it is raised as what it was.
    """
    if isinstance(error, pl.exceptions.PanicException) and "<class 'KeyboardInterrupt'>" in str(error):
        raise KeyboardInterrupt from None
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
