"""One user's rows must not change what `prepare` reads of other users, whatever the rows contain; or the log is refused."""

import json
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest

from dpformer.data import Dataset, prepare
from dpformer.errors import DataError

HEADER = ["user_id", "item_id", "comment"]
OTHERS = [[f"u{user}", f"i{item}", "fine"] for user in range(2, 12) for item in range(4)]
# The target's first row, and the second one, which comes 20 rows later.
ROWS = {
    "comment opens a quote": (["u1", "i0", '"hello'], ["u1", "i1", "bye"]),
    "comment over two rows": (["u1", "i0", '"hello'], ["u1", "i1", 'bye"']),
    "quote in the second item": (["u1", "i0", '"hello'], ["u1", '"i1', "bye"]),
    "items over two rows": (["u1", '"i0', "x"], ["u1", 'i1"', "x"]),
    "quotes inside of fields": (["u1", "i0", '5" disk'], ["u1", "i1", '3" disk']),
}


def delimited(separator: str) -> Callable[[list[list[str]]], str]:
    return lambda rows: "".join(separator.join(row) + "\n" for row in [HEADER, *rows])


def others_of(dataset: Dataset) -> dict[str, list[str]]:
    """What is read of all users but the target."""
    ids = ["", *map(str, dataset.catalogue["item_id"])]
    people = zip(dataset.sequences.users, dataset.sequences, strict=True)
    return {str(user): [ids[item] for item in items] for user, items in people if str(user) != "u1"}


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("separator", [",", ";", "|", "\t", "::"])
def test_quotes_of_one_user_delete_nobodys_events(rows: str, separator: str, tmp_path: Path) -> None:
    first, second = ROWS[rows]
    log, named = tmp_path / "log", {"user": "column_1", "item": "column_2"} if separator == "::" else {}
    log.write_text(delimited(separator)(OTHERS))
    without = others_of(prepare(log, **named))
    log.write_text(delimited(separator)([first, *OTHERS[:20], second, *OTHERS[20:]]))
    if separator in ("\t", "::"):
        assert others_of(prepare(log, **named)) == without
    else:
        with pytest.raises(DataError, match=r"line 2 has an odd number of quotes.*spaces"):
            prepare(log)


@pytest.mark.parametrize("first", [{"user_id": 1, "item_id": 1.0}, {"user_id": 1.0, "item_id": 1}])
def test_the_first_id_of_a_log_does_not_turn_the_type_of_all_others(first: dict[str, object], tmp_path: Path) -> None:
    events = [first, *({"user_id": user, "item_id": item} for user in range(2, 9) for item in range(1, 4))]
    log = tmp_path / "log.jsonl"
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    with pytest.raises(DataError, match=r"line 1.*1\.0 is not an id; write ids as"):
        prepare(log)


def test_quotes_that_are_closed_in_their_row_are_read(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(delimited(",")(OTHERS))
    without = others_of(prepare(log))
    log.write_text(delimited(",")([*OTHERS[:3], ["u1", "i0", '"a ""b"", c"'], ["u1", '"i, 1"', ""], *OTHERS[3:]]))
    dataset = prepare(log)
    assert others_of(dataset) == without
    assert "i, 1" in dataset.catalogue["item_id"].to_list()


EVENTS = [{"user": f"u{user}", "item": f"i{item}", "time": 10**9 + item} for user in range(2, 12) for item in range(4)]
# What one user's records are like: they have a key that goes before the one of all others.
KEYS = {
    "user": {"user_id": "u1", "user": "u1", "item": "i0", "time": 10**9},
    "item": {"user": "u1", "item_id": "i0", "item": "i0", "time": 10**9},
    "time": {"user": "u1", "item": "i0", "timestamp": 10**9},
}
NAMED = {"user": "user", "item": "item", "time": "time"}


def write_lines(log: Path, events: list[dict[str, object]]) -> Path:
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    return log


@pytest.mark.parametrize("key", KEYS)
def test_a_key_of_one_user_does_not_become_the_column_of_all(key: str, tmp_path: Path) -> None:
    """With --drop-missing all other users' events were dropped: they lack that key."""
    log = write_lines(tmp_path / "log.jsonl", [*EVENTS[:5], KEYS[key], KEYS[key], *EVENTS[5:]])
    with pytest.raises(DataError, match=r"drop_missing=True.*user='NAME' item='NAME'.*no_time=True"):
        prepare(log, drop_missing=True)
    read = others_of(prepare(log, drop_missing=True, **NAMED))
    write_lines(log, EVENTS)
    assert read == others_of(prepare(log, drop_missing=True, **NAMED))
    assert sum(map(len, read.values())) == len(EVENTS)


def test_the_first_row_of_a_file_without_header_does_not_name_the_columns_of_all(tmp_path: Path) -> None:
    """One field more in it, and --drop-missing dropped all other rows: they had no time."""
    log, rows = tmp_path / "log.csv", [f"{user},{item},{10**9 + item}" for user in range(2, 12) for item in range(4)]
    log.write_text("\n".join(["1,0,5,1000000000", *rows]) + "\n")
    with pytest.raises(DataError, match="drop_missing"):
        prepare(log, drop_missing=True)
    named = {"user": "column_1", "item": "column_2", "time": "column_3"}
    kept = prepare(log, drop_missing=True, **named)
    assert sum(map(len, others_of(kept).values())) >= len(rows)


@pytest.mark.parametrize("column", ["user_id", "item_id"])
@pytest.mark.parametrize("catalogue", ["log", "private"])
def test_one_missing_id_does_not_turn_whole_numbers_into_fractions(column: str, catalogue: str) -> None:
    """pandas makes the column one of floats: the item 1 of all others was named 1.0 in the released catalogue."""
    others = [{"user_id": user, "item_id": item} for user in range(2, 12) for item in range(4)]
    without = prepare(pandas.DataFrame(others), catalogue=catalogue)
    odd = {"user_id": 1, "item_id": 1, column: None}
    read = prepare(pandas.DataFrame([*others, odd]), drop_missing=True, catalogue=catalogue)
    assert read.catalogue.equals(without.catalogue)
    assert others_of(read) == others_of(without)
    with pytest.raises(DataError, match=rf"row 41, column '{column}': this float is not an id"):
        prepare(pandas.DataFrame([*others, {**odd, column: 1.5}]), catalogue=catalogue)


def test_the_first_line_does_not_decide_which_of_two_equal_keys_counts(tmp_path: Path) -> None:
    """A first line of Python literals has all lines read by another parser."""
    log, twice = tmp_path / "log.jsonl", '{"user":"u2","item":"a","item":"b"}\n{"user":"u2","item":"c"}\n'
    log.write_text(twice)
    without = others_of(prepare(log))
    log.write_text("{'user':'u1','item':'a'}\n" + twice)
    assert others_of(prepare(log)) == without
