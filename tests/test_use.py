"""What people do with a model: the same filters on the command line, in Python and over HTTP; comparing runs; what is alike."""

import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dpformer import DPFormer, load_model
from dpformer.data import load, prepare, save
from dpformer.errors import DataError, DPFormerError
from dpformer.evaluation import difference, evaluate, held_out, metrics
from dpformer.fit.presets import make_recipe
from dpformer.fit.run import start

ITEMS = 60


def log(users: int = 150, seed: int = 0) -> pl.DataFrame:
    """Whole-number ids; items 51 to 60 are never bought."""
    random = np.random.default_rng(seed)
    rows = []
    for user in range(users):
        here = int(random.integers(50))
        for time in range(int(random.integers(3, 12))):
            rows.append((1000 + user, 1 + here, time))
            here = (here + int(random.integers(1, 4))) % 50
    return pl.DataFrame(rows, schema=["user_id", "item_id", "timestamp"], orient="row")


def products() -> pl.DataFrame:
    number = pl.int_range(1, ITEMS + 1, eager=True)
    frame = pl.DataFrame({"item_id": number, "title": [f"Product {n}" for n in number]})
    return frame.with_columns(
        category=pl.when(number % 3 == 0).then(pl.lit("tea")).otherwise(pl.lit("cake")),
        price=number * 0.5,
        in_stock=number % 2 == 0,
    )


