"""Bad input: one line that names file, column, first bad row and cure; exit code 2; nothing written."""

import gzip
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import polars as pl
import pytest

from dpformer.data import prepare
from dpformer.errors import DataError

GOOD = pl.DataFrame({"user_id": ["a", "a", "b", "b"], "item_id": [1, 2, 1, 3], "timestamp": [10, 20, 30, 40]})


def parquet(folder: Path, **columns: pl.Series) -> None:
    GOOD.with_columns(**columns).write_parquet(folder / "log")


def broken_parquet(folder: Path) -> None:
    GOOD.write_parquet(folder / "log")
    (folder / "log").write_bytes((folder / "log").read_bytes()[:-20])


def damaged_pages(folder: Path) -> None:
    pl.DataFrame({"user_id": range(5000), "item_id": range(5000)}).write_parquet(folder / "log")
    content = bytearray((folder / "log").read_bytes())
    content[20:2000] = b"\xff" * 1980
    (folder / "log").write_bytes(content)


def two_schemas(folder: Path) -> None:
    (folder / "log").mkdir()
    GOOD.write_parquet(folder / "log" / "1.parquet")
    GOOD.cast({"item_id": pl.String}).write_parquet(folder / "log" / "2.parquet")


def null_in_second_file(folder: Path) -> None:
    (folder / "log").mkdir()
    GOOD.write_parquet(folder / "log" / "1.parquet")
    GOOD.with_columns(item_id=pl.Series([1, 2, None, None])).write_parquet(folder / "log" / "2.parquet")


def cut_gzip(folder: Path) -> None:
    # Longer than the sample and hardly compressible, so that the damage lies beyond what is sniffed.
    rows = "".join(f"{hash((n, 'a'))},{hash((n, 'b'))}\n" for n in range(20_000))
    (folder / "log").write_bytes(gzip.compress(("user,item\n" + rows).encode())[:-1000])


def text(content: str | bytes) -> Callable[[Path], None]:
    return lambda folder: (
        (folder / "log").write_bytes(content.encode() if isinstance(content, str) else content) and None
    )


