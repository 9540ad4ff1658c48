"""Rows of text: CSV, TSV, MovieLens' `::`, RecBole's `.inter`, SASRec's `user item`, Amazon's ratings without header.

Fields are read as text. Text has no types, so `007` and `7` stay two ids. Ids of items stay text; ids of users that are
all whole numbers become numbers later, where the distinct ids are known.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import polars as pl

from dpformer.data.read.columns import ITEM, RATING, TIME, TITLE, USER, Wanted, find_columns
from dpformer.data.read.log import READ_ERRORS, Log, first_line, one_file
from dpformer.data.read.text import delimited_fault, first_line_of, numbered_lines, rows_of
from dpformer.errors import DataError

SEPARATORS = (",", "\t", ";", "|", " ")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}-\d\d-\d\d")


@dataclass(frozen=True)
class Layout:
    """How the rows of a file are cut, and the names of the columns."""

    separator: str
    names: tuple[str, ...]
    header: bool
    quoted: bool
    format: str


def read_delimited(path: Path, text: str, wanted: Wanted) -> Log:
    """A log from rows of text; `text` is the sample that tells the layout."""
    layout = _layout(path, text, wanted)
    columns = _columns(path, layout, text, wanted)
    twice = [name for name in set(layout.names) if name and layout.names.count(name) > 1]
    if twice:
        raise DataError(f"{path}: two columns are called {twice[0]!r}; rename one in the first line")
    if layout.separator == "::":
        frame = _split_lines(path, layout)
    else:
        frame = pl.scan_csv(
            path,
            separator=layout.separator,
            has_header=layout.header,
            new_columns=list(layout.names),
            quote_char='"' if layout.quoted else None,
            infer_schema=False,
        ).filter(~pl.all_horizontal(pl.all().is_null()))  # blank lines
    return Log(
        frame=wanted.select(frame, columns),
        name=str(path),
        files=(path,),
        format=layout.format,
        columns=columns,
        untyped_ids=True,
        explain=lambda error: _explain(path, layout, error),
        place=one_file(path),
    )


def _explain(path: Path, layout: Layout, error: BaseException) -> DataError:
    if layout.separator != "::":
        return delimited_fault(path, layout.separator, layout.quoted, len(layout.names), layout.header, error)
    try:
        for _ in numbered_lines(path):
            pass
    except DataError as fault:
        return fault
    return DataError(f"{path}: cannot be read ({first_line(error)}); write it again")


def _layout(path: Path, text: str, wanted: Wanted) -> Layout:
    first = first_line_of(text)
    if "::" in first:
        width = first.count("::") + 1
        return Layout("::", _numbered(width), header=False, quoted=False, format="MovieLens ::")
    if re.search(r":(token|float)(_seq)?(\t|$)", first):
        names = tuple(cell.rsplit(":", 1)[0] for cell in first.split("\t"))
        return Layout("\t", names, header=True, quoted=False, format="RecBole .inter")
    separator = _separator(path, text, wanted)
    # Amazon's and SASRec's ids hold no quotes; a space-separated file has no rule for quoting.
    quoted = separator != " "
    cells = rows_of(text, separator, quoted)[0]
    names = tuple(cell.strip() for cell in cells)
    kind = {",": "CSV", "\t": "TSV", " ": "text with spaces"}.get(separator, f"CSV with {separator!r}")
    if _is_header(names, wanted):
        return Layout(separator, names, header=True, quoted=quoted, format=kind)
    return Layout(separator, _numbered(len(cells)), header=False, quoted=quoted, format=f"{kind}, no header")


def _numbered(width: int) -> tuple[str, ...]:
    return tuple(f"column_{place}" for place in range(1, width + 1))


def _separator(path: Path, text: str, wanted: Wanted) -> str:
    """The separator under which the first row names a user and an item, else the one that cuts rows most evenly."""
    if wanted.further and _one_column(first_line_of(text), wanted):
        return ","
    widths = {}
    for separator in SEPARATORS:
        rows = rows_of(text, separator, separator != " ")[:100]
        width = len([cell for cell in rows[0] if cell])
        if width < 2:
            continue
        if _names_roles(rows[0], wanted):
            return separator
        widths[separator] = sum(len(row) == len(rows[0]) for row in rows) / len(rows)
    if not widths and wanted.further:
        raise DataError(f"{path}: row 1 does not name the item; add a first line with the name item_id")
    if not widths:
        raise DataError(
            f"{path}: row 1 has one field only; separate user, item and time by comma, tab, semicolon, | or space"
        )
    return max(widths, key=lambda separator: widths[separator])


def _one_column(first: str, wanted: Wanted) -> bool:
    """Whether a file of items has one column only, the id; its name may hold a space."""
    return wanted.named(ITEM, [first.strip('" ')]) and not any(mark in first for mark in SEPARATORS if mark != " ")


def _names_roles(cells: list[str] | tuple[str, ...], wanted: Wanted) -> bool:
    return all(wanted.named(role, cells) for role in wanted.required)


def _is_header(cells: tuple[str, ...], wanted: Wanted) -> bool:
    """A row of names: it names the roles, or at least no cell is a number and nobody spoke of `column_1`."""
    if _names_roles(cells, wanted):
        return True
    by_place = any(re.fullmatch(r"column_\d+", name) for name in wanted.asked.values())
    return not by_place and not any(_NUMBER.fullmatch(cell) for cell in cells)


def _columns(path: Path, layout: Layout, text: str, wanted: Wanted) -> dict[str, str]:
    """Role to name; without a header places say it: user, item[, rating][, time], as MovieLens and Amazon have it."""
    if layout.header:
        try:
            return find_columns(layout.names, wanted, str(path))
        except DataError as error:
            if wanted.asked or wanted.further:
                raise
            raise DataError(f"{error}, or --user column_1 --item column_2 if the file has no header") from None
    if wanted.further:
        return _item_places(path, layout, wanted)
    if wanted.asked:
        if not {USER, ITEM} <= set(wanted.asked):
            raise DataError(f"{path}: has no header; give both --user column_N and --item column_N")
        return find_columns(layout.names, wanted, str(path))
    if layout.separator == "::":
        first = first_line_of(text).split("::")
    else:
        first = rows_of(text, layout.separator, layout.quoted)[0]
    # Some write a separator at the end of each line.
    width = len(first) - (first[-1] == "")
    places: tuple[str, ...] | None = (USER, ITEM) if width == 2 else None
    if width == 3 and _like_time(first[2]):
        places = (USER, ITEM, TIME)
    if width == 4 and _like_time(first[3]):
        places = (USER, ITEM, RATING, TIME)
    if places is None:
        raise DataError(
            f"{path}: has no header and {width} columns, of which row 1 does not tell the time; "
            "say --user column_1 --item column_2 and, if there is one, --time column_N"
        )
    return dict(zip(places, layout.names, strict=False))


def _item_places(path: Path, layout: Layout, wanted: Wanted) -> dict[str, str]:
    """MovieLens' `movies.dat` (id::title::genres) has no header; other files of items must have one."""
    if layout.separator != "::":
        raise DataError(f"{path}: has no header; add a first line that names the columns, such as item_id,title")
    return {ITEM: layout.names[0], TITLE: layout.names[1]} | dict(wanted.asked)


def _like_time(cell: str) -> bool:
    """A date, or a number of seconds after 1973: no rating and no id of a small set is that large."""
    return bool(_DATE.match(cell)) or (bool(_NUMBER.fullmatch(cell)) and float(cell) >= 1e8)


def _split_lines(path: Path, layout: Layout) -> pl.LazyFrame:
    """`::` is two characters, which no CSV reader cuts at; so lines are read and cut."""
    lines = pl.scan_lines(path).filter(pl.col("line") != "")
    width = len(layout.names)
    try:
        uneven = (
            lines.with_row_index("row")
            .select("row", fields=pl.col("line").str.count_matches("::", literal=True) + 1)
            .filter(pl.col("fields") != width)
            .head(1)
            .collect()
        )
    except READ_ERRORS as error:
        raise _explain(path, layout, error) from None
    if len(uneven):
        row, fields = uneven.row(0)
        raise DataError(f"{path}: row {row + 1} has {fields} fields where row 1 has {width}; mend or drop that row")
    return lines.select(pl.col("line").str.split_exact("::", width - 1).struct.rename_fields(layout.names)).unnest(
        "line"
    )
