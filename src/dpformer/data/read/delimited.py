"""Delimited text: CSV, TSV, MovieLens' `::`, RecBole's `.inter`, SASRec's `user item`, Amazon's ratings without header.

All fields are read as text, so `007` and `7` are different ids. Item ids stay text; user ids become numbers later, if all
of them are whole numbers.
"""

import csv
import functools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.data.read.columns import ITEM, RATING, TIME, TITLE, USER, Wanted, find_columns
from dpformer.data.read.log import READ_ERRORS, Log, first_line
from dpformer.data.read.text import csv_rows, first_line_of, numbered_lines, rows_of
from dpformer.errors import DataError

SEPARATORS = (",", "\t", ";", "|", " ")
# TSV and files separated by spaces (SASRec) have no quoting rules: a quote is a character like any other.
_QUOTED = (",", ";", "|")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")
# Columns of a file without a header, by their number, in the order of MovieLens and Amazon.
_PLACES = {2: (USER, ITEM), 3: (USER, ITEM, TIME), 4: (USER, ITEM, RATING, TIME)}


@dataclass(frozen=True)
class Layout:
    """How rows are split. first: the cells of row 1, which are the column names if there is a header."""

    path: Path
    format: str
    separator: str
    first: tuple[str, ...]
    header: bool = False
    quoted: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Column names: `column_1`, `column_2`, ... without a header."""
        return self.first if self.header else tuple(f"column_{place + 1}" for place in range(len(self.first)))


def read_delimited(path: Path, text: str, wanted: Wanted) -> Log:
    """Open delimited text; `text` is the start of the file, which shows the layout."""
    layout = _layout(path, text, wanted)
    columns = _columns(layout, wanted)
    twice = [name for name in set(layout.names) if name and layout.names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename one in the first line")
    if layout.quoted and not wanted.items:  # a catalogue is public, so its fields may span lines
        _check_quotes(layout)
    if layout.separator == "::":
        frame = _split_lines(layout)
    else:
        quote, names = '"' if layout.quoted else None, list(layout.names)
        form: dict[str, Any] = {"has_header": layout.header, "separator": layout.separator, "quote_char": quote}
        rows = pl.scan_csv(path, infer_schema=False, new_columns=names, **form)
        frame = rows.filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
    explain = functools.partial(_fault, layout)
    # Rows that are split at `::` have the same number of fields, or are refused.
    by_rows = not layout.header and layout.separator != "::"
    return Log(frame, str(path), layout.format, columns, explain, (path,), untyped_ids=True, named_by_rows=by_rows)


def _layout(path: Path, text: str, wanted: Wanted) -> Layout:
    first = first_line_of(text)
    if "::" in first:
        return Layout(path, "MovieLens ::", "::", tuple(first.split("::")))
    if re.search(r":(token|float)(_seq)?(\t|$)", first):
        names = tuple(cell.rsplit(":", 1)[0] for cell in first.split("\t"))
        return Layout(path, "RecBole .inter", "\t", names, header=True)
    separator = _separator(path, text, wanted)
    quoted = separator in _QUOTED
    cells = rows_of(text, separator, quoted)[0]
    names = tuple(cell.strip() for cell in cells)
    kind = {",": "CSV", "\t": "TSV", " ": "text with spaces"}.get(separator, f"CSV with {separator!r}")
    if _is_header(names, wanted):
        return Layout(path, kind, separator, names, True, quoted)
    return Layout(path, f"{kind}, no header", separator, tuple(cells), False, quoted)


def _separator(path: Path, text: str, wanted: Wanted) -> str:
    """Choose the separator with which row 1 names user and item, else the one that splits rows most evenly."""
    first = first_line_of(text)
    # A catalogue may have only one column, the id, and its name may contain a space.
    if wanted.items and wanted.named(ITEM, [first.strip('" ')]) and not set(first) & set(",\t;|"):
        return ","
    widths = {}
    for separator in SEPARATORS:
        rows = rows_of(text, separator, separator in _QUOTED)[:100]
        if len([cell for cell in rows[0] if cell]) < 2:
            continue
        if all(wanted.named(role, rows[0]) for role in wanted.required):
            return separator
        widths[separator] = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
    if not widths:
        one = "row 1 has one field only; separate user, item and time by comma, tab, semicolon, | or space"
        unnamed = "row 1 does not name the item; add a first line with the name item_id"
        raise DataError(f"{path}: {unnamed if wanted.items else one}")
    return max(widths, key=lambda separator: widths[separator])


def _is_header(cells: tuple[str, ...], wanted: Wanted) -> bool:
    """Whether row 1 names the roles, or at least has no number and no option mentions `column_1`."""
    if all(wanted.named(role, cells) for role in wanted.required):
        return True
    by_place = any(re.fullmatch(r"column_\d+", name) for name in wanted.asked.values())
    return not by_place and not any(_NUMBER.fullmatch(cell) for cell in cells)


def _columns(layout: Layout, wanted: Wanted) -> dict[str, str]:
    """Map roles to names; without a header the order decides."""
    path, first = layout.path, layout.first
    if layout.header:
        try:
            return find_columns(layout.names, wanted, str(path))
        except DataError as error:
            if wanted.asked or wanted.items:
                raise
            raise DataError(f"{error.typed}, or --user column_1 --item column_2 if the file has no header") from None
    if wanted.items:
        # MovieLens' `movies.dat`: id::title::genres.
        if layout.separator != "::":
            raise DataError(f"{path}: has no header; add a first line that names the columns, such as item_id,title")
        return {ITEM: layout.names[0], TITLE: layout.names[1]} | dict(wanted.asked)
    if wanted.asked:
        if not {USER, ITEM} <= set(wanted.asked):
            raise DataError(f"{path}: has no header; give both --user column_N and --item column_N")
        return find_columns(layout.names, wanted, str(path))
    # Some files have a separator at the end of each line.
    width = len(first) - (first[-1] == "")
    if width not in _PLACES or (width > 2 and not _like_time(first[width - 1])):
        raise DataError(
            f"{path}: has no header, and the last of {width} columns is not a time; give --user column_1 --item column_2 "
            "and, if there is one, --time column_N"
        )
    return dict(zip(_PLACES[width], layout.names, strict=False))


def _like_time(cell: str) -> bool:
    """Whether a cell is a date or a number of seconds after 1973; ratings and small ids are smaller."""
    return bool(_DATE.match(cell)) or (bool(_NUMBER.fullmatch(cell)) and float(cell) >= 1e8)


def _split_lines(layout: Layout) -> pl.LazyFrame:
    """Split lines at `::`. CSV readers take only one character as separator."""
    width = len(layout.names)
    if _first_line(layout, pl.col("line").str.count_matches("::", literal=True) != width - 1) is not None:
        raise _fault(layout, ValueError("rows of different lengths"))
    fields = pl.col("line").str.split_exact("::", width - 1).struct.rename_fields(layout.names)
    return pl.scan_lines(layout.path).filter(pl.col("line") != "").select(fields).unnest("line")


def _check_quotes(layout: Layout) -> None:
    """Raise an error for the first line with an odd number of quotes, where a quoted field goes on after the line's end.

    A reader would join all lines up to the next such line into one row: the quotes of one person would delete the events of
    other people between them.
    """
    odd = _first_line(layout, pl.col("line").str.count_matches('"', literal=True) % 2 == 1)
    if odd is not None:
        raise DataError(
            f"{layout.path}: line {odd} has an odd number of quotes (\"), so a field would span lines, and one user's quotes "
            'could remove other users\' events; write each quote in a field twice (""), put that field into "quotes" and '
            "replace line breaks in it by spaces, or save the log as Parquet"
        )


def _first_line(layout: Layout, wrong: pl.Expr) -> int | None:
    """The number of the first line that is not empty and meets a condition."""
    lines = pl.scan_lines(layout.path).with_row_index("number", offset=1).filter(pl.col("line") != "")
    try:
        numbers = lines.filter(wrong).select("number").head(1).collect(engine="streaming")
    except READ_ERRORS as error:
        raise _fault(layout, error) from None
    return numbers.item() if len(numbers) else None


def _fault(layout: Layout, error: BaseException) -> DataError:
    """Find out why a file cannot be read, row by row. Only errors need this."""
    path, width, even = layout.path, len(layout.names), layout.separator == "::"
    cure = 'put fields that hold the separator into "quotes"' if layout.quoted else "correct or drop that row"
    quotes = 'put the whole field into "quotes" and write each quote in it twice ("")'
    lines = (line for _, line in numbered_lines(path))
    number = 0 if layout.header else 1
    try:
        for row in csv_rows(lines, layout.separator, layout.quoted, strict=True):
            if len(row) > width or (even and len(row) < width):
                return DataError(f"{path}: row {number} has {len(row)} fields where the first line has {width}; {cure}")
            number += bool(row)
        for line_number, line in numbered_lines(path):
            if layout.quoted and line.count('"') % 2:
                return DataError(f"{path}: line {line_number} has a quote inside a field; {quotes}")
    except DataError as fault:
        return fault
    except csv.Error:
        return DataError(f"{path}: row {number} has a quote that is not closed; {quotes}")
    return DataError(f"{path}: cannot be read ({first_line(error)}); save it again")