# What is written to `log`, and what the message must have beside the path.
CASES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "missing file": (lambda folder: None, ["no such file", "check the path"]),
    "missing column": (text("user,thing\n1,2\n"), ["item", "'user', 'thing'", "--item"]),
    "no known column": (text("a,b\nx,y\n"), ["user", "'a', 'b'", "--user", "column_1"]),
    "empty file": (text(""), ["is empty"]),
    "blank file": (text("\n \n"), ["is empty"]),
    "empty gzip": (text(gzip.compress(b"")), ["is empty"]),
    "header without rows": (text("user,item,timestamp\n"), ["no rows"]),
    "Parquet without rows": (lambda folder: GOOD.clear().write_parquet(folder / "log"), ["no rows"]),
    "null user in CSV": (text("user,item\n1,a\n,b\n1,c\n"), ["row 2", "'user'", "no user", "--drop-missing"]),
    "quoted nothing": (text('user,item\n1,a\n1,""\n'), ["row 2", "'item'", "no item"]),
    "short row": (text("user,item,time\n1,a,5\n1\n"), ["row 2", "'item'", "no item"]),
    "null time": (text("user,item,time\n1,a,5\n1,b,\n"), ["row 2", "'time'", "no time", "--drop-missing"]),
    "long row": (text("user,item\n1,a\n1,b,c\n"), ["row 2 has 3 fields", "quotes"]),
    "unclosed quote": (text('user,item\n1,a\n1,"b\n1,c\n'), ["line 3", "quote", "twice"]),
    "field over two lines": (text('user,item\n1,a\n1,"b\nc"\n1,d\n'), ["line 3", "quote", "line breaks", "Parquet"]),
    "field over two lines, gzip": (
        text(gzip.compress(b"user;item\n" + b'1;"a b"\n' * 50_000 + b'1;"b\nc"\n')),
        ["line 50002", "quote", "line breaks"],
    ),
    "quote inside": (text('user,item\n1,a\n1,5" disk\n1,c\n'), ["line 3", "quote", "twice"]),
    "name twice": (text("user,user,item\n1,a,b\n1,a,b\n"), ["two columns", "'user'", "rename"]),
    "American dates": (
        text("user,item,date\n1,a,05/17/2020\n1,b,05/18/2020\n"),
        ["row 1", "'date'", "'05/17/2020'", "ISO"],
    ),
    "uneven ::": (text("1::2::5::978300760\n1::3::978300760\n"), ["row 2 has 3 fields"]),
    "null in Parquet": (
        lambda folder: parquet(folder, user_id=pl.Series(["a", None, "b", "b"])),
        ["row 2", "'user_id'"],
    ),
    "null in the second file": (null_in_second_file, ["2.parquet: row 3", "'item_id'", "no item"]),
    "NaN id": (
        lambda folder: parquet(folder, user_id=pl.Series([1.0, 1.0, float("nan"), 2.0])),
        ["row 3", "'user_id'"],
    ),
    "all null": (lambda folder: parquet(folder, item_id=pl.Series([None] * 4)), ["row 1", "'item_id'", "no item"]),
    "list as id": (lambda folder: parquet(folder, item_id=pl.Series([[1]] * 4)), ["'item_id'", "List", "not an id"]),
    "mixed types": (text('{"user":1,"item":2}\n{"user":"x","item":2}\n'), ["line 2", "'user'", "text", "a number"]),
    "number among texts": (
        text('{"user":"7","item":2}\n{"user":7,"item":2}\n'),
        ["line 2", "'user'", "a number", "text"],
    ),
    "mixed in literals": (
        text("{'user':'7','item':2}\n{'user':7,'item':2}\n"),
        ["line 2", "'user'", "a number", "text"],
    ),
    "object as id": (text('{"user":{"id":1},"item":2}\n'), ["line 1", "'user'", "an object", "flatten"]),
    "huge number": (
        text('{"user":1,"item":2}\n{"user":99999999999999999999,"item":2}\n'),
        ["line 2", "'user'", "text"],
    ),
    "float item": (
        text('{"user":1,"item":1.0}\n{"user":1,"item":2}\n'),
        ["line 1", "'item'", "1.0", "whole numbers", '"1"'],
    ),
    "float user": (
        text('\n{"user":null,"item":1}\n{"user":2.5,"item":2}\n'),
        ["line 3", "'user'", "2.5", "whole numbers", '"1"'],
    ),
    "bool item": (text('{"user":1,"item":true}\n{"user":1,"item":false}\n'), ["line 1", "'item'", "true", "text"]),
    "float in literals": (text("{'user':1,'item':1.0}\n{'user':1,'item':2}\n"), ["line 1", "'item'", "1.0", "text"]),
    "missing key": (text('{"user":1,"item":2}\n{"user":1}\n'), ["row 2", "'item'", "no item"]),
    "broken JSON": (text('{"user":1,"item":2}\n{"user":1,\n'), ["line 2", "not a JSON object"]),
    "bytes as keys": (text("{b'user': 1, 'item': 2}\n"), ["line 1", "not a JSON object"]),
    "JSON array": (text('[{"user":1,"item":2}]'), ["JSON array", "one object per line"]),
    "code in a line": (text("{'user': __import__('os').getcwd(), 'item': 1}\n"), ["line 1", "not a JSON object"]),
    "text among times": (
        text("user,item,time\n1,a,5\n1,b,soon\n"),
        ["row 2", "'time'", "'soon'", "not a recognised time"],
    ),
    "dates among numbers": (text("user,item,time\n1,a,5\n1,b,2020-01-01\n"), ["row 2", "'time'", "'2020-01-01'"]),
    "numbers among dates": (text("user,item,time\n1,a,2020-01-01\n1,b,5\n"), ["row 2", "'time'", "'5'"]),
    "no such day": (text("user,item,time\n1,a,2020-01-01\n1,b,2020-02-30\n"), ["row 2", "'2020-02-30'"]),
    "negative time": (text("user,item,time\n1,a,5\n1,b,-1\n"), ["row 2", "'time'", "-1", "negative", "drop that row"]),
    "negative in Parquet": (
        lambda folder: parquet(folder, timestamp=pl.Series([1, 2, -5, 4])),
        ["row 3", "-5 is negative"],
    ),
    "absurd seconds": (
        text("user,item,time\n1,a,978300760\n1,b,99999999999\n1,c,5\n"),
        ["row 2", "out of range", "seconds"],
    ),
    "seconds among ms": (
        text("user,item,time\n1,a,1589716800000\n1,b,1589716800\n1,c,1589716800000\n"),
        ["row 2", "'time'", "1589716800", "milliseconds"],
    ),
    "infinite time": (text("user,item,time\n1,a,5\n1,b,inf\n"), ["row 2", "inf", "out of range"]),
    "NaN time": (lambda folder: parquet(folder, timestamp=pl.Series([1.0, float("nan"), 2.0, 3.0])), ["row 2", "nan"]),
    "year 9999": (text("user,item,time\n1,a,2020-01-01\n1,b,9999-12-31\n"), ["row 2", "9999-12-31"]),
    "year 1900": (text("user,item,time\n1,a,2020-01-01\n1,b,1900-01-01\n"), ["row 2", "1900-01-01"]),
    "datetime of 2300": (
        lambda folder: parquet(folder, timestamp=pl.Series(["2020-01-01"] * 3 + ["2300-01-01"]).str.to_datetime()),
        ["row 4", "2300-01-01", "out of range"],
    ),
    "time of day": (
        lambda folder: parquet(folder, timestamp=pl.Series(["12:00"] * 4).str.to_time("%H:%M")),
        ["Time", "not a time"],
    ),
    "one event each": (text("user,item\n1,a\n2,b\n"), ["row 1", "'user'", "one event", "--user"]),
    "broken gzip": (cut_gzip, ["gzip", "again"]),
    "cut gzip of little": (text(gzip.compress(b"user,item\n1,a\n1,b\n")[:-9]), ["gzip", "again"]),
    "broken Parquet": (broken_parquet, ["not a valid Parquet", "again"]),
    "damaged pages": (damaged_pages, ["not a valid Parquet", "again"]),
    "two schemas": (two_schemas, ["2.parquet", "'item_id'", "String", "Int64", "one schema"]),
    "not UTF-8": (text(b"user,item\n1,a\n1,caf\xe9\n"), ["line 3", "UTF-8", "0xe9", "iconv"]),
    "not UTF-8, far in": (text(b"user,item\n" + b"1,a\n" * 30_000 + b"1,\xe9\n"), ["line 30002", "UTF-8", "iconv"]),
    "not UTF-8 in ::": (text(b"1::a::3::978300760\n" * 5000 + b"1::\xe9::3::978300760\n"), ["line 5001", "UTF-8"]),
    "not UTF-8 in JSON": (
        text(b'{"user":1,"item":"a"}\n' * 5000 + b'{"user":1,"item":"\xe9"}\n'),
        ["line 5001", "UTF-8"],
    ),
    "UTF-16": (text("user,item\n1,a\n".encode("utf-16")), ["UTF-8"]),
    "zip": (text(b"PK\x03\x04rest"), ["zip", "unzip"]),
    "binary": (text(b"\x00\x01\x02\x03" * 10), ["neither text (UTF-8)"]),
    "one column": (text("user\n1\n2\n"), ["row 1 has one field"]),
    "no header, three numbers": (text("1,2,3\n1,3,4\n"), ["no header", "--user column_1 --item column_2", "--time"]),
    "folder without Parquet": (lambda folder: (folder / "log").mkdir(), ["folder without .parquet or .csv"]),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_written(case: str, tmp_path: Path, dpformer: Callable):
    write, wanted = CASES[case]
    write(tmp_path)
    before = sorted(tmp_path.iterdir())
    done = dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out")
    assert done.code == 2, done
    assert done.out == ""
    assert len(done.err.strip().splitlines()) == 1, done.err
    assert str(tmp_path / "log") in done.err
    for part in wanted:
        assert part in done.err, done.err
    assert sorted(tmp_path.iterdir()) == before