@pytest.fixture(scope="module")
def shop(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("shop")
    save(prepare(log(), catalogue=products()), folder / "data")
    for name, preset in (("run", "distilled"), ("popular", "popularity")):
        settings = {"distil": {"steps": 20}} if preset == "distilled" else {}
        run = start(folder / name, folder / "data", make_recipe(preset, epsilon=20, delta=1e-3, **settings))
        assert run.train()
        run.close()
    return folder


FILTERS = [
    {"where": "category = 'tea' and in_stock"},
    {"where": "price between 3 and 8", "exclude": [7, "Product 8"]},
    {"only": [3, 51, "Product 60"]},
    {"only": [3, 9, 12], "exclude": [9], "where": "price < 100"},
    {"exclude": list(range(1, 51))},
]


def passes(filters) -> set[int]:
    frame = products()
    if "where" in filters:
        frame = frame.sql(f"select * from self where {filters['where']}")
    named = {
        name: [str(n).removeprefix("Product ") for n in filters[name]]
        for name in ("only", "exclude")
        if name in filters
    }
    ids = set(frame["item_id"].cast(pl.String)) & set(named.get("only", map(str, range(1, ITEMS + 1))))
    return {int(n) for n in ids - set(named.get("exclude", []))}


@pytest.mark.parametrize("filters", FILTERS)
def test_filters_are_the_same_everywhere(filters, shop, dpformer):
    pytest.importorskip("fastapi")
    from fastapi.testclient import TestClient

    from dpformer.serve.app import create_app
    from dpformer.serve.ranker import load_for_serving

    model, history = load_model(shop / "run"), [1, 2, 4]
    everything = model.recommend([history], k=ITEMS)["item_id"].to_list()
    expected = [item for item in everything if item in passes(filters)]
    assert 0 < len(expected) < len(everything)
    for k in (2, ITEMS):
        assert model.recommend([history], k, **filters)["item_id"].to_list() == expected[:k]
    typed = [(f"--{name}", value if name == "where" else ",".join(map(str, value))) for name, value in filters.items()]
    words = [word for pair in typed for word in pair]
    done = dpformer("recommend", shop / "run", "--history", "1,2,4", "-k", "40", *words, "--json")
    assert [row["item_id"] for row in json.loads(done.out)] == expected[:40]
    assert ("1 of 1 lists have fewer than 40 items" in done.err) == (len(expected) < 40)
    with TestClient(create_app(load_for_serving(shop / "run"))) as client:
        answer = client.post("/recommend", json={"histories": [history], "k": 40, **filters}).json()["rankings"][0]
    assert [int(row["item_id"]) for row in answer["items"]] == expected[:40]
    assert answer["missing"] == max(40 - len(expected), 0)
    with pytest.warns(UserWarning, match="1 of 1 lists have fewer than 60 items"):
        frame = DPFormer.load(shop / "run").recommend(histories=[history], k=ITEMS, **filters)
    assert frame["item_id"].to_list() == expected


def test_filters_that_are_wrong_are_refused(shop, dpformer):
    model = load_model(shop / "run")
    for where in ("colour = 'red'", "price > ", "max(price) > 1", "price"):
        with pytest.raises(DataError, match="where"):
            model.recommend([[1]], where=where)
    for name in ("only", "exclude"):
        with pytest.raises(DPFormerError, match=rf"{name} is a list of items, not '12'; give {name}=\['12'\]"):
            model.recommend([[1]], **{name: "12"})
    with pytest.warns(UserWarning, match=r"1 items of histories are not in the catalogue and skipped: \['nope'\]"):
        DPFormer.load(shop / "run").recommend(histories=[[1, "nope"], ["nope"]])
    done = dpformer("recommend", shop / "run", "--history", "1", "--only", "@no-such-file")
    assert done.code == 2
    assert "no-such-file: cannot be read (No such file or directory); give @FILE with one item per line" in done.err
    done = dpformer("recommend", shop / "run", "--history", "1", "--where", "price > 1000")
    assert done.code == 2
    assert "no item of the catalogue passes" in done.err
    done = dpformer("recommend", shop / "run", "--history", "1", "--only", "3, nonsense", "--json")
    assert "not in the catalogue: 1 (nonsense)" in done.err


def test_a_text_column_that_is_not_a_number_is_named(shop):
    model = load_model(shop / "run")
    texts = model.catalogue.with_columns(size=pl.Series(["12"] * (ITEMS - 1) + ["large"]))
    object.__setattr__(model, "catalogue", texts)
    with pytest.raises(DataError, match=r"'large' in 'size', which is not a number"):
        model.recommend([[1]], where="size > 3")
    assert model.recommend([[1]], where="size = 'large'")["item_id"].to_list() == [60]


def test_lists_for_all_with_files_of_exclusions(shop, dpformer, tmp_path, monkeypatch):
    monkeypatch.setattr("dpformer.cli.recommend._ROWS", 64)  # several parts
    out, only, own = tmp_path / "recs.parquet", tmp_path / "only.txt", tmp_path / "own.csv"
    only.write_text("".join(f"Product {n}\n" for n in range(20, 61)))
    own.write_text("reader,book\n1003,30\n")
    refused = dpformer("recommend", shop / "run", "--all", shop / "data", "--exclude-for", own)
    assert "the columns of this table are called as in the first log: 'user_id', 'item_id'" in refused.err
    own.write_text("user_id,item_id\n1003,30\n1003,31\n1003,999\n9999,30\n")
    done = dpformer("recommend", shop / "run", "--all", shop / "data", "-o", out, "-k", "5",
                    "--only", f"@{only}", "--exclude-for", own, "--where", "price <= 20")  # fmt: skip
    assert done.code == 0, done.err
    assert "who are not in the log: 1 (9999)" in done.err
    frame = pl.read_parquet(out)
    assert frame.schema["user_id"] == pl.Int64, "ids keep their type, so that a join works"
    assert frame.join(log(), on=["user_id", "item_id"]).is_empty()
    assert set(frame["item_id"]) <= set(range(20, 41))
    theirs = frame.filter(pl.col("user_id") == 1003)["item_id"].to_list()
    assert len(theirs) == 5
    assert not {30, 31} & set(theirs)
    model = DPFormer.load(shop / "run")
    same = model.recommend(log=log(), users=[1003], k=5, only=list(range(20, 61)), where="price <= 20",
                           exclude_for={1003: [30, 31]})  # fmt: skip
    assert same["item_id"].to_list() == theirs
    everything = model.recommend(log=log(), k=5, only=list(range(20, 61)), where="price <= 20")
    assert everything["user_id"].n_unique() == 150


def test_similar_items_come_from_the_folder_alone(shop, dpformer):
    model = load_model(shop / "run")
    frame = model.similar("Product 7", 6)
    assert frame.columns == ["rank", "item_id", "title", "score"]
    assert frame["score"].is_sorted(descending=True)
    assert frame["score"].max() <= 1 + 1e-5
    assert 7 not in frame["item_id"]
    rows = json.loads(dpformer("similar", shop / "run", "7", "-k", "6", "--json").out)
    assert [row["item_id"] for row in rows] == frame["item_id"].to_list()
    teas = model.similar(7, ITEMS, where="category = 'tea'", exclude=[9])["item_id"].to_list()
    again = DPFormer.load(shop / "run").similar(7, ITEMS, where="category = 'tea'", exclude=[9])
    assert again["item_id"].to_list() == teas
    assert teas
    assert all(item % 3 == 0 and item != 9 for item in teas)
    with pytest.raises(DPFormerError, match="not in the catalogue"):
        model.similar("no such")
    done = dpformer("similar", shop / "popular", "7")
    assert done.code == 2
    assert "nothing was released" in done.err


def test_runs_are_compared_on_the_same_people(shop, dpformer, tmp_path):
    save(prepare(log(seed=5), catalogue=products()), tmp_path / "week2")
    both = [shop / "run", shop / "popular"]
    result = json.loads(dpformer("evaluate", *both, "--data", tmp_path / "week2", "--json").out)
    found = result["difference"][str(both[1])]["ndcg@10"]
    values = [result["runs"][str(run)]["masked"]["ndcg@10"]["value"] for run in both]
    assert found["value"] == pytest.approx(values[1] - values[0], abs=1e-9)
    assert found["low"] <= found["value"] <= found["high"]
    assert not (shop / "popular" / "metrics.json").exists(), "figures of other data are not the run's"
    done = dpformer("evaluate", *both, "--data", tmp_path / "week2")
    assert f"so it was not written for: {both[0]}, {both[1]}" in done.err.replace("\n", " ")
    assert "minus" in done.out
    assert "popularity" in done.out
    assert dpformer("evaluate", shop / "run", shop / "data").err.count("give it as --data") == 1
    # Not seen: the run was trained on another log. Seen: on this one.
    run = start(tmp_path / "all", shop / "data", make_recipe("popularity", epsilon=20, delta=1e-3, hold_out="nothing"))
    assert run.train()
    run.close()
    assert dpformer("evaluate", tmp_path / "all").code == 2
    done = dpformer("evaluate", tmp_path / "all", "--data", tmp_path / "week2")
    assert done.code == 0
    assert "was trained with hold_out 'nothing'" in done.err


def test_a_difference_is_paired_within_people():
    random = np.random.default_rng(0)
    ranks = random.geometric(0.05, 3000) - 1
    better = np.maximum(ranks - random.integers(0, 2, 3000), 0)
    paired = difference(better, ranks)["ndcg@10"]
    gain = np.where(better < 10, 1 / np.log2(better + 2), 0) - np.where(ranks < 10, 1 / np.log2(ranks + 2), 0)
    assert paired.value == pytest.approx(gain.mean())
    drawn = [gain[random.integers(0, 3000, 3000)].mean() for _ in range(2000)]
    np.testing.assert_allclose([paired.low, paired.high], np.percentile(drawn, [2.5, 97.5]), rtol=0.1)
    alone = [metrics(one)["ndcg@10"] for one in (better, ranks)]
    assert paired.high - paired.low < 0.5 * (alone[0].high - alone[0].low), "apart, the intervals are far wider"


def test_a_sample_and_another_k(shop, dpformer):
    dataset, model = load(shop / "data"), load_model(shop / "run")
    held = held_out(dataset.sequences, "test")
    some = evaluate(model, held, ITEMS, sample=40, cutoffs=(5, 10, 20, 35))
    assert "40 users, drawn uniformly from 150" in some.protocol.line()
    assert "no sampling" not in some.protocol.line()
    assert len(some.ranks) == 40
    assert {"ndcg@35", "hit@5"} <= set(some.masked)
    whole = evaluate(model, held, ITEMS, sample=1000, cutoffs=(35,))
    assert "all 150 users" in whole.protocol.line()
    assert whole.masked["hit@35"].value == pytest.approx(
        evaluate(model, held, ITEMS, cutoffs=(35,)).masked["hit@35"].value
    )
    done = dpformer("evaluate", shop / "run", "--sample", "40", "--k", "35")
    assert "NDCG@35" in done.out
