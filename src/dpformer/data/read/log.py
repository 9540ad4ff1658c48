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
    name: how messages call the log. files: what it was read from (none for a frame in memory).
    columns: role to the column's own name. untyped_ids: ids come from text that has no types (CSV and its kin).
    explain: turns an exception of the reader into the line that a user can act on.
    place: names the file and row of the event with a given index, from 0.
    unused_title: the column that looks like titles and was not asked for.
    """

    frame: pl.LazyFrame
    name: str
    files: tuple[Path, ...]
    format: str
    columns: dict[str, str]
    untyped_ids: bool
    explain: Callable[[BaseException], DataError]
    place: Callable[[int], str]
    unused_title: str | None = None

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Read what was asked of `frame`, in a stream; what goes wrong becomes the line that a user can act on."""
        try:
            return frame.collect(engine="streaming")
        except READ_ERRORS as error:
            raise self.explain(error) from None

    def schema(self) -> pl.Schema:
        """Names and types of the columns; the first look at a file may already fail."""
        try:
            return self.frame.collect_schema()
        except READ_ERRORS as error:
            raise self.explain(error) from None

    def error(self, row: int, role: str, wrong: str, cure: str) -> DataError:
        """The one line about a bad value: file, row (from 1, header not counted), column, what is wrong, the cure."""
        return DataError(f"{self.place(row)}, column {self.columns[role]!r}: {wrong}; {cure}")


def one_file(path: Path) -> Callable[[int], str]:
    """`Log.place` for a log in one file."""
    return lambda row: f"{path}: row {row + 1}"


def first_line(error: BaseException) -> str:
    """The first line of an exception's message: polars adds stacks and advice that a user of ours cannot follow."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