def test_a_quoted_separator_is_no_error(tmp_path: Path, dpformer: Callable):
    (tmp_path / "log").write_text('user,item\n"Smith, John",a\n"Smith, John","b ""c"""\n')
    assert dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out").code == 0
    assert pl.read_parquet(tmp_path / "out" / "items.parquet")["item_id"].to_list() == ["a", 'b "c"']


def test_a_user_with_one_event_is_counted_not_refused(tmp_path: Path, dpformer: Callable):
    (tmp_path / "log").write_text("user,item\na,1\na,2\na,3\nb,1\n")
    done = dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out")
    assert done.code == 0
    assert "1 of 2 users are left out of evaluation" in done.err


def test_no_rows_after_filtering(tmp_path: Path, dpformer: Callable):
    (tmp_path / "log").write_text("user,item\na,1\na,2\na,3\nb,1\n")
    done = dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out", "--min-events", 5)
    assert done.code == 2
    assert "no event is left of 4 after --min-events 5 (single-pass); lower it" in done.err
    assert not (tmp_path / "out").exists()
    done = dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out", "--where", "item = 'A'")
    assert "no event is left of 4 after --where \"item = 'A'\"; compare its values with those of the log" in done.err


@pytest.mark.parametrize("bare", ["user = 'a'", "in stock = 1"])
def test_a_column_that_sql_reads_otherwise_is_to_be_quoted(bare: str):
    log = pl.DataFrame({"user": ["a", "a", "b"], "item": [1, 2, 2], "in stock": [1, 1, 0]})
    with pytest.raises(DataError, match='a word of SQL, in double quotes: "user"'):
        prepare(log, where=bare)
    name, value = bare.split(" = ")
    assert prepare(log, where=f'"{name}" = {value}').manifest["counts"]["where"] == 1


