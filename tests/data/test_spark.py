"""Spark makes the sequences that polars makes, bit for bit. Needs pyspark and Java; skips without."""

import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpformer.data import Dataset, load, prepare, statistics
from dpformer.errors import DataError

pytest.importorskip("pyspark", reason="needs pyspark: pip install 'dpformer[spark]'")
if shutil.which("java") is None:
    pytest.skip("needs Java for Spark", allow_module_level=True)

from dpformer.data.spark import prepare_spark


@pytest.fixture(scope="module", autouse=True)
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    import os
    import sys

    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    settings = {
        "spark.ui.enabled": "false",
        "spark.sql.shuffle.partitions": "3",
        "spark.log.level": "OFF",
        "spark.local.dir": str(tmp_path_factory.mktemp("spark")),
    }
    session = SparkSession.builder.master("local[2]").config(map=settings).getOrCreate()
    yield session
    session.stop()


def same(one: Dataset, other: Dataset) -> None:
    assert one.sequences.users.dtype == other.sequences.users.dtype
    assert one.sequences.users.equals(other.sequences.users)
    assert one.sequences.items.dtype == other.sequences.items.dtype == np.int32
    assert np.array_equal(one.sequences.items, other.sequences.items)
    assert np.array_equal(one.sequences.offsets, other.sequences.offsets)
    assert (one.sequences.split is None) == (other.sequences.split is None)
    if one.sequences.split is not None:
        assert np.array_equal(one.sequences.split.before, other.sequences.split.before)
    assert one.catalogue.schema == other.catalogue.schema
    assert one.catalogue.equals(other.catalogue)
    assert one.manifest == other.manifest


def compare(log: object, folder: Path, **options: object) -> Dataset:
    """Both engines on one log: sequences, catalogue, manifest, statistics. Small slices and shards, so that there are several."""
    expected = prepare(log, **options)
    told = prepare_spark(log, folder, shard_events=60, force=True, **options)
    found = load(folder)
    same(found, expected)
    assert told.pop("statistics") == statistics(expected)
    assert told == expected.manifest
    return found


