"""Runs whose catalogue is chosen privately: what the folder names, resuming, evaluation; and a public population."""

import json

import polars as pl
import pytest
from typer.testing import CliRunner

from dpformer import DPFormer, load_model
from dpformer.artifact.layout import ITEMS
from dpformer.cli.app import app
from dpformer.data import load, prepare, save
from dpformer.errors import DPFormerError
from dpformer.evaluation import evaluate, held_out
from dpformer.fit.run import resume, start
from tests.recipes import small_recipe

from .conftest import small_log

ODD = "the-odd-item-of-one-person"


@pytest.fixture(scope="module")
def private(tmp_path_factory):
    """300 people over 6 items, and one person with an item of their own."""
    log = small_log(users=300, items=6).drop("title")
    own = log.filter(pl.col("user_id") == log["user_id"][-1]).tail(1).with_columns(item_id=pl.lit(ODD))
    folder = tmp_path_factory.mktemp("private") / "data"
    save(prepare(pl.concat([log, own]), catalogue="private"), folder)
    return folder


RECIPES = {
    "popularity": {"preset": "popularity"},
    "transitions": {"preset": "transitions"},
    "network": {"vocabulary": 5},
}


@pytest.mark.parametrize("kind", RECIPES)
def test_the_folder_names_no_item_of_one_person(private, tmp_path, kind):
    run = start(tmp_path / "run", private, small_recipe(seed=None, **RECIPES[kind]))
    run.train()
    run.close()
    for path in (tmp_path / "run").rglob("*"):
        if path.is_file() and path.name != "local.json":
            assert ODD.encode() not in path.read_bytes(), path.name
    model = load_model(tmp_path / "run")
    assert 1 <= len(model.catalogue) <= 6
    assert json.loads((tmp_path / "run" / ITEMS).read_text().splitlines()[0])["item"] == 1
    assert model.statement.data.catalogue == "private"
    assert 0 < model.statement.data.threshold_delta < model.statement.delta
    assert "chosen by noisy counts" in model.statement.text()
    assert float(model.statement.epsilon) <= 20
    assert model.statement.releases[0].name == "items"
    shown = CliRunner().invoke(app, ["show", str(tmp_path / "run"), "--json"], catch_exceptions=False)
    assert json.loads(shown.stdout)["spent"]["epsilon"] == model.statement.epsilon


def test_a_log_whose_items_are_taken_as_they_are_names_it(private, tmp_path):
    """The control of the test above."""
    dataset = load(private)
    dataset.manifest["catalogue"]["mode"] = "log"
    save(dataset, tmp_path / "data")
    run = start(tmp_path / "run", tmp_path / "data", small_recipe("popularity"))
    run.train()
    run.close()
    assert ODD in (tmp_path / "run" / ITEMS).read_text()
    assert "ASSUMED public" in load_model(tmp_path / "run").statement.text()


def test_a_run_that_was_interrupted_names_the_same_items(private, tmp_path):
    recipe = small_recipe(**RECIPES["network"])
    whole = start(tmp_path / "whole", private, recipe)
    whole.train()
    whole.close()
    cut = start(tmp_path / "cut", private, recipe)
    cut.train(should_stop=lambda: cut.step >= 3)
    cut.close()
    again = resume(tmp_path / "cut")
    again.train()
    again.close()
    for name in (ITEMS, "model.safetensors"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "cut" / name).read_bytes()


def test_items_that_the_model_does_not_have_count_as_missed(private, tmp_path):
    run = start(tmp_path / "run", private, small_recipe("popularity"))
    run.train()
    run.close()
    model, dataset = load_model(tmp_path / "run"), load(private)
    numbers = dataset.numbers_in(model.catalogue)
    held = held_out(dataset.sequences).renumbered(numbers)
    figures = evaluate(model, held, len(model.catalogue))
    assert figures.protocol.users == len(held.evaluated)
    odd = dataset.catalogue.filter(pl.col("item_id") == ODD)["item"][0]
    missed = held.targets[held_out(dataset.sequences).targets == odd]
    assert len(missed) == 1
    assert (missed == 0).all()


def test_the_estimator_takes_a_private_catalogue():
    log = small_log(users=300, items=6).drop("title")
    model = DPFormer("popularity", epsilon=20.0, delta=1e-3).fit(log, catalogue="private")
    user = log["user_id"][5]
    assert len(model.recommend(users=[user], k=2)) >= 1
    assert model.evaluate().protocol.users > 0


def test_nothing_to_name_is_one_clear_line(tmp_path):
    save(prepare(small_log(users=40, items=30).drop("title"), catalogue="private"), tmp_path / "data")
    run = start(tmp_path / "run", tmp_path / "data", small_recipe("popularity", epsilon=0.1, delta=1e-3))
    with pytest.raises(DPFormerError, match="catalogue='FILE'"):
        run.train()
    run.close()


def test_a_public_population_decides_rate_and_delta(data, tmp_path):
    recipe = small_recipe(population=400, batch_size=100, epochs=1.0)
    plan = recipe.plan(60)
    assert (plan.users, plan.rate, plan.steps) == (400, 0.25, 4)
    run = start(tmp_path / "run", data, recipe)
    run.train()
    run.close()
    assert load_model(tmp_path / "run").statement.users == 400
    with pytest.raises(DPFormerError, match="delta"):
        small_recipe(population=2000).plan(60)
