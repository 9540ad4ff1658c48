"""A log as it was found: a lazy frame of its events in file order, and how to speak of it in an error."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpformer.errors import DataError

# A damaged Parquet file can make polars panic, which is no ordinary exception.
READ_ERRORS = (pl.exceptions.PolarsError, pl.exceptions.PanicException, OSError)


@dataclass(frozen=True)
class Log:
    """Events in file order, not yet read.

    frame: columns `user_id`, `item_id` and, where the log has one, `timestamp`; `title` if asked for; types as in the file.
    name: how messages call the log. columns: role to the column's own name.
    explain: turns an exception of the reader into the line that a user can act on.
    files: what it was read from (none for a frame in memory; several are Parquet).
    untyped_ids: ids come from text that has no types (CSV and its kin).
    unused_title: the column that looks like titles and was not asked for.
    """

    frame: pl.LazyFrame
    name: str
    format: str
    columns: dict[str, str]
    explain: Callable[[BaseException], DataError]
    files: tuple[Path, ...] = ()
    untyped_ids: bool = False
    unused_title: str | None = None

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Read what was asked of `frame`, in a stream; what goes wrong becomes the line that a user can act on."""
        try:
            return frame.collect(engine="streaming")
        except READ_ERRORS as error:
            raise self.explain(error) from None

    def schema(self) -> pl.Schema:
        """Names and types of the columns; the first look at a file may already fail."""
        return self.collect(self.frame.head(0)).schema

    def place(self, row: int) -> str:
        """The file and row (from 1, header not counted) of the event with this index; counts rows only when asked."""
        file: Path | str = self.files[0] if self.files else self.name
        for file in self.files if len(self.files) > 1 else ():
            rows = scan(file).select(pl.len()).collect().item()
            if row < rows:
                break
            row -= rows
        return f"{file}: row {row + 1}"

    def error(self, row: int, role: str, wrong: str, cure: str) -> DataError:
        """The one line about a bad value: file, row, column, what is wrong, the cure."""
        return DataError(f"{self.place(row)}, column {self.columns[role]!r}: {wrong}; {cure}")


def scan(file: Path | str) -> pl.LazyFrame:
    """A Parquet file by its name as it is: `[a]` is no pattern, and a folder may be called `user=7` without meaning a column."""
    return pl.scan_parquet(file, glob=False, hive_partitioning=False)


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: polars adds stacks and advice that a user of ours cannot follow."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
