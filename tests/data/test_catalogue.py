"""What the log may decide: the catalogue, its types and titles, filters, and what one person can change."""

import gzip
import json
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpformer.data import Dataset, held_out, load, prepare, prepare_named, save, statistics
from dpformer.errors import DataError

LOG = pl.DataFrame(
    {
        "user": ["ann", "ann", "ann", "bob", "bob", "cid"],
        "sku": ["10", "9", "x", "9", "10", "x"],
        "title": ["Ten", "Nine", "odd", "Nine", "Ten", "odd"],
    }
)
ITEMS = pl.DataFrame({"sku": ["9", "10", "7"], "title": ["Nine", "", "Seven"], "price": ["1", "2", "3"]})


def sequences(dataset: Dataset) -> dict[str, list[str]]:
    """Free of numbering: user to item ids, all as text."""
    ids = ["", *dataset.catalogue["item_id"].cast(pl.String)]
    users = dataset.sequences.users.cast(pl.String)
    return {user: [ids[item] for item in row] for user, row in zip(users, dataset.sequences, strict=True)}


INSIDE = {"ann": ["10", "9"], "bob": ["9", "10"], "cid": []}


def test_a_public_catalogue_decides_which_items_there_are():
    dataset = prepare(LOG, catalogue=ITEMS)
    assert dataset.catalogue_mode == "public"
    # Typed text: by code point. Titles and further columns come from the catalogue, and items nobody touched stay in.
    assert dataset.catalogue.columns == ["item", "item_id", "title", "price"]
    assert dataset.catalogue["item_id"].to_list() == ["10", "7", "9"]
    assert dataset.catalogue["item"].to_list() == [1, 2, 3]
    assert dataset.names() == ["", "10", "Seven", "Nine"]
    assert sequences(dataset) == INSIDE
    assert dataset.manifest["catalogue"] == {
        "mode": "public",
        "source": "frame",
        "sha256": None,
        "items": 3,
        "outside_events": 2,
    }
    counts = dataset.manifest["counts"]
    assert (counts["users"], counts["items"], counts["events"]) == (3, 3, 4)
    assert (counts["outside_catalogue"], counts["empty_users"], counts["evaluated_users"]) == (2, 1, 0)
    assert not any("is not used" in note for note in dataset.manifest["notes"])
    assert dataset.outside_guarantee == []


WRITERS: dict[str, Callable[[Path], None]] = {
    "items.csv": lambda path: ITEMS.write_csv(path),
    "items.tsv": lambda path: ITEMS.write_csv(path, separator="\t", quote_style="never"),
    "items.parquet": lambda path: ITEMS.write_parquet(path),
    "items.jsonl": lambda path: ITEMS.write_ndjson(path),
    "items.csv.gz": lambda path: path.write_bytes(gzip.compress(ITEMS.write_csv().encode())) and None,
    "literal.json": lambda path: path.write_text("".join(f"{row}\n" for row in ITEMS.to_dicts())) and None,
    "items.item": lambda path: (
        path.write_text("sku:token\ttitle:token_seq\tprice:float\n9\tNine\t1\n10\t\t2\n7\tSeven\t3\n") and None
    ),
    "log": lambda path: ITEMS.write_csv(path),
    "private": lambda path: ITEMS.write_csv(path),
}


