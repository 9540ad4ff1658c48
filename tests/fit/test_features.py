"""`prepare --features`: columns of a declared catalogue in a run; the answers are those of a run without them."""

from dataclasses import replace

import polars as pl
import pytest

from dpformer import DPFormer, load_model
from dpformer.data import load
from dpformer.data.features import MOST, describe
from dpformer.fit.folder import read_recipe
from dpformer.privacy.replay import read_answers
from dpformer.trust.verify.fields import fields
from dpformer.trust.verify.own import rebuilt
from tests.fit.conftest import small_log
from tests.fit.test_commands import assert_one_line

FIT = ["--epsilon", 5, "--delta", 1e-3, "--seed", 3, "--quiet"]


def products(count=30):
    even = ["even" if n % 2 == 0 else "odd" for n in range(count)]
    return pl.DataFrame({"item_id": [f"i{n:02d}" for n in range(count)], "parity": even, "price": range(count)})


@pytest.fixture
def data(tmp_path, dpformer):
    """Data with a declared catalogue, without features and with."""
    small_log(users=120).drop("title").write_csv(tmp_path / "log.csv")
    products().write_csv(tmp_path / "products.csv")
    for name, more in (("plain", []), ("features", ["--features", "parity,price:3"])):
        options = ["--catalogue", tmp_path / "products.csv", "-o", tmp_path / name, *more]
        assert dpformer("prepare", tmp_path / "log.csv", *options).code == 0
    return tmp_path


@pytest.mark.parametrize("preset", ["distilled", "transitions"])
def test_the_answers_are_the_same_and_the_model_is_made_of_them_again(data, dpformer, preset):
    runs = {name: data / f"{name}-run" for name in ("plain", "features")}
    for name, run in runs.items():
        done = dpformer("fit", data / name, "--run", run, "--preset", preset, *FIT)
        assert done.code == 0, done
    for one, other in zip(*(read_answers(run / "answers")[1] for run in runs.values()), strict=True):
        assert one.name == other.name
        assert all((one.values[key] == other.values[key]).all() for key in one.values)
    outcome = rebuilt(runs["features"])
    assert outcome.good, outcome
    assert fields(runs["features"], load_model(runs["features"]), read_recipe(runs["features"])).good
    model = load_model(runs["features"])
    assert "--features parity,price:3" in (runs["features"] / "README.md").read_text()
    assert model.recommend([["i00", "i02"]], k=30)["score"].is_not_null().all()
    for command in (["recommend", "--history", "i00"], ["evaluate", "--data", data / "features"], ["similar", "i01"]):
        done = dpformer(command[0], runs["features"], *command[1:])
        assert done.code == 0, done


def test_another_value_of_a_feature_is_another_model(data, dpformer):
    """A catalogue that was changed after the fit is found out: the model is not made of it."""
    run = data / "run"
    assert dpformer("fit", data / "features", "--run", run, "--preset", "transitions", *FIT).code == 0
    lines = (run / "items.jsonl").read_text()
    (run / "items.jsonl").write_text(lines.replace('"odd"', '"even"', 3))
    outcome = rebuilt(run)
    assert not outcome.good
    assert "sources" in outcome.detail


@pytest.mark.parametrize(
    ("catalogue", "features", "message"),
    [
        (None, "parity", "--catalogue FILE"),
        ("private", "parity", "--catalogue FILE"),
        ("products.csv", "colour", "parity, price"),
        ("products.csv", "price:1", "price:10"),
        ("products.csv", "price:many", "price:10"),
        ("products.csv", "price", "price:10"),  # no two items have the same
    ],
)
def test_features_are_refused_with_the_cure(data, dpformer, catalogue, features, message):
    options = [] if catalogue is None else ["--catalogue", data / catalogue if "." in catalogue else catalogue]
    done = dpformer("prepare", data / "log.csv", "-o", data / "no", *options, "--features", features)
    assert_one_line(done, message)
    assert not (data / "no").exists()


def test_prepare_says_how_each_column_is_used(data, dpformer):
    table = products().with_columns(shelf=pl.Series(["a|b"] * 12 + ["b", "c", "d"] + [None] * 15))
    table.write_csv(data / "shelves.csv")
    options = ["--catalogue", data / "shelves.csv", "--features", "shelf,parity,price:3"]
    done = dpformer("prepare", data / "log.csv", "-o", data / "shelves", *options)
    assert done.code == 0, done
    said = " ".join(done.err.split())
    assert (
        "features: shelf has 2 values in use ('a', 'b'); ignored: 2 that fewer than 5 items have ('c', 'd'); " in said
    )
    assert "15 of 30 items have none" in said
    assert "features: parity has 2 values in use ('even', 'odd')" in said
    assert "features: price:3 has 3 values in use ('below 9.666666666666666', '9.666666666666666 to " in said
    many = describe({"brand": [str(n // 5) for n in range(5 * (MOST + 2))]})[0]
    assert f"brand has {MOST} values in use" in many
    assert f"ignored: 2 beyond the {MOST} that most items have ('128', '129')" in many


def test_features_of_a_catalogue_that_was_not_declared_are_not_used(data):
    dataset = load(data / "features")
    assert dataset.features
    for mode in ("log", "private"):
        assert not replace(dataset, manifest=dataset.manifest | {"catalogue": {"mode": mode}}).features


def test_the_next_catalogue_has_new_products_that_are_scored_at_once(data, dpformer):
    run = data / "run"
    assert dpformer("fit", data / "features", "--run", run, "--preset", "transitions", *FIT).code == 0
    products(34).write_csv(data / "more.csv")
    done = dpformer("refit", run, data / "log.csv", "--run", data / "next", "--catalogue", data / "more.csv", "--quiet")
    assert done.code == 0, done
    model = load_model(data / "next")
    assert model.model.spec.features > 0
    assert {f"i{n}" for n in range(30, 34)} <= set(model.recommend([["i00"]], k=40)["item_id"])
    products(34).drop("parity").write_csv(data / "less.csv")
    refused = dpformer(
        "refit", run, data / "log.csv", "--run", data / "no", "--catalogue", data / "less.csv", "--quiet"
    )
    assert_one_line(refused, "parity")


def test_in_python():
    model = DPFormer(preset="transitions", epsilon=5, delta=1e-3)
    model.fit(small_log(users=120).drop("title"), catalogue=products(), features=["parity", "price:3"])
    assert model.recommend(histories=[["i00"]], k=3).height == 3
