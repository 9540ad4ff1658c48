"""Reading what was written gives the same sequences, for every format."""

import csv
import gzip
import io
import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpformer.data import Dataset, prepare
from dpformer.errors import DataError

Events = list[tuple[str, str, int]]


def expected(events: Events) -> dict[str, list[str]]:
    """Group by user and sort by time, ties in file order: plain Python, nothing of ours."""
    byuser: dict[str, list[tuple[int, str]]] = {}
    for user, item, time in events:
        byuser.setdefault(user, []).append((time, item))
    return {user: [item for _, item in sorted(rows, key=lambda row: row[0])] for user, rows in byuser.items()}


def found(dataset: Dataset) -> dict[str, list[str]]:
    ids = ["", *(str(item) for item in dataset.catalogue["item_id"])]
    users = [str(user) for user in dataset.sequences.users]
    assert len(set(users)) == len(users)
    return {user: [ids[item] for item in items] for user, items in zip(users, dataset.sequences, strict=True)}


def write_csv(events: Events, separator: str = ",", header: str = "user_id,item_id,timestamp") -> bytes:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=separator)
    writer.writerow(header.split(","))
    writer.writerows(events)
    return out.getvalue().encode()


def write_json(events: Events) -> bytes:
    rows = ({"reviewerID": u, "asin": i, "reviewText": 'a "quoted", text', "unixReviewTime": t} for u, i, t in events)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write_literal(events: Events) -> bytes:
    rows = ({"reviewerID": u, "asin": i, "helpful": [0, 1], "unixReviewTime": t} for u, i, t in events)
    return "".join(repr(row) + "\n" for row in rows).encode()


def write_parquet(events: Events) -> bytes:
    out = io.BytesIO()
    pl.DataFrame(events, schema=["userId", "movieId", "timestamp"], orient="row").write_parquet(out)
    return out.getvalue()


def lines(form: str) -> Callable[[Events], bytes]:
    return lambda events: "".join(form.format(u=u, i=i, t=t) for u, i, t in events).encode()


def inter(events: Events) -> bytes:
    return b"user_id:token\titem_id:token\trating:float\ttimestamp:float\n" + lines("{u}\t{i}\t4.0\t{t}\n")(events)


def tsv(events: Events) -> bytes:
    return b"User ID\tProduct ID\tTime\n" + lines("{u}\t{i}\t{t}\n")(events)


def anything(but: str = "") -> st.SearchStrategy[str]:
    """Ids of any characters except `but`; quotes, separators, line breaks and other scripts more often than not."""
    odd = st.sampled_from([c for c in "\"',;|\t :é漢🙂\n\\/-{}[]07" if c not in but])
    rest = st.characters(exclude_categories=["Cs"], exclude_characters="\x00\r\ufeff" + but)
    return st.text(st.one_of(odd, rest), min_size=1, max_size=6).filter(str.strip)  # a blank id is missing


def logs(ids: st.SearchStrategy[str]) -> st.SearchStrategy[Events]:
    """Few users, few items, few times (so that there are ties), and one user with two events at least."""

    def build(users: list[str], items: list[str]) -> st.SearchStrategy[Events]:
        event = st.tuples(
            st.sampled_from(users),
            st.sampled_from(items),
            st.integers(978_300_000, 978_300_005) | st.integers(10**8, 4 * 10**9),
        )
        return st.lists(event, min_size=1, max_size=30).map(lambda events: [*events, events[0]])

    pool = st.lists(ids, min_size=1, max_size=5, unique=True)
    return st.tuples(pool, pool).flatmap(lambda pools: build(*pools))


