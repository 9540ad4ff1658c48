"""`dpformer refit`: the same recipe and reading on a new log, charged to the same account, with the old answers as a prior."""

import json
import math
import re
from dataclasses import replace

import polars as pl
import pytest
from safetensors.numpy import save
from scipy.stats import norm

from dpformer import load_model
from dpformer.data import load
from dpformer.errors import PrivacyError
from dpformer.fit.folder import read_recipe
from dpformer.fit.prior import prior_from, read_prior
from dpformer.fit.run import start
from dpformer.privacy import parse_statement, read_ledger
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.build import Conditions, inherited
from dpformer.privacy.wording import EARLIER, SEEDED, round_up
from dpformer.trust.verify.checks import NotChecked
from dpformer.trust.verify.fields import fields
from dpformer.trust.verify.ledger import account_against_run, gaussian_epsilon, ledger_against_statement, recount
from dpformer.trust.verify.own import prior_again, rebuilt
from dpformer.trust.verify.run import _data_part
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


def test_the_headline_of_a_refitted_model_counts_the_runs_that_it_uses(weeks, dpformer):
    """Text, JSON, card, registry and report; counted here by the closed form from both ledgers."""
    old, new = weeks / "runs" / "a", weeks / "runs" / "b"
    assert dpformer("refit", old, weeks / "week2.csv", "--run", new, "--quiet").code == 0
    statement = parse_statement((new / "privacy.json").read_bytes())
    squares = [[release.noise_multiplier**-2 for release in read_ledger(run).plan.releases] for run in (old, new)]
    both, alone = math.sqrt(sum(map(sum, squares))), math.sqrt(sum(squares[1]))
    assert statement.delta == statement.alone.delta == DELTA
    assert statement.epsilon == pytest.approx(gaussian_epsilon(both, DELTA), rel=1e-6)
    assert statement.alone.epsilon == pytest.approx(gaussian_epsilon(alone, DELTA), rel=1e-6)
    assert statement.epsilon > 1.3 * statement.alone.epsilon
    users = 1 / statement.users
    assert statement.epsilon_at_delta_1_over_users == pytest.approx(gaussian_epsilon(both, users), rel=1e-6)
    # The best test of a mu-GDP mechanism: advantage 2 Phi(mu / 2) - 1.
    assert statement.attack.advantage == pytest.approx(2 * norm.cdf(both / 2) - 1, abs=2e-3)
    shown = f"{round_up(statement.epsilon, 4):.4g}"
    text, card = statement.text(), (new / "README.md").read_text()
    assert text.startswith(f"({shown}, 0.001)-differential privacy")
    assert f"This run alone: ({round_up(statement.alone.epsilon, 4):.4g}, 0.001)." in text
    assert "Epsilon is of this run alone" not in text
    assert text in card
    front = json.loads(card.split("differential_privacy: ")[1].splitlines()[0])
    assert (front["epsilon"], front["run_alone"]["epsilon"]) == (statement.epsilon, statement.alone.epsilon)
    entry = json.loads(dpformer("privacy", new, "--registry").out)
    assert entry["guarantee"]["epsilon"] == statement.epsilon
    assert "with the 1 earlier run" in entry["composition"]
    assert dpformer("report", new, "-o", weeks / "report.html").code == 0
    page = (weeks / "report.html").read_text()
    tile = re.search(r'<span class="big">([0-9.]+)</span><span>epsilon</span><span class="quiet">([^<]*)', page)
    assert float(tile[1]) == pytest.approx(statement.epsilon, rel=1e-2)
    assert "this run alone" in tile[2]
    assert recount(statement).good
    assert account_against_run(new, statement).good
    # Planted: the pair of the run alone as the headline, as it was; and figures that leave the earlier run out.
    said = json.loads(statement.to_json())
    with pytest.raises(PrivacyError, match="those of the account"):
        parse_statement(json.dumps({**said, "epsilon": said["alone"]["epsilon"]}))
    hidden = parse_statement(json.dumps({**said, "alone": None, "epsilon": said["alone"]["epsilon"]}))
    assert "prior of earlier runs" in ledger_against_statement(new, hidden, read_recipe(new)).detail
    low = statement.model_copy(update={"epsilon_at_delta_1_over_users": said["alone"]["epsilon"] / 2})
    assert not account_against_run(new, low).good


