"""Filters, duplicates, order, split, statistics, and the two data sets of the paper."""

import hashlib
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Dataset, Sequences, held_out, prepare, prepare_named, statistics
from dpformer.data.options import ITERATIVE, SINGLE_PASS
from dpformer.data.prepare import keep_frequent
from dpformer.data.read.ids import encode_items, encode_users, sorted_ids

PAIRS = st.lists(st.tuples(st.integers(0, 6), st.integers(0, 6)), min_size=1, max_size=60)


def counted(pairs: list[tuple[int, int]], minimum: int) -> list[tuple[int, int]]:
    users, items = Counter(u for u, _ in pairs), Counter(i for _, i in pairs)
    return [(u, i) for u, i in pairs if users[u] >= minimum and items[i] >= minimum]


@given(pairs=PAIRS, minimum=st.integers(1, 5))
def test_single_pass_counts_once(pairs: list[tuple[int, int]], minimum: int):
    users, items = np.array(pairs).T
    kept = keep_frequent(users, items, minimum, SINGLE_PASS)
    assert [pair for pair, keep in zip(pairs, kept, strict=True) if keep] == counted(pairs, minimum)


@given(pairs=PAIRS, minimum=st.integers(1, 5))
def test_iterative_is_the_largest_core(pairs: list[tuple[int, int]], minimum: int):
    users, items = np.array(pairs).T
    kept = keep_frequent(users, items, minimum, ITERATIVE)
    left = pairs
    while counted(left, minimum) != left:
        left = counted(left, minimum)
    assert [pair for pair, keep in zip(pairs, kept, strict=True) if keep] == left


def test_the_two_filters_differ_and_say_what_they_removed():
    # Item 9 is rare; without it user 2 has one event left, and then item 7 has one.
    log = pl.DataFrame({"user": [1, 1, 1, 2, 2, 3, 3], "item": [8, 8, 8, 9, 7, 7, 8]})
    once = prepare(log, min_events=2)
    again = prepare(log, min_events=2, filter="iterative")
    assert once.manifest["counts"]["removed"] == {"users": 0, "items": 1, "events": 1}
    assert again.manifest["counts"]["removed"] == {"users": 2, "items": 2, "events": 4}
    assert again.catalogue["item_id"].to_list() == [8]


def test_nothing_is_removed_by_default():
    log = pl.DataFrame({"user": [1, 1, 2], "item": [8, 8, 9]})
    dataset = prepare(log)
    assert len(dataset.sequences.items) == 3
    assert dataset.manifest["counts"]["short_users"] == 2


def test_dedupe_keeps_the_first_of_equal_events():
    log = pl.DataFrame({"user": [1, 1, 1, 1], "item": ["a", "b", "a", "a"], "time": [1, 1, 1, 2]})
    dataset = prepare(log, dedupe=True)
    assert [dataset.names()[item] for item in dataset.sequences[0]] == ["a", "b", "a"]
    assert dataset.manifest["counts"]["duplicates"] == 1
    assert len(prepare(log).sequences.items) == 4
    assert len(prepare(log.drop("time"), dedupe=True).sequences.items) == 2


@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=20))
def test_split(lengths: list[int]):
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    sequences = Sequences(pl.Series(range(len(lengths))), np.arange(1, offsets[-1] + 1, dtype=np.int32), offsets)
    train = Dataset(sequences, pl.DataFrame(), {}).train("validation")
    validation, test = held_out(sequences, "validation"), held_out(sequences, "test")
    assert np.array_equal(validation.evaluated, test.evaluated)
    assert np.array_equal(validation.histories.items, train.items)
    assert np.array_equal(validation.histories.offsets, train.offsets)
    targets = {user: (v, t) for user, v, t in zip(test.evaluated, validation.targets, test.targets, strict=True)}
    for user, whole in enumerate(sequences):
        if len(whole) >= 3:
            assert [*train[user], *targets[user]] == whole.tolist()
            assert [*test.histories[user], targets.pop(user)[1]] == whole.tolist()
        else:
            assert train[user].tolist() == test.histories[user].tolist() == whole.tolist()
    assert not targets


def test_statistics_of_a_small_log():
    log = pl.DataFrame({"user": [1] * 8 + [2] * 2, "item": [1, 1, 1, 1, 1, 1, 1, 2, 3, 4]})
    figures = statistics(prepare(log))
    assert (figures["users"], figures["items"], figures["events"]) == (2, 4, 10)
    assert figures["density"] == 10 / 8
    assert (figures["evaluated_users"], figures["short_users"]) == (1, 1)
    assert (figures["length"]["mean"], figures["length"]["shortest"], figures["length"]["longest"]) == (5, 2, 8)
    assert figures["tail"]["events_of_top_tenth"] == pytest.approx(0.7)
    assert figures["tail"]["items_of_last_fifth_of_events"] == pytest.approx(0.5)
    # Counts 1, 1, 1, 7: mean absolute difference 36/16, over twice the mean 2.5.
    assert figures["tail"]["gini"] == pytest.approx(36 / 16 / 5)