def random_log(seed: int, events: int = 300) -> pl.DataFrame:
    """Few distinct times (ties), repeated events, users with one event, titles that differ here and there."""
    draw = random.Random(seed)
    users = [f"u{min(draw.randrange(30), draw.randrange(30))}é"[: draw.choice([2, 3, 4])] for _ in range(events)]
    items = [draw.choice([7, 10, 100, *range(-3, 40)]) for _ in range(events)]
    times = [1_600_000_000 + draw.randrange(6) for _ in range(events)]
    repeated = [draw.randrange(events) for _ in range(events // 5)]
    rows = list(zip(users, items, times, strict=True)) + [
        (users[place], items[place], times[place]) for place in repeated
    ]
    draw.shuffle(rows)
    frame = pl.DataFrame(rows, schema=["user", "item", "time"], orient="row")
    odd = pl.Series([draw.choice(["", "", "", "x", "y"]) for _ in rows])
    return frame.with_columns(title=pl.when(pl.col("item") > 5).then("t" + pl.col("item").cast(pl.String) + odd))


@pytest.mark.parametrize(
    "options",
    [
        {"title": "title"},
        {"min_events": 8, "dedupe": True, "title": "title"},
        {"min_events": 5, "filter": "iterative"},
        {"min_user_events": 4, "split": "time", "date": "2020-09-13 12:26:43"},
    ],
)
def test_a_folder_of_parquet_with_ties_and_duplicates(tmp_path: Path, options: dict[str, object]):
    log = random_log(1)
    folder = tmp_path / "parts [1]*" / "user=7"  # names that a glob or Hive would read something into
    folder.mkdir(parents=True)
    for place, part in enumerate((log[:100], log[100:101], log[101:])):
        part.write_parquet(folder / f"{9 - place}.parquet", row_group_size=20)
    log[:0].write_parquet(folder / "0.parquet")
    found = compare(folder.parent, tmp_path / "out {a,b}", **options)
    assert len(list((tmp_path / "out {a,b}" / "sequences").iterdir())) > 1
    assert ("title" in found.catalogue.columns) == ("title" in options)
    # Equal times without an order of the file would give other sequences: the test means something.
    turned = prepare(pl.concat([log[:100], log[100:101], log[101:]]), **options)
    assert not np.array_equal(turned.sequences.items, found.sequences.items)


def test_text_with_quotes_blank_lines_and_numbers_as_ids(tmp_path: Path):
    log = random_log(2).with_columns(user=pl.col("item") * 3 + 1, title=pl.lit('a "b", c'))
    log.write_csv(tmp_path / "log.csv")
    with (tmp_path / "log.csv").open("a") as file:
        file.write("\n5,5,1600000000,\n\n")
    found = compare(tmp_path / "log.csv", tmp_path / "out", min_events=2)
    assert found.sequences.users.dtype == pl.Int64
    lines = [f"{u}::{i}::5::{t}" for u, i, t, _ in log.iter_rows()]
    (tmp_path / "log.dat").write_text("\n".join([*lines, "007::1::5::1600000000", ""]))
    found = compare(tmp_path / "log.dat", tmp_path / "out")
    assert found.sequences.users.dtype == pl.String


def test_a_field_over_two_lines_is_refused(tmp_path: Path):
    (tmp_path / "log.csv").write_text('user,item,text\na,1,"x\na,2,y"\nb,1,z\nb,2,z\n')
    with pytest.raises(DataError, match="line 2 has an odd number of quotes"):
        prepare_spark(tmp_path / "log.csv", tmp_path / "out")


ITEMS = pl.DataFrame({"item_id": [5, 7, 100, 9, 10, 12, 999], "title": ["a"] * 6 + [None], "year": range(7)})


@pytest.mark.parametrize(
    "options",
    [
        {"catalogue": ITEMS, "min_user_events": 3, "dedupe": True},
        {"catalogue": ITEMS.cast({"item_id": pl.String}), "min_events": 3},
        {"catalogue": "private", "min_user_events": 12},
        {"min_user_events": 5, "min_events": 4, "filter": "iterative"},
    ],
)
def test_catalogues_and_users_without_events(tmp_path: Path, options: dict[str, object]):
    log = random_log(6).with_columns(pl.col("item").cast(pl.String)) if "min_events" in options else random_log(6)
    log.write_parquet(tmp_path / "log.parquet")
    found = compare(tmp_path / "log.parquet", tmp_path / "out", **options)
    assert ("min_events" in options) == (found.manifest["counts"]["empty_users"] == 0)


def test_errors_of_catalogues_and_filters(tmp_path: Path):
    for options in ({"catalogue": pl.DataFrame({"item": ["q"]})}, {"min_user_events": 9}, {"min_user_events": -1}):
        with pytest.raises(DataError) as expected:
            prepare(LOG, **options)
        with pytest.raises(DataError) as found:
            prepare_spark(LOG, tmp_path / "out", **options)
        assert str(found.value) == str(expected.value)


@pytest.mark.parametrize(
    "times",
    [
        None,
        pl.col("time").cast(pl.Float64) + 0.5,
        pl.col("time") * 1000,
        pl.from_epoch("time").cast(pl.Datetime("ns", "UTC")) + pl.duration(nanoseconds=999_999_999),
        pl.from_epoch("time").dt.strftime("%Y-%m-%dT%H:%M:%S.25+01:00"),
        pl.when(pl.col("time") % 2 == 0).then(pl.lit("0")).otherwise(pl.lit("-0.0")),
    ],
    ids=["none", "fractions", "milliseconds", "nanoseconds", "iso", "zeros"],
)
def test_times_of_every_kind(tmp_path: Path, times: pl.Expr | None):
    log = random_log(3, 80).with_columns(user=pl.col("item") % 7 * 1.0, item=pl.col("item").cast(pl.String))
    log = log.drop("time") if times is None else log.with_columns(time=times)
    log.write_parquet(tmp_path / "log.parquet")
    compare(tmp_path / "log.parquet", tmp_path / "out", dedupe=True)


LOG = pl.DataFrame({"user": ["a", "a", "b", "b"], "item": [1, 2, 3, 4], "time": [1_600_000_000] * 4})
BAD = {
    "no user": LOG.with_columns(user=pl.when(pl.col("item") < 3).then("user")),
    "no item": LOG.with_columns(item=pl.when(pl.col("item") != 2).then("item")),
    "no time": LOG.with_columns(time=pl.when(pl.col("item") < 4).then("time")),
    "negative": LOG.with_columns(time=pl.col("time") * pl.when(pl.col("item") == 3).then(-1).otherwise(1)),
    "absurd": LOG.with_columns(time=pl.col("time") * pl.when(pl.col("item") == 3).then(9).otherwise(1)),
    "no time as in the first row": LOG.with_columns(time=pl.Series(["1600000000", "1600000000", "soon", "later"])),
    "one event": LOG.with_columns(user=pl.col("item")),
    "no rows": LOG[:0],
}


@pytest.mark.parametrize("fault", BAD)
def test_errors_are_those_of_polars(tmp_path: Path, fault: str):
    (tmp_path / "log").mkdir()
    BAD[fault][:2].write_parquet(tmp_path / "log" / "a.parquet")
    BAD[fault][2:].write_parquet(tmp_path / "log" / "b.parquet")
    with pytest.raises(DataError) as expected:
        prepare(tmp_path / "log")
    with pytest.raises(DataError) as found:
        prepare_spark(tmp_path / "log", tmp_path / "out")
    assert str(found.value) == str(expected.value)
    assert [path.name for path in tmp_path.iterdir()] == ["log"]


def test_a_filter_that_leaves_nothing(tmp_path: Path):
    for options in ({"min_events": 5}, {"min_events": 2, "filter": "iterative"}):
        with pytest.raises(DataError, match="lower it"):
            prepare_spark(LOG, tmp_path / "out", **options)


def test_a_broken_part_is_named(tmp_path: Path):
    (tmp_path / "log").mkdir()
    for name in "ab":
        random_log(4).write_parquet(tmp_path / "log" / f"{name}.parquet", compression="uncompressed")
    whole = (tmp_path / "log" / "b.parquet").read_bytes()
    (tmp_path / "log" / "b.parquet").write_bytes(whole[:40] + b"\xff" * 400 + whole[440:])
    with pytest.raises(DataError, match=r"b\.parquet: is not a valid Parquet file"):
        prepare_spark(tmp_path / "log", tmp_path / "out")


def test_the_command(tmp_path: Path, dpformer: Callable):
    random_log(5, 600).write_csv(tmp_path / "log.csv")
    done = dpformer("prepare", tmp_path / "log.csv", "-o", tmp_path / "out", "--engine", "spark", "--json")
    assert done.code == 0, done.err
    again = dpformer("prepare", tmp_path / "log.csv", "-o", tmp_path / "one", "--json")
    assert done.out.replace('out"', 'one"') == again.out
    assert dpformer("prepare", "demo", "-o", tmp_path / "x", "--engine", "spark").code == 2
    assert dpformer("prepare", tmp_path / "log.csv", "-o", tmp_path / "x", "--engine", "dask").code == 2


def test_ml_1m(ml_1m: Path, tmp_path: Path):
    expected = prepare(ml_1m, min_events=5)
    prepare_spark(ml_1m, tmp_path / "out", min_events=5, shard_events=200_000)
    same(load(tmp_path / "out"), expected)