@pytest.mark.parametrize("name", WRITERS)
def test_a_catalogue_in_any_format(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    WRITERS[name](Path(name))
    # A file that is really called log or private is given as ./log, or as a Path.
    for path in (f"./{name}", Path(name)):
        dataset = prepare(LOG, catalogue=path)
        assert sequences(dataset) == INSIDE
        assert set(dataset.names()[1:]) == {"10", "Seven", "Nine"}
        assert dataset.catalogue["price"].to_list() != [None] * 3
        assert dataset.manifest["catalogue"]["source"].endswith(name)
        assert len(dataset.manifest["catalogue"]["sha256"]) == 64


def test_a_catalogue_with_further_columns_of_any_type(tmp_path: Path):
    rows = [{"sku": "9", "genres": ["a", "b"], "year": 1999}, {"sku": "10", "year": None, "more": {"x": 1.5}}]
    (tmp_path / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = prepare(LOG, catalogue=tmp_path / "items.jsonl")
    assert dataset.catalogue["genres"].to_list() == [None, ["a", "b"]]
    assert dataset.catalogue["year"].to_list() == [None, 1999]
    save(dataset, tmp_path / "out")
    assert load(tmp_path / "out").catalogue.equals(dataset.catalogue)


def test_movies_dat_and_a_list_of_ids(tmp_path: Path):
    (tmp_path / "movies.dat").write_text("9::Nine::Drama\n10::Ten::Comedy\n")
    dataset = prepare(LOG, catalogue=tmp_path / "movies.dat")
    assert dataset.names() == ["", "Nine", "Ten"]
    assert dataset.catalogue.columns == ["item", "item_id", "title", "column_3"]
    # Ids that are text: nothing tells a title that is a number from one that is not.
    (tmp_path / "movies.dat").write_text("x::1984\ny::Ten\n")
    letters = pl.DataFrame({"user": ["ann", "ann"], "sku": ["x", "y"]})
    assert prepare(letters, catalogue=tmp_path / "movies.dat").names() == ["", "1984", "Ten"]
    for header in ("item_id", "item id", '"sku"'):
        (tmp_path / "ids.csv").write_text(f"{header}\n10\n9\n")
        assert prepare(LOG, catalogue=tmp_path / "ids.csv").catalogue.columns == ["item", "item_id"]


def test_the_name_that_the_log_has_for_the_item_goes_before_the_usual_ones(tmp_path: Path):
    (tmp_path / "items.csv").write_text("code,product\n9,a\n10,b\n")
    dataset = prepare(LOG.rename({"sku": "code"}), item="code", catalogue=tmp_path / "items.csv")
    assert sequences(dataset) == INSIDE
    assert dataset.catalogue.columns == ["item", "item_id", "product"]


def test_the_type_of_the_ids_is_the_catalogues_and_they_match_by_text(tmp_path: Path):
    numbers = pl.DataFrame({"item": [10, 9]})
    assert prepare(LOG, catalogue=numbers).catalogue["item_id"].to_list() == [9, 10]
    assert sequences(prepare(LOG, catalogue=numbers)) == INSIDE
    (tmp_path / "items.csv").write_text("item\n10\n9\n007\n")
    log = LOG.filter(pl.col("sku") != "x").with_columns(pl.col("sku").cast(pl.Int64))
    dataset = prepare(log, catalogue=tmp_path / "items.csv")
    assert dataset.catalogue["item_id"].to_list() == ["9", "10", "007"]
    assert sequences(dataset) == {user: items for user, items in INSIDE.items() if items}


FAULTS = {
    "twice": ("item,title\na,A\nb,B\na,C\n", ["row 3, column 'item'", "the item a occurs twice", "drop the others"]),
    "missing": ("item,title\na,A\n,B\n", ["row 2, column 'item'", "no item", "every item needs one"]),
    "no rows": ("item,title\n", ["has no rows"]),
    "no header": ("1,A\n2,B\n", ["has no header", "item_id,title"]),
    "no item": ("code,name\na,A\n", ["no column is recognised as the item", "call it item_id"]),
    "one column": ("a\nb\n", ["does not name the item", "item_id"]),
    "taken": ("item_id,item\na,A\n", ["column 'item' cannot be kept", "rename"]),
    "first row swapped": ("Nine::9\n10::Ten\nx::odd\n", ["row 1, column 'column_1'", "look swapped", "item_id,title"]),
    "all rows swapped": ("Nine::9\nTen::10\n", ["row 1", "'Nine' and title '9'", "swap them"]),
    "all outside": ("item\nq\n", ["none of 6 events", "in the same way"]),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_catalogue_name_file_row_and_cure(fault: str, tmp_path: Path):
    text, parts = FAULTS[fault]
    (tmp_path / "items.csv").write_text(text)
    with pytest.raises(DataError) as caught:
        prepare(LOG, catalogue=tmp_path / "items.csv")
    for part in ("items.csv", *parts):
        assert part in str(caught.value)


def test_most_events_outside_is_a_warning():
    dataset = prepare(pl.concat([LOG, LOG.with_columns(sku=pl.lit("z"))]), catalogue=ITEMS)
    assert any(note.startswith("WARNING: 8 of 12 events, more than half") for note in dataset.manifest["notes"])


def test_private_and_log_hold_the_items_of_the_log():
    for mode in ("log", "private"):
        dataset = prepare(LOG, catalogue=mode)
        assert dataset.catalogue_mode == mode
        assert dataset.catalogue["item_id"].to_list() == ["10", "9", "x"]
        assert dataset.manifest["catalogue"] == {
            "mode": mode,
            "source": None,
            "sha256": None,
            "items": 3,
            "outside_events": 0,
        }
    assert Dataset(dataset.sequences, dataset.catalogue, {}).catalogue_mode == "log"


def test_what_a_private_catalogue_refuses():
    with pytest.raises(DataError, match="catalogue='FILE'"):
        prepare(LOG, catalogue="private", title="title")
    with pytest.raises(DataError, match="min_user_events=N"):
        prepare(LOG, catalogue="private", min_events=2)
    assert "--catalogue FILE only" in prepare(LOG, catalogue="private").manifest["notes"][0]


def test_with_a_catalogue_titles_come_from_it_only():
    assert prepare(LOG, catalogue=ITEMS.drop("title")).names() == ["", "10", "7", "9"]
    named = prepare(LOG, catalogue=ITEMS.rename({"title": "called"}), title="called")
    assert named.names() == ["", "10", "Seven", "Nine"]
    with pytest.raises(DataError, match="no column 'called' for title;"):
        prepare(LOG, catalogue=ITEMS, title="called")


def test_users_with_few_events_of_their_own_stay_without_events(tmp_path: Path):
    dataset = prepare(LOG, min_user_events=2)
    assert sequences(dataset) == {"ann": ["10", "9", "x"], "bob": ["9", "10"], "cid": []}
    assert dataset.manifest["counts"]["emptied"] == {"users": 1, "events": 1}
    assert dataset.outside_guarantee == []
    # Counted after duplicates are dropped and after the catalogue.
    inside = prepare(LOG, min_user_events=3, catalogue=ITEMS.vstack(pl.DataFrame([["x"], [""], [""]], ITEMS.columns)))
    assert sequences(inside) == {"ann": ["10", "9", "x"], "bob": [], "cid": []}
    twice = pl.concat([LOG, LOG.filter(pl.col("user") == "cid")])
    assert sequences(prepare(twice, min_user_events=2))["cid"] == ["x", "x"]
    assert sequences(prepare(twice, min_user_events=2, dedupe=True))["cid"] == []
    figures = statistics(inside)
    assert (figures["users"], figures["length"]["shortest"], figures["evaluated_users"]) == (3, 0, 1)
    save(inside, tmp_path / "out")
    again = load(tmp_path / "out")
    assert sequences(again) == sequences(inside)
    assert held_out(again.sequences).evaluated.tolist() == [0]
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o700
    for wrong, cure in ((5, "lower it"), (-1, "negative")):
        with pytest.raises(DataError, match=cure):
            prepare(LOG, min_user_events=wrong)


def test_a_filter_over_people_is_marked():
    dataset = prepare(LOG, min_events=2)
    assert sequences(dataset) == {"ann": ["10", "9", "x"], "bob": ["9", "10"]}
    assert len(dataset.outside_guarantee) == 1
    assert "--min-events 2, which counts over people" in dataset.outside_guarantee[0]
    # A public catalogue stays whole.
    public = prepare(LOG, min_events=2, catalogue=ITEMS)
    assert len(public.catalogue) == 3
    assert public.manifest["counts"]["removed"] == {"users": 1, "items": 0, "events": 0}
    assert len(public.outside_guarantee) == 1


def test_named_sets_say_what_their_catalogue_is(video_txt: Path):
    demo = prepare_named("demo")
    assert demo.catalogue_mode == "public"
    assert demo.manifest["catalogue"]["source"] == "demo"
    assert demo.outside_guarantee == []
    games = prepare_named("amazon-games", video_txt)
    assert games.catalogue_mode == "log"
    assert "part of the published data set, and its outcome is taken as public" in games.outside_guarantee[0]


# What one person can change. Ids are such that one may look like another type, and people's titles differ.
IDS = st.sampled_from(["1", "2", "10", "007", "x", "1e3", "-4", "é"])
EVENTS = st.lists(
    st.tuples(st.sampled_from("abcde"), IDS, st.integers(0, 3), st.sampled_from(["", "T", "odd"])),
    min_size=3,
    max_size=30,
)
PUBLIC_ITEMS = "item_id,title\n2,Two\n10,Ten\n007,Bond\nx,X\n"


def without(dataset: Dataset, person: str) -> dict[str, list[str]]:
    return {user: items for user, items in sequences(dataset).items() if user != person}


def moved(
    events: list[tuple[str, str, int, str]], person: str, folder: Path, options: dict[str, object]
) -> bool | None:
    """Whether anything but this person's own sequence is another without the person's events; None: refused."""
    made = []
    for kept in (events, [event for event in events if event[0] != person]):
        frame = pl.DataFrame(kept, schema=["user", "item", "time", "title"], orient="row")
        frame.write_csv(folder / "log.csv")
        try:
            made.append(prepare(folder / "log.csv", **options))
        except DataError:
            return None
    one, other = made
    same_numbers = np.array_equal(
        *(
            np.concatenate(
                [[0], *(row for user, row in zip(d.sequences.users, d.sequences, strict=True) if user != person)]
            )
            for d in made
        )
    )
    return not (
        one.catalogue.equals(other.catalogue)
        and one.catalogue.schema == other.catalogue.schema
        and without(one, person) == without(other, person)
        and same_numbers
    )


@settings(max_examples=60, deadline=None)
@given(events=EVENTS, least=st.integers(0, 4), dedupe=st.booleans())
def test_one_person_moves_nobody_else_and_no_catalogue(
    events: list[tuple[str, str, int, str]], least: int, dedupe: bool, tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("one")
    (folder / "items.csv").write_text(PUBLIC_ITEMS)
    options = {"catalogue": folder / "items.csv", "min_user_events": least, "dedupe": dedupe}
    for person in {event[0] for event in events}:
        assert not moved(events, person, folder, options)


def test_the_comparison_sees_filters_over_people_and_a_catalogue_of_the_log(tmp_path: Path):
    """The control: what couples people is found."""
    (tmp_path / "items.csv").write_text(PUBLIC_ITEMS)
    events = [(user, item, 0, "") for user in "ab" for item in ("2", "10")]
    events += [("a", "x", 0, ""), ("c", "x", 0, ""), ("c", "2", 0, "")]
    public = {"catalogue": tmp_path / "items.csv"}
    assert moved(events, "c", tmp_path, public) is False
    assert moved(events, "c", tmp_path, {**public, "min_events": 2}) is True
    odd = [*events, ("c", "007", 0, "")]
    assert moved(odd, "c", tmp_path, {}) is True
    assert moved(events, "c", tmp_path, {}) is False


@settings(max_examples=30, deadline=None)
@given(events=EVENTS)
def test_in_a_catalogue_of_the_log_one_person_changes_no_type_and_no_order(
    events: list[tuple[str, str, int, str]], tmp_path_factory: pytest.TempPathFactory
):
    folder = tmp_path_factory.mktemp("types")
    made = []
    for kept in (events, [event for event in events if event[0] != "a"]):
        frame = pl.DataFrame(kept, schema=["user", "item", "time", "title"], orient="row")
        frame.write_csv(folder / "log.csv")
        try:
            made.append(prepare(folder / "log.csv", title="title"))
        except DataError:
            return
    one, other = made
    assert one.catalogue.schema == other.catalogue.schema
    left = one.catalogue["item_id"].filter(one.catalogue["item_id"].is_in(other.catalogue["item_id"].implode()))
    assert left.to_list() == other.catalogue["item_id"].to_list()
    assert without(one, "a") == without(other, "a")