NO_SPACE = "".join(
    chr(c)
    for c in (*range(33), 0x7F, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000)
)
WORDS = st.from_regex(r"[A-Z0-9]{1,12}", fullmatch=True)
NUMBERS = st.integers(0, 10**12).map(str)
BREAKS = "\n\r"
FORMATS = {
    "log.csv": (write_csv, anything(BREAKS)),
    "semicolon.csv": (lambda events: write_csv(events, ";"), anything(BREAKS)),
    "pipe.txt": (lambda events: write_csv(events, "|"), anything(BREAKS)),
    "log.tsv": (tsv, anything("\t" + BREAKS)),
    "log.csv.gz": (lambda events: gzip.compress(write_csv(events)), anything(BREAKS)),
    "ratings.dat": (lines("{u}::{i}::4::{t}\n"), anything(":" + BREAKS)),
    "windows.dat": (lines("{u}::{i}::4::{t}\r\n"), anything(":" + BREAKS)),
    "ml.inter": (inter, anything("\t" + BREAKS)),
    "u.data": (lines("{u}\t{i}\t3\t{t}\n"), NUMBERS),
    "ratings_Video_Games.csv": (lines("{u},{i},5.0,{t}\n"), WORDS),
    "log.jsonl": (write_json, anything()),
    "log.jsonl.gz": (lambda events: gzip.compress(write_json(events)), anything()),
    "reviews.json.gz": (lambda events: gzip.compress(write_literal(events)), anything()),
    "log.parquet": (write_parquet, anything()),
}


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_reading_what_was_written(name: str, data: st.DataObject, tmp_path: Path):
    write, ids = FORMATS[name]
    events = data.draw(logs(ids))
    path = tmp_path / name
    path.write_bytes(write(events))
    assert found(prepare(path, null_values=[])) == expected(events)


@settings(max_examples=30, deadline=None)
@given(events=logs(NUMBERS))
def test_sasrec_text_has_no_times(events: Events, tmp_path_factory: pytest.TempPathFactory):
    path = tmp_path_factory.mktemp("sasrec") / "Video.txt"
    path.write_bytes(lines("{u} {i}\n")(events))
    assert found(prepare(path, null_values=[])) == expected([(user, item, 0) for user, item, _ in events])


