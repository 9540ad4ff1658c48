"""What a run must refuse or state: a population that is too small, titles by a vote, a selection that was not made."""

import math
from pathlib import Path

import pytest

from dpformer.artifact import load
from dpformer.data import demo_frame, prepare, save
from dpformer.errors import PrivacyError
from dpformer.fit.run import start
from dpformer.privacy import PrivacyStatement
from tests.recipes import small_recipe

LOG = demo_frame()
USERS = LOG["user_id"].n_unique()


def stated(folder: Path, recipe, **options) -> PrivacyStatement:
    """The statement of a run on the demo's log, prepared with these options."""
    save(prepare(LOG, **options), folder / "data")
    run = start(folder / "run", folder / "data", recipe)
    assert run.train()
    return load(folder / "run").statement


@pytest.mark.parametrize("preset", ["popularity", "pure"])
def test_a_population_below_the_users_in_the_data_is_refused(preset, tmp_path):
    save(prepare(LOG), tmp_path / "data")
    recipe = small_recipe(preset, population=USERS - 1, delta=1e-4)
    with pytest.raises(PrivacyError, match=rf"population {USERS - 1:,}.*in the data, {USERS:,}.*population of {USERS}"):
        start(tmp_path / "run", tmp_path / "data", recipe)
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@pytest.mark.parametrize("population", [None, USERS, 3 * USERS])
def test_a_declared_population_is_stated(population, tmp_path):
    statement = stated(tmp_path, small_recipe("popularity", population=population, delta=1e-4))
    assert statement.users == (population or USERS)
    assert statement.users_declared == (population is not None)
    declared = f"a declared population of {population:,} users" if population else "the number of users"
    assert statement.assumed_public[0] == declared
    assert declared in statement.text()


def test_titles_by_a_vote_over_people_are_outside_of_the_guarantee(tmp_path):
    statement = stated(tmp_path, small_recipe("popularity", delta=1e-4), title="title")
    (sentence,) = statement.data.outside_guarantee
    assert "titles are the most frequent text among people (--title title)" in sentence
    assert f"OUTSIDE OF THE GUARANTEE: {sentence}" in statement.text()


def test_titles_that_are_public_or_not_used_are_not_listed():
    catalogue = LOG.select("item_id", "title").unique()
    assert prepare(LOG).outside_guarantee == []
    assert prepare(LOG, catalogue=catalogue).outside_guarantee == []
    assert prepare(LOG, catalogue=catalogue, title="title").outside_guarantee == []
    both = prepare(LOG, title="title", min_events=2).outside_guarantee
    assert ["--min-events 2" in both[0], "--title title" in both[1]] == [True, True]


def test_without_privacy_nothing_is_selected_from_a_private_catalogue_and_that_is_stated(tmp_path):
    steps = {"epochs": 0.5, "d": 4, "max_length": 5}
    statement = stated(tmp_path, small_recipe("pure", epsilon=math.inf, delta=1e-4, **steps), catalogue="private")
    assert len(load(tmp_path / "run").catalogue) == LOG["item_id"].n_unique()
    assert not statement.private
    assert statement.data.catalogue == "log"
    assert statement.data.threshold_delta == 0
    assert "the catalogue of items" in statement.assumed_public
    assert any("no item was selected" in sentence for sentence in statement.data.outside_guarantee)
    assert "no item was selected" in statement.text()


def test_with_privacy_a_private_catalogue_is_stated_as_such(tmp_path):
    statement = stated(tmp_path, small_recipe("popularity", delta=1e-4), catalogue="private")
    assert statement.data.catalogue == "private"
    assert statement.data.threshold_delta > 0
    assert statement.data.outside_guarantee == ()
    assert "the catalogue of items" not in statement.assumed_public
