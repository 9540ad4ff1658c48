"""Conditions in SQL, which may come over HTTP: no file is opened, the cost is bounded, and errors name the cure."""

import os
from datetime import date

import polars as pl
import pytest

from dpformer.errors import DataError
from dpformer.where import rows_where

FILE_READS = {
    "subquery": "qty > (select max(a) from read_csv('{file}'))",
    "list": "qty in (select a from read_csv('{file}'))",
    "comment": "qty > (/* */ select max(a) from read_csv('{file}'))",
    "from first": "qty in (from read_csv('{file}'))",
    "quoted name": "qty > \"read_csv\"('{file}')",
    "escape": "item_id = E'\\'' or qty > (select max(a) from read_csv('{file}')) or item_id = ''",
    "dollar": "item_id = $$'$$ or qty > (select max(a) from read_csv('{file}')) or item_id = $$'$$",
    "exists": "qty > 0 and exists (select 1 from read_csv('{file}'))",
}


@pytest.mark.parametrize("text", FILE_READS.values(), ids=FILE_READS)
def test_a_condition_opens_no_file(text, tmp_path):
    """polars would open the file while it parses: a pipe, which nobody writes to, would stop the server."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    opened = os.open(pipe, os.O_RDWR)  # so that a reader would not wait, but read what is written here
    os.write(opened, b"a\n1\n")
    frame = pl.DataFrame({"item_id": ["a"], "qty": [1]})
    with pytest.raises(DataError, match=r"is refused|cannot be read \(it may hold"):
        rows_where(text.format(file=pipe), frame)
    assert os.read(opened, 10) == b"a\n1\n"
    os.close(opened)


def test_a_backslash_escapes_nothing():
    """The check of words takes `\\'` as the end of a text, and so does polars."""
    frame = pl.DataFrame({"item_id": ["\\", "a"]})
    assert rows_where("item_id = '\\'", frame).to_list() == [True, False]
    assert rows_where("item_id = 'it''s (select 1) --' or item_id = 'a'", frame).to_list() == [False, True]


GROWING = "title"
for _ in range(12):
    GROWING = f"replace({GROWING},'a','aaaaaaaaaa')"
LONG = {
    "sum": "qty" + "+qty" * 30_000 + " > 0",
    "or": "qty = 1" + " or qty = 1" * 200,
    "casts": "qty" + "::int" * 30_000 + " > 0",
    "parentheses": "(" * 30_000 + "qty > 0" + ")" * 30_000,
    "not": "not " * 30_000 + "gift",
    "growing text": f"{GROWING} = 'b'",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_a_condition_has_a_bounded_cost(text):
    frame = pl.DataFrame({"title": ["aaaaaaaaaa"], "qty": [1], "gift": [True]})
    with pytest.raises(DataError, match=r"too long|cannot be read|is refused"):
        rows_where(text, frame)
    with pytest.raises(DataError, match=r"too long|cannot be read|is refused"):
        rows_where(text, frame.cast(pl.String))


def test_long_lists_and_dates_are_conditions():
    numbers = ", ".join(str(number) for number in range(-2000, 1))
    frame = pl.DataFrame({"qty": [-7, 7], "day": [date(2025, 1, 31), date(2025, 2, 1)]})
    assert rows_where(f"qty in ({numbers})", frame).to_list() == [True, False]
    assert rows_where("qty in ('-7', '8')", frame.cast({"qty": pl.String})).to_list() == [True, False]
    assert rows_where("day >= date '2025-02-01'", frame).to_list() == [False, True]
    with pytest.raises(DataError, match="compare dates with dates, such as: day >= date '2025-02-01'"):
        rows_where("day >= '2025-02-01'", frame)
    german = pl.DataFrame({"day": ["31.01.2025 10:00", "01.02.2025 10:00", "", None, "2025-02-01T09:00"]})
    assert rows_where("day >= '2025-02-01'", german).to_list() == [False, True, False, False, True]
    assert rows_where("day <> '' and day between '2025-01-31 11:00' and '2025-02-01 09:30'", german).to_list()[4]
    for wrong in ("01.02.2025", "2025-2-1", "2025-02-01T10:00"):
        with pytest.raises(DataError, match="write dates as '2025-02-01 10:00'"):
            rows_where(f"day >= '{wrong}'", german)
    with pytest.raises(DataError, match="'soon' in 'day', which is not a date"):
        rows_where("day < '2025-02-01'", pl.DataFrame({"day": ["2025-01-01", "soon"]}))
    with pytest.raises(DataError, match="names no column"):
        rows_where("1 = 1", frame)
