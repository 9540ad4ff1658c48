"""A prepared folder in shards trains the model of the same data in one file, to the last bit; nobody is in it twice."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from dpformer.data import load
from dpformer.data.store import ITEMS, SHARDS, finish
from dpformer.data.summary import item_counts
from dpformer.errors import DataError
from dpformer.fit.run import resume, start
from dpformer.privacy import read_ledger
from tests.distributed.processes import ranks_of, together, train
from tests.fit.conftest import data  # noqa: F401
from tests.recipes import small_recipe

RECIPES = {
    "network": small_recipe(vocabulary=11, share=0.1, dropout=0.2),
    "popularity": small_recipe("popularity"),
}


def write_shards(whole: Path, folder: Path, cuts: list[int], again: int = 0) -> Path:
    """What Spark writes of the same data: users up to each cut in a file of their own. again: users who are in two files."""
    dataset = load(whole)
    frame = dataset.sequences.frame()
    (folder / SHARDS).mkdir(parents=True)
    names = []
    for place, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(frame)], strict=True)):
        names.append(f"{SHARDS}/part-{place:05}.parquet")
        frame[max(0, first - again) : last].write_parquet(folder / names[-1])
    dataset.catalogue.write_parquet(folder / ITEMS)
    finish(folder, len(frame), item_counts(dataset), dataset.manifest, [*names, ITEMS])
    return folder


@pytest.fixture(scope="module")
def shards(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    return write_shards(data, tmp_path_factory.mktemp("shards") / "data", [1, 2, 40])


def assert_same(folder: Path, other: Path) -> None:
    for name in ("model.safetensors", "README.md", "config.json"):
        assert (folder / name).read_bytes() == (other / name).read_bytes(), name
    # A keyed hash of the sum of every answer.
    assert read_ledger(folder).entries == read_ledger(other).entries
    statements = [json.loads((run / "privacy.json").read_text()) for run in (folder, other)]
    for statement in statements:
        del statement["ledger"]  # the run's id
    assert statements[0] == statements[1]


@pytest.mark.parametrize("kind", RECIPES)
def test_one_process(kind, data, shards, tmp_path):  # noqa: F811
    for name, source in (("whole", data), ("shards", shards)):
        assert start(tmp_path / name, source, RECIPES[kind]).train()
    assert_same(tmp_path / "shards", tmp_path / "whole")


def several(rank: int, size: int, place: str, whole: str, shards: str) -> list[bool]:
    """On one file; and on shards, stopped and gone on with."""
    ranks, folder, found = ranks_of(rank, size), Path(place), []
    for name, source in (("whole", whole), ("shards", shards)):

        def fit(name: str = name, source: str = source) -> object:
            return start(folder / name, Path(source), RECIPES["network"], ranks)

        found.append(train(ranks, fit, stop_at=4 if name == "shards" else 0))
    found.append(train(ranks, lambda: resume(folder / "shards", ranks=ranks)))
    return found


def test_two_processes_and_a_run_that_goes_on(data, shards, tmp_path):  # noqa: F811
    assert together(2, several, str(tmp_path), str(data), str(shards)) == [[True, False, True]] * 2
    assert_same(tmp_path / "shards", tmp_path / "whole")


def test_a_shard_that_is_missing_or_changed_is_refused(data, tmp_path):  # noqa: F811
    folder = write_shards(data, tmp_path / "data", [20])
    second = folder / SHARDS / "part-00001.parquet"
    content = second.read_bytes()
    pl.read_parquet(second)[:-1].write_parquet(second)
    with pytest.raises(DataError, match=r"part-00001.parquet: is not what the manifest says"):
        start(tmp_path / "run", folder, RECIPES["network"])
    second.unlink()
    with pytest.raises(DataError, match=r"part-00001.parquet: is missing"):
        start(tmp_path / "run", folder, RECIPES["network"])
    assert not (tmp_path / "run").exists()
    second.write_bytes(content)
    load(folder)


def test_nobody_is_two_people(data, tmp_path):  # noqa: F811
    """Somebody in two shards would be drawn and clipped twice, and be told of the guarantee for one."""
    folder = write_shards(data, tmp_path / "data", [20, 40], again=1)
    with pytest.raises(DataError, match=r"2 users are in it more than once; run dpformer prepare again"):
        load(folder)