def test_a_prior_needs_the_account_of_its_runs(weeks, dpformer, tmp_path):
    prior = prior_from(weeks / "runs" / "a", load(weeks / "week1"))
    with pytest.raises(PrivacyError, match="needs the account"):
        start(tmp_path / "x", weeks / "week1", read_recipe(weeks / "runs" / "a"), prior=prior)
    assert not (tmp_path / "x" / "ledger.jsonl").exists()


def test_a_prior_only_of_the_same_account_and_only_if_wanted(weeks, dpformer):
    old = weeks / "runs" / "a"
    assert dpformer("account", "new", weeks / "others", "--epsilon", 9, "--delta", DELTA).code == 0
    for name, options in (("b", ["--no-prior"]), ("c", ["--account", weeks / "others"])):
        new = weeks / "runs" / name
        assert dpformer("refit", old, weeks / "week2.csv", "--run", new, *options, "--quiet").code == 0
        assert not (new / "prior.safetensors").exists()
        assert parse_statement((new / "privacy.json").read_bytes()).alone is None


def test_a_changed_prior_is_noticed(weeks, dpformer):
    old, new = weeks / "runs" / "a", weeks / "runs" / "b"
    assert dpformer("refit", old, weeks / "week2.csv", "--run", new, "--quiet").code == 0
    (new / "prior.safetensors").unlink()
    assert not rebuilt(new).good
    statement = parse_statement((new / "privacy.json").read_bytes())
    assert "prior of earlier runs" in ledger_against_statement(new, statement, read_recipe(new)).detail


def test_verify_makes_the_prior_again_and_says_so_if_it_cannot(weeks, dpformer):
    """Planted: a prior of other numbers than the earlier run released, and one whose file has more in it."""
    old, new = weeks / "runs" / "a", weeks / "runs" / "b"
    assert dpformer("refit", old, weeks / "week2.csv", "--run", new, "--quiet").code == 0
    data, path = load(weeks / "runs" / "b-data"), new / "prior.safetensors"
    assert prior_again(new, data, "").good
    assert fields(new, load_model(new), read_recipe(new)).good
    arrays = read_prior(new).arrays()
    path.write_bytes(save(arrays, metadata={"alice": "was here"}))
    assert "prior.safetensors has something" in fields(new, load_model(new), read_recipe(new)).detail
    path.write_bytes(save(arrays | {"histogram": arrays["histogram"] + 1.0}))
    assert "OTHER numbers" in prior_again(new, data, "").detail
    path.write_bytes(save(arrays))
    for missing in (lambda: prior_again(new, None, "no data"), lambda: prior_again(new, data, "")):
        with pytest.raises(NotChecked):
            missing()
        if old.exists():
            old.rename(weeks / "runs" / "elsewhere")


def test_a_refitted_model_has_the_conditions_of_the_runs_that_it_uses(weeks, dpformer):
    """The prior shows which items the earlier log had, and what was done to it: a public catalogue now does not undo that."""
    columns = ["--user", "who", "--item", "what", "--time", "bought"]
    filtered = dpformer("prepare", weeks / "week1.csv", "-o", weeks / "own", *columns, "--min-events", 3)
    assert filtered.code == 0, filtered
    options = ["--preset", "transitions", "--epsilon", 3, "--delta", DELTA, "--seed", 5, "--account", weeks / "people"]
    assert dpformer("fit", weeks / "own", "--run", weeks / "runs" / "own", *options, "--quiet").code == 0
    before = parse_statement((weeks / "runs" / "own" / "privacy.json").read_bytes())
    assert "the catalogue of items" in before.assumed_public
    assert before.data.outside_guarantee
    products = ["--catalogue", weeks / "products.csv"]
    assert dpformer("prepare", weeks / "week2.csv", "-o", weeks / "week2", *columns, *products).code == 0
    prior = prior_from(weeks / "runs" / "own", load(weeks / "week2"))
    assert prior.histogram_precision[1:].min() == 0  # some products were not in the earlier log
    recipe = read_recipe(weeks / "runs" / "own").changed({"epsilon": 1.0, "seed": None})
    new, account = weeks / "runs" / "b", PeopleAccount(weeks / "people")
    start(new, weeks / "week2", recipe, account=account, prior=prior).train()
    statement = parse_statement((new / "privacy.json").read_bytes())
    assert EARLIER + "the catalogue of items" in statement.assumed_public
    assert statement.data.outside_guarantee == tuple(EARLIER + what for what in before.data.outside_guarantee)
    assert statement.insecure == (EARLIER + SEEDED,)
    assert ledger_against_statement(new, statement, recipe).good
    # Of a third run they are the same, once each.
    again = prior_from(new, load(weeks / "week2"))
    assert again.conditions == Conditions.of(statement)
    assert inherited(statement.assumed_public, again.conditions.assumed_public) == statement.assumed_public
    # Planted: a statement that leaves them out.
    for hidden in ({"assumed_public": statement.assumed_public[:1]}, {"insecure": ()}):
        assert not ledger_against_statement(new, statement.model_copy(update=hidden), recipe).good
    data = statement.data.model_copy(update={"outside_guarantee": ()})
    artifact, dataset = load_model(new), load(weeks / "week2")
    assert _data_part(artifact, dataset, again).good
    artifact = replace(artifact, statement=statement.model_copy(update={"data": data}))
    assert not _data_part(artifact, dataset, again).good


