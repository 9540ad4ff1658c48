"""One user's rows must not change what `prepare` reads of other users, whatever the rows contain; or the log is refused."""

import json
from collections.abc import Callable
from pathlib import Path

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