@settings(max_examples=30, deadline=None)
@given(events=logs(anything()), parts=st.integers(1, 4))
def test_parquet_folder_and_glob(events: Events, parts: int, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("parts")
    cuts = np.array_split(np.arange(len(events)), parts)
    for number, rows in enumerate(cuts):
        frame = pl.DataFrame(
            [events[row] for row in rows],
            schema={"user_id": pl.String, "item_id": pl.String, "ts": pl.Int64},
            orient="row",
        )
        frame.write_parquet(folder / f"part-{number}.parquet")
    assert (
        found(prepare(folder, null_values=[]))
        == found(prepare(f"{folder}/part-*.parquet", null_values=[]))
        == expected(events)
    )


@pytest.mark.parametrize("form", ["snappy.parquet", "csv", "csv.gz"])
def test_a_folder_as_spark_writes_it(form: str, tmp_path: Path):
    """Parts with long names beside files that are not data: a mark, checksums, and parts of a write that did not end."""
    log = pl.DataFrame(
        {"user_id": ["a", "b"] * 20, "item_id": [f"i{n % 7}" for n in range(40)], "timestamp": range(40)}
    )
    for place, rows in enumerate((log[:15], log[15:15], log[15:])):
        for folder in (tmp_path, tmp_path / "_temporary" / "0"):
            folder.mkdir(parents=True, exist_ok=True)
            part = folder / f"part-{place:05}-0c5a-c000.{form}"
            if form == "snappy.parquet":
                rows.write_parquet(part, compression="snappy")
            else:
                text = rows.write_csv().encode() if len(rows) else b""
                part.write_bytes(gzip.compress(text) if form == "csv.gz" and text else text)
            part.with_name(f".{part.name}.crc").write_bytes(b"crc")
    (tmp_path / "_SUCCESS").touch()
    dataset, whole = prepare(tmp_path), prepare(log)
    assert found(dataset) == found(whole)
    assert dataset.manifest["counts"]["read"]["events"] == 40
    assert dataset.manifest["input"]["files"] == (3 if "parquet" in form else 2)


def test_an_error_in_a_folder_of_text_names_the_file_and_its_row(tmp_path: Path):
    for name, row in (("a", "u,2,1600000001"), ("b", "u,,1600000002")):
        (tmp_path / f"{name}.csv").write_text(f"user,item,time\nu,1,1600000000\n{row}\n")
    with pytest.raises(DataError, match=r"b\.csv: row 2, column 'item': no item"):
        prepare(tmp_path)
    (tmp_path / "b.csv").write_text("user,item,time\nu,1,1600000000,9\n")
    with pytest.raises(DataError, match=r"b\.csv: row 1 has 4 fields"):
        prepare(tmp_path)
    (tmp_path / "b.csv").write_text("user,item,seconds\nu,1,1600000000\n")
    with pytest.raises(DataError, match=r"b\.csv: has other columns than .*a\.csv"):
        prepare(tmp_path)


@settings(max_examples=30, deadline=None)
@given(events=logs(anything()))
def test_frames(events: Events):
    frame = pl.DataFrame(events, schema=["user_id", "item_id", "timestamp"], orient="row")
    shuffled_index = frame.to_pandas()
    shuffled_index.index = pd.Index(range(len(events), 0, -1))
    for given_frame in (frame, frame.lazy(), shuffled_index, frame.to_arrow()):
        assert found(prepare(given_frame, null_values=[])) == expected(events)


ID_TYPES = {
    "int8": pl.Series([3, 1, 3], dtype=pl.Int8),
    "uint64": pl.Series([2**64 - 1, 1, 2**64 - 1], dtype=pl.UInt64),
    "far apart": pl.Series([-(2**63), 2**63 - 1, -(2**63)]),
    "negative": pl.Series([-3, 1, -3]),
    "float": pl.Series([1.0, 2.0, 1.0]),
    "bool": pl.Series([True, False, True]),
    "date": pl.Series(["2020-01-01", "2020-01-02", "2020-01-01"]).str.to_date(),
    "categorical": pl.Series(["a", "b", "a"], dtype=pl.Categorical),
    "enum": pl.Series(["a", "b", "a"], dtype=pl.Enum(["b", "a"])),
    "binary": pl.Series([b"\xff\x00", b"b", b"\xff\x00"]),
    "decimal": pl.Series(["1.50", "2.00", "1.50"]).cast(pl.Decimal(10, 2)),
}


@pytest.mark.parametrize("kind", ID_TYPES)
def test_ids_of_any_type(kind: str):
    dataset = prepare(pl.DataFrame({"user_id": ID_TYPES[kind], "item_id": ["x", "y", "z"]}))
    assert sorted(dataset.sequences.lengths) == [1, 2]
    assert len(dataset.sequences.users) == 2


def test_ids_of_users_in_text_are_numbers_only_if_all_are(tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text("user,item\n1,a\n1,b\n10,c\n2,a\n")
    assert prepare(log).sequences.users.to_list() == [1, 2, 10]
    log.write_text("user,item\n1,a\n1,b\n010,c\n2,a\n")
    assert prepare(log).sequences.users.to_list() == ["010", "1", "2"]


def test_ids_of_items_in_text_stay_text_in_natural_order(tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text("user,item\n1,10\n1,7\n2,9\n")
    assert prepare(log).catalogue["item_id"].to_list() == ["7", "9", "10"]
    log.write_text("user,item\n1,10\n1,7\n2,9\n3,007\n3,b\n")
    assert prepare(log).catalogue["item_id"].to_list() == ["7", "9", "10", "007", "b"]
    # Typed sources keep their types and the order of these.
    assert prepare(pl.DataFrame({"user": [1, 1], "item": ["9", "10"]})).catalogue["item_id"].to_list() == ["10", "9"]
    assert prepare(pl.DataFrame({"user": [1, 1], "item": [10, 9]})).catalogue["item_id"].to_list() == [9, 10]


def test_the_catalogue_says_nothing_about_the_order_or_the_frequency_of_events():
    events = {"user_id": ["u", "u", "v", "v"], "item_id": ["b", "a", "b", "c"]}
    backwards = {name: values[::-1] for name, values in events.items()}
    assert prepare(pl.DataFrame(events)).catalogue.equals(prepare(pl.DataFrame(backwards)).catalogue)
    assert prepare(pl.DataFrame(events)).catalogue.columns == ["item", "item_id"]


@pytest.mark.parametrize(
    "header",
    [
        "userId,movieId,rating,timestamp",
        "USER_ID,ITEM_ID,x,TS",
        "reviewerID,asin,overall,unixReviewTime",
        "uid,iid,x,date",
    ],
)
def test_aliases(header: str, tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text(header + "\n1,5,3,978300761\n1,6,3,978300760\n")
    assert found(prepare(log)) == {"1": ["6", "5"]}


def test_columns_by_name_and_by_place(tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_text("who,what,when,user_id\na,x,2,1\na,y,1,2\n")
    assert found(prepare(log, user="who", item="what", time="when")) == {"a": ["y", "x"]}
    log.write_text("x,a\ny,a\nz,b\n")
    assert found(prepare(log, user="column_2", item="column_1")) == {"a": ["x", "y"], "b": ["z"]}


@pytest.mark.parametrize(
    "text",
    ["\n\nuser,item\n\n1,a\n\n1,b\n\n", "1 a \n1 b \n", ",user,item\n0,1,a\n1,1,b\n", "user|item\r\n1|a\r\n\r\n1|b"],
)
def test_what_people_have(text: str, tmp_path: Path):
    """Blank lines, a separator at the end of lines, the index that pandas writes, no line feed at the end."""
    log = tmp_path / "log"
    log.write_text(text)
    assert found(prepare(log)) == {"1": ["a", "b"]}


def test_a_byte_order_mark_and_windows_line_ends(tmp_path: Path):
    log = tmp_path / "log.csv"
    log.write_bytes(b"\xef\xbb\xbfuser,item\r\n1,a\r\n1,b\r\n")
    assert found(prepare(log)) == {"1": ["a", "b"]}


NOON = datetime(2020, 5, 17, 12, tzinfo=UTC)
TIMES = {
    "seconds": [NOON.timestamp() + s for s in (2, 0, 1)],
    "whole seconds": [int(NOON.timestamp()) + s for s in (2, 0, 1)],
    "milliseconds": [int(NOON.timestamp() * 1000) + s for s in (2, 0, 1)],
    "fractions": [NOON.timestamp() + s / 1000 for s in (2, 0, 1)],
    "small numbers": [2, 0, 1],
    "ISO": ["2020-05-17T12:00:02", "2020-05-17T12:00:00", "2020-05-17T12:00:01"],
    "ISO with a space": ["2020-05-17 12:00:02", "2020-05-17 12:00:00", "2020-05-17 12:00:01"],
    "ISO, fraction here and there": ["2020-05-17T12:00:01.5Z", "2020-05-17T12:00:00Z", "2020-05-17T12:00:01Z"],
    "offsets": ["2020-05-17T12:00:02+00:00", "2020-05-17T13:00:00+01:00", "2020-05-17T10:00:01-02:00"],
    "minutes": ["2020-05-17 12:02", "2020-05-17 12:00", "2020-05-17 12:01"],
    "days": ["2020-05-18", "2020-02-29", "2020-05-17"],
}


@pytest.mark.parametrize("kind", TIMES)
@pytest.mark.parametrize("form", ["csv", "jsonl", "frame"])
def test_times(kind: str, form: str, tmp_path: Path):
    events = [("u", item, time) for item, time in zip("cab", TIMES[kind], strict=True)]
    log: object = pl.DataFrame(events, schema=["user", "item", "time"], orient="row")
    if form == "csv":
        log = tmp_path / "log.csv"
        log.write_bytes(write_csv(events))
    if form == "jsonl":
        log = tmp_path / "log.jsonl"
        log.write_bytes(write_json(events))
    assert found(prepare(log)) == {"u": ["a", "b", "c"]}


@pytest.mark.parametrize("unit", ["ms", "us", "ns"])
def test_datetimes_in_frames(unit: str):
    times = pl.Series([NOON + timedelta(seconds=s) for s in (2, 0, 1)]).cast(pl.Datetime(unit, "UTC"))
    frame = pl.DataFrame({"user": ["u"] * 3, "item": list("cab"), "time": times})
    dataset = prepare(frame)
    assert found(dataset) == {"u": ["a", "b", "c"]}
    assert dataset.manifest["input"]["from"] == "2020-05-17 12:00:00"


def test_nanoseconds_are_told_apart():
    times = pl.Series([2, 0, 1]) + 1_589_716_800_000_000_000
    frame = pl.DataFrame({"user": ["u"] * 3, "item": list("cab"), "time": times.cast(pl.Datetime("ns"))})
    assert found(prepare(frame)) == {"u": ["a", "b", "c"]}


TITLED = pl.DataFrame(
    {
        "user": ["u", "u", "v", "w", "w", "w"],
        "item": ["a", "b", "a", "a", "a", "a"],
        "title": ["Heat", None, "Heat", "Ann was here", "Ann was here", "Ann was here"],
    }
)


def test_titles_of_the_log_are_used_only_if_asked_for():
    dataset = prepare(TITLED)
    assert dataset.names() == ["", "a", "b"]
    assert dataset.manifest["notes"][0].startswith("column 'title' is not used: give --title title")
    assert "title" not in dataset.manifest["input"]["columns"]
    asked = prepare(TITLED, title="title")
    # What most people have, not what most events have: one person's odd title changes nothing.
    assert asked.names() == ["", "Heat", "b"]
    assert asked.manifest["input"]["columns"]["title"] == "title"
    assert prepare(TITLED.rename({"title": "called"}), title="called").names() == ["", "Heat", "b"]
    with pytest.raises(DataError, match="no column 'called' for title;"):
        prepare(TITLED, title="called")


def test_of_titles_that_equally_many_people_have_the_smallest_text_is_taken():
    for order in (["y", "x"], ["x", "y"]):
        log = pl.DataFrame({"user": ["u", "v", "u"], "item": ["a", "a", "b"], "title": [*order, ""]})
        assert prepare(log, title="title").names() == ["", "x", "b"]


@pytest.mark.parametrize("form", ["csv", "jsonl", "parquet"])
def test_an_odd_value_in_a_column_that_is_not_used_stops_nothing(form: str, tmp_path: Path):
    log = tmp_path / f"log.{form}"
    if form == "jsonl":
        log.write_text('{"user": "u", "item": "a", "title": {"x": 1}}\n{"user": "u", "item": "b", "title": [2]}\n')
    else:
        frame = pl.DataFrame({"user": ["u", "u"], "item": ["a", "b"], "title": ["1", '"']})
        frame.write_csv(log) if form == "csv" else frame.write_parquet(log)
    assert prepare(log).names() == ["", "a", "b"]


def test_large_files_keep_their_order(tmp_path: Path):
    """Large enough to be read in pieces, on several threads; without times, the order of the file is all there is."""
    size = 200_000
    users = np.random.default_rng(0).integers(0, 50, size)
    frame = pl.DataFrame({"user_id": users, "item_id": np.arange(size)})
    quoted = frame.with_columns(item_id=pl.format('x "{}",', pl.col("item_id")))
    frame.write_csv(tmp_path / "log.csv")
    frame.write_csv(tmp_path / "sasrec.txt", separator=" ", include_header=False)
    quoted.write_csv(tmp_path / "quoted.csv")
    frame.select(line=pl.format("{}::{}", "user_id", "item_id")).write_csv(tmp_path / "log.dat", include_header=False)
    frame.write_ndjson(tmp_path / "log.jsonl")
    frame.write_parquet(tmp_path / "log.parquet", row_group_size=5_000)
    (tmp_path / "parts").mkdir()
    for part in range(10):
        rows = frame.slice(part * size // 10, size // 10)
        rows.write_parquet(tmp_path / "parts" / f"{part}.parquet", row_group_size=3_000)
    for log in sorted(tmp_path.iterdir()):
        dataset = prepare(log)
        items = dataset.catalogue["item_id"].gather(dataset.sequences.items - 1)
        if items.dtype == pl.String:
            items = items.str.strip_chars('x ",').cast(pl.Int64)
        expected_items = frame.sort("user_id", maintain_order=True)["item_id"]
        assert items.to_list() == expected_items.to_list(), log.name