def test_wrong_arguments_are_one_line(weeks, dpformer, tmp_path):
    old = weeks / "runs" / "a"
    assert_one_line(dpformer("refit", old, weeks / "week2.csv", "--run", old), "exists already")
    assert_one_line(dpformer("refit", weeks / "none", weeks / "week2.csv", "--run", tmp_path / "x"), "is missing")
    options = ("--run", tmp_path / "x", "--time", "bought")
    assert_one_line(dpformer("refit", old, weeks / "week1", *options), "leave out the options")


def test_a_messy_log_is_read_as_the_last_one_was_without_its_prepared_folder(weeks, dpformer):
    """Every option that says how a log is read and filtered; the run's folder alone knows them."""
    log = pl.read_csv(weeks / "week1.csv", infer_schema=False)
    times = log["bought"].cast(pl.Int64) * 86_400 + 1_700_000_000
    messy = log.select(
        who=pl.when(pl.int_range(pl.len()) % 50 == 0).then(pl.lit("n.n.")).otherwise("who"),
        what="what",
        bought_on=pl.from_epoch(times).dt.strftime("%d/%m/%Y"),
        qty=pl.int_range(pl.len()) % 5,
    )
    messy.write_csv(weeks / "messy1.csv")
    messy.reverse().write_csv(weeks / "messy2.csv")
    reading = ["--user", "who", "--item", "what", "--time", "bought_on", "--time-format", "%d/%m/%Y", "--dedupe"]
    reading += ["--null-values", "n.n.", "--drop-missing", "--where", "qty > 0", "--min-user-events", 2]
    assert dpformer("prepare", weeks / "messy1.csv", "-o", weeks / "messy1", *reading).code == 0
    options = ["--preset", "popularity", "--delta", DELTA, "--quiet"]
    assert dpformer("fit", weeks / "messy1", "--run", weeks / "runs" / "m1", *options).code == 0
    expected = load(weeks / "messy1").manifest
    (weeks / "messy1").rename(weeks / "gone")
    done = dpformer("refit", weeks / "runs" / "m1", weeks / "messy2.csv", "--run", weeks / "runs" / "m2", "--quiet")
    assert done.code == 0, done
    found = load(weeks / "runs" / "m2-data").manifest
    assert found["options"] == expected["options"]
    assert found["reading"] == expected["reading"]
    assert found["counts"] == expected["counts"]
    # An option that is given replaces the one of the last run.
    options = ("--run", weeks / "runs" / "m3", "--where", "qty > 1", "--quiet")
    assert dpformer("refit", weeks / "runs" / "m1", weeks / "messy2.csv", *options).code == 0
    assert load(weeks / "runs" / "m3-data").manifest["counts"]["where"] > expected["counts"]["where"]


def test_new_items_come_with_a_new_catalogue_and_a_date_is_asked_for_again(weeks, dpformer):
    old, log = weeks / "runs" / "a", weeks / "week2.csv"
    pl.DataFrame({"what": [f"i{n:02d}" for n in range(40)], "price": range(40)}).write_csv(weeks / "products2.csv")
    given = ("--catalogue", weeks / "products2.csv", "--date", "1970-01-01 00:00:05", "--quiet")
    done = dpformer("refit", old, log, "--run", weeks / "runs" / "b", *given)
    assert done.code == 0, done
    assert len(load_model(weeks / "runs" / "b").catalogue) == 40
    assert load(weeks / "runs" / "b-data").sequences.split.date == "1970-01-01 00:00:05"
    refused = dpformer("refit", weeks / "runs" / "b", log, "--run", weeks / "runs" / "c", "--quiet")
    assert_one_line(refused, "give the date of the new one with --date")