def dump(dataset: Dataset) -> str:
    """Free of our numbering: `user: item item ...` a line, users by id, items by time, ids as in the log."""
    ids = np.concatenate([[0], dataset.catalogue["item_id"].to_numpy()])
    rows = zip(dataset.sequences.users, dataset.sequences, strict=True)
    return "".join(f"{user}: {' '.join(map(str, ids[items]))}\n" for user, items in rows)


def kang_and_mcauley(ratings: Path) -> str:
    """The preprocessing that SASRec's authors publish (count once, drop, sort each user by time), in the same dump."""
    rows = [line.split("::") for line in ratings.read_text().splitlines()]
    users, items = Counter(row[0] for row in rows), Counter(row[1] for row in rows)
    histories: dict[int, list[tuple[int, str]]] = defaultdict(list)
    for user, item, _, time in rows:
        if users[user] >= 5 and items[item] >= 5:
            histories[int(user)].append((int(time), item))
    for history in histories.values():
        history.sort(key=lambda event: event[0])
    return "".join(f"{user}: {' '.join(item for _, item in histories[user])}\n" for user in sorted(histories))


def test_ml_1m_is_sasrecs(ml_1m: Path):
    dataset = prepare_named("ml-1m", ml_1m)
    figures = statistics(dataset)
    assert (figures["users"], figures["items"], figures["events"]) == (6_040, 3_416, 999_611)
    text = dump(dataset)
    assert text == kang_and_mcauley(ml_1m)
    assert hashlib.sha256(text.encode()).hexdigest() == (
        "0ccd2e99fd7add27dc163171831ee2af50610e2b3b761c422ebabc2d651d1461"
    )
    if (ml_1m.parent / "movies.dat").is_file():
        titles = dict(zip(dataset.catalogue["item_id"], dataset.catalogue["title"], strict=True))
        assert titles["1"] == "Toy Story (1995)"
        assert titles["2692"] == "Run Lola Run (Lola rennt) (1998)"
        assert "é" in titles["73"]


def test_amazon_games_from_video_txt(video_txt: Path):
    dataset = prepare_named("amazon-games", video_txt)
    figures = statistics(dataset)
    assert (figures["users"], figures["items"], figures["events"]) == (31_013, 23_715, 287_107)
    byuser: dict[int, list[str]] = defaultdict(list)
    for line in video_txt.read_text().splitlines():
        user, item = line.split()
        byuser[int(user)].append(item)
    assert dump(dataset) == "".join(f"{user}: {' '.join(byuser[user])}\n" for user in sorted(byuser))


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_the_order_of_rows_matters_only_for_ties(data: st.DataObject):
    events = data.draw(
        st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9)), min_size=8, max_size=40).map(
            lambda pairs: [(*pair, time) for time, pair in enumerate(pairs)]
        )
    )
    shuffled = data.draw(st.permutations(events))
    one, other = (
        prepare(pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")) for rows in (events, shuffled)
    )
    assert np.array_equal(one.sequences.items, other.sequences.items)
    assert one.sequences.users.equals(other.sequences.users)


@given(ids=st.lists(st.integers(-5, 5) | st.integers(-(2**63), 2**63 - 1), min_size=1), text=st.booleans())
def test_numbering_ids_loses_nothing_and_keeps_their_order(ids: list[int], text: bool):
    column = pl.Series(ids, dtype=pl.Int64)
    given_column = column.cast(pl.String).cast(pl.Categorical) if text else column
    coded = encode_users(given_column, untyped=text)
    assert coded.ids.to_list() == sorted(set(ids))
    assert coded.ids.gather(coded.codes).to_list() == ids
    items = encode_items(given_column, untyped=text)
    assert items.ids.cast(pl.Int64).to_list() == coded.ids.to_list()
    assert np.array_equal(items.codes, coded.codes)


@given(ids=st.sets(st.sampled_from(["7", "007", "10", "9", "-3", "+7", "x", "1e3", "", " 7", str(2**70)]) | st.text()))
def test_the_order_of_two_item_ids_never_depends_on_a_third(ids: set[str]):
    whole = sorted_ids(pl.Series(sorted(ids), dtype=pl.String), untyped=True).to_list()
    assert sorted(whole) == sorted(ids)
    for odd in ids:
        rest = sorted_ids(pl.Series(sorted(ids - {odd}), dtype=pl.String), untyped=True).to_list()
        assert rest == [other for other in whole if other != odd]