@pytest.mark.parametrize("ending", ["csv", "parquet", "jsonl"])
def test_a_condition_on_an_unknown_column_lists_all_columns(tmp_path: Path, ending: str):
    log, path = GOOD.with_columns(kind=pl.lit("loan"), shop=pl.lit("north")), tmp_path / f"log.{ending}"
    {"csv": log.write_csv, "parquet": log.write_parquet, "jsonl": log.write_ndjson}[ending](path)
    with pytest.raises(DataError, match=r"no column 'Kind'; the columns are user_id, item_id, timestamp, kind, shop$"):
        prepare(path, where="Kind = 'loan'")


def test_a_time_unlike_the_given_format_names_that_format(tmp_path: Path):
    (tmp_path / "log").write_text("user,item,time\na,1,08.04.25 15.39\n")
    with pytest.raises(DataError, match=r"row 1, .*'08.04.25 15.39' does not match time_format='%d.%m.%Y %H.%M'"):
        prepare(tmp_path / "log", time_format="%d.%m.%Y %H.%M")


OPTIONS = {
    "unknown column": (["--user", "who"], ["no column 'who' for --user", "'user', 'item'"]),
    "one column twice": (["--user", "item", "--item", "item"], ["asked for twice", "'item'"]),
    "unknown filter": (["--filter", "double", "--min-events", 2], ["'double'", "single-pass or iterative"]),
    "filter without number": (["--filter", "iterative"], ["--min-events N"]),
    "negative minimum": (["--min-events", -1], ["-1 is negative"]),
    "from without name": (["--from", "x"], ["named data sets", "ml-1m"]),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options(case: str, tmp_path: Path, dpformer: Callable):
    arguments, wanted = OPTIONS[case]
    (tmp_path / "log").write_text("user,item\na,1\na,2\n")
    done = dpformer("prepare", tmp_path / "log", "-o", tmp_path / "out", *arguments)
    assert done.code == 2
    assert len(done.err.strip().splitlines()) == 1
    assert all(part in done.err for part in wanted), done.err
    assert not (tmp_path / "out").exists()


def test_globs(tmp_path: Path, dpformer: Callable):
    done = dpformer("prepare", f"{tmp_path}/*.parquet", "-o", tmp_path / "out")
    assert done.code == 2
    assert "no file matches" in done.err
    (tmp_path / "a.csv").write_text("user,item\n1,2\n")
    done = dpformer("prepare", f"{tmp_path}/*.csv", "-o", tmp_path / "out")
    assert done.code == 2
    assert "each of 1 users has only one event" in done.err
    (tmp_path / "b.csv").write_text("user,thing\n1,2\n")
    done = dpformer("prepare", f"{tmp_path}/*.csv", "-o", tmp_path / "out", "--item", "item")
    assert done.code == 2
    assert "b.csv" in done.err


FRAMES = {
    "mixed types": (
        pd.DataFrame({"user": [1, "x", 2], "item": [1, 2, 3]}),
        ["row 2", "'user'", "str", "int", "astype(str)"],
    ),
    "null": (pd.DataFrame({"user": [1, 1], "item": ["a", None]}), ["row 2", "'item'", "no item"]),
    "missing column": (pl.DataFrame({"user": [1]}), ["frame", "item", "item='NAME'"]),
    "objects": (pd.DataFrame({"user": [{1}, {2}], "item": [1, 2]}), ["'user'"]),
    "no frame": ([1, 2, 3], ["list", "pandas, polars or Arrow"]),
}


@pytest.mark.parametrize("case", FRAMES)
def test_frames(case: str):
    frame, wanted = FRAMES[case]
    with pytest.raises(DataError) as caught:
        prepare(frame)
    assert all(part in str(caught.value) for part in wanted), caught.value
    assert "\n" not in str(caught.value)


def test_a_filter_that_leaves_single_events_is_named():
    with pytest.raises(DataError, match=r"after the filter.*lower min_events"):
        prepare(GOOD, min_events=2)
