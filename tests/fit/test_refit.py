"""`dpformer refit`: the same recipe and reading on a new log, charged to the same account, with the old answers as a prior."""

import json

import polars as pl
import pytest

from dpformer import load_model
from dpformer.data import load
from dpformer.fit.folder import read_recipe
from dpformer.privacy import parse_statement
from dpformer.privacy.account import PeopleAccount
from dpformer.trust.verify.folder import ledger_against_statement
from dpformer.trust.verify.rebuild import rebuilt
from tests.fit.conftest import small_log
from tests.fit.test_commands import assert_one_line

DELTA = 1e-3


@pytest.fixture
def weeks(tmp_path, dpformer):
    """Two weeks of a log with columns of its own, a product table, and a run on the first."""
    log = small_log(users=120).rename({"user_id": "who", "item_id": "what", "timestamp": "bought"}).drop("title")
    log.filter(pl.col("bought") < 5).write_csv(tmp_path / "week1.csv")
    log.filter(pl.col("bought") >= 3).write_csv(tmp_path / "week2.csv")
    pl.DataFrame({"what": [f"i{n:02d}" for n in range(25)], "title": [f"T{n}" for n in range(25)]}).write_csv(
        tmp_path / "products.csv"
    )
    columns = ["--user", "who", "--item", "what", "--time", "bought", "--catalogue", tmp_path / "products.csv"]
    assert dpformer("prepare", tmp_path / "week1.csv", "-o", tmp_path / "week1", *columns).code == 0
    assert dpformer("account", "new", tmp_path / "people", "--epsilon", 9, "--delta", DELTA).code == 0
    options = ["--preset", "transitions", "--epsilon", 5, "--delta", DELTA, "--quiet"]
    run = tmp_path / "runs" / "a"
    assert dpformer("fit", tmp_path / "week1", "--run", run, *options, "--account", tmp_path / "people").code == 0
    return tmp_path


def test_the_next_week_is_read_fitted_and_charged_like_the_last(weeks, dpformer):
    old, new = weeks / "runs" / "a", weeks / "runs" / "b"
    done = dpformer("refit", old, weeks / "week2.csv", "--run", new, "--quiet")
    assert done.code == 0, done
    assert read_recipe(new) == read_recipe(old)
    assert load_model(new).catalogue.equals(load_model(old).catalogue)
    assert load(weeks / "runs" / "b-data").manifest["input"]["columns"]["timestamp"] == "bought"
    statement = parse_statement((new / "privacy.json").read_bytes())
    assert statement.account.runs == 2
    assert statement.account.epsilon > statement.epsilon
    assert any("earlier runs of the account" in text for text in statement.assumptions)
    assert (new / "prior.safetensors").exists()
    # The model is made of the answers of this run and of the prior alone, and the files agree.
    assert rebuilt(new).good
    assert ledger_against_statement(new, statement, read_recipe(new)).good
    refused = dpformer("refit", new, weeks / "week2.csv", "--run", weeks / "runs" / "c", "--quiet")
    assert_one_line(refused, "would fit")
    done = dpformer("refit", new, weeks / "runs" / "b-data", "--run", weeks / "runs" / "c", "--epsilon", 1, "--quiet")
    assert done.code == 0, done
    assert rebuilt(weeks / "runs" / "c").good
    assert len(PeopleAccount(weeks / "people").read().runs) == 3


def test_a_prior_only_of_the_same_account_and_only_if_wanted(weeks, dpformer):
    old = weeks / "runs" / "a"
    assert dpformer("account", "new", weeks / "others", "--epsilon", 9, "--delta", DELTA).code == 0
    for name, options in (("b", ["--no-prior"]), ("c", ["--account", weeks / "others"])):
        new = weeks / "runs" / name
        assert dpformer("refit", old, weeks / "week2.csv", "--run", new, *options, "--quiet").code == 0
        assert not (new / "prior.safetensors").exists()
        assert not any(
            "earlier runs" in text for text in parse_statement((new / "privacy.json").read_bytes()).assumptions
        )


def test_a_changed_prior_is_noticed(weeks, dpformer):
    old, new = weeks / "runs" / "a", weeks / "runs" / "b"
    assert dpformer("refit", old, weeks / "week2.csv", "--run", new, "--quiet").code == 0
    (new / "prior.safetensors").unlink()
    assert not rebuilt(new).good
    statement = parse_statement((new / "privacy.json").read_bytes())
    assert "assumptions" in ledger_against_statement(new, statement, read_recipe(new)).detail


def test_wrong_arguments_are_one_line(weeks, dpformer, tmp_path):
    old = weeks / "runs" / "a"
    assert_one_line(dpformer("refit", old, weeks / "week2.csv", "--run", old), "exists already")
    assert_one_line(dpformer("refit", weeks / "none", weeks / "week2.csv", "--run", tmp_path / "x"), "is missing")
    local = json.loads((old / "local.json").read_text())
    (old / "local.json").write_text(json.dumps({"data": str(tmp_path / "gone"), "account": local["account"]}))
    assert_one_line(dpformer("refit", old, weeks / "week2.csv", "--run", tmp_path / "x"), "manifest.json")
