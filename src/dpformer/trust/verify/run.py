"""`verify` of a run folder: its answers, its files, its recipe in a small recorded run, and its released weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

import polars as pl

from dpformer.artifact import Artifact
from dpformer.artifact import load as load_artifact
from dpformer.artifact.layout import LOCAL
from dpformer.data import Dataset, load
from dpformer.errors import DPFormerError
from dpformer.files import read_json
from dpformer.fit.folder import read_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.stated import data_part
from dpformer.privacy import Curator
from dpformer.trust.verify.account import account_against_run
from dpformer.trust.verify.answers import check_answers
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.fields import fields
from dpformer.trust.verify.folder import ledger_against_statement, no_pickle, recount
from dpformer.trust.verify.items import items_chosen
from dpformer.trust.verify.network import check_network
from dpformer.trust.verify.own import check_own
from dpformer.trust.verify.people import a_few, small, without_data, write_data
from dpformer.trust.verify.recorder import MakeCurator
from dpformer.trust.verify.resume import check_resume

# A history that is longer than any window of the statistics, for models that have no greatest length.
LONGEST = 51


def verify_run(
    folder: Path, data: Path | None = None, subject: str | None = None, make: MakeCurator = Curator
) -> Verification:
    """All checks of a finished run. `data` is its prepared folder; by default the one that it remembers, if that is there.

    Without the data, people are invented over the run's catalogue, and what only the data can show is not checked.
    make: of the Curators of the small runs; another one is for tests that plant a defect.
    """
    artifact, recipe = load_artifact(folder), read_recipe(folder)
    statement = artifact.statement
    dataset, missing = _find(folder, artifact, data)
    verification = Verification(subject or f"{folder} ({artifact.model.spec.name})")
    check_own(verification, folder, None if dataset is None else dataset.train(recipe.hold_out), missing)
    longest = recipe.network.max_length + 1 if recipe.network is not None else LONGEST
    few = a_few(dataset, longest) if dataset is not None else without_data(len(artifact.catalogue), longest)
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        place = Path(name)
        prepared = write_data(place / "data", few, artifact.catalogue)
        tiny = small(recipe, len(few))
        check_answers(verification, make, tiny, prepared, place)
        if recipe.steps_on_data:
            trained = load(prepared).train(recipe.hold_out)
            check_network(verification, artifact, recipe, trained, dataset)
        if statement.data.catalogue == "private" and statement.private:
            verification.check("items chosen", lambda: items_chosen(recipe))
        verification.check("resume equality", lambda: check_resume(place / "resume", prepared, tiny, make))
    check_files(verification, folder, artifact, recipe)
    verification.check("users", lambda: _users(artifact, recipe, dataset, missing))
    verification.check("data against statement", lambda: _data_part(artifact, dataset, missing))
    return verification


def check_files(verification: Verification, folder: Path, artifact: Artifact, recipe: Recipe) -> None:
    """What needs neither data nor training: fields, ledger, statement, epsilon, pickles."""
    statement = artifact.statement
    verification.check("fields", lambda: fields(folder, artifact, recipe))
    verification.check("ledger against statement", lambda: ledger_against_statement(folder, statement, recipe))
    verification.check("recount of epsilon", lambda: recount(statement))
    if statement.account is not None:
        verification.check("account of people", lambda: account_against_run(folder, statement))
    verification.check("no pickle", lambda: no_pickle(folder))


def _find(folder: Path, artifact: Artifact, data: Path | None) -> tuple[Dataset | None, str]:
    """The data of a run, or why it is not here."""
    if data is not None:
        return _same_items(load(data), artifact, data), ""
    if not (folder / LOCAL).exists():
        return None, "the folder does not record where its data is; give it with --data"
    try:
        path = Path(read_json(folder / LOCAL)["data"])
        return _same_items(load(path), artifact, path), ""
    except (DPFormerError, KeyError, TypeError) as error:
        return None, f"its data cannot be read: {error}"


def _same_items(dataset: Dataset, artifact: Artifact, data: Path) -> Dataset:
    if dataset.catalogue_mode == "private":  # the model has some of its items
        own = set(dataset.catalogue["item_id"].cast(pl.String))
        same = own >= set(artifact.catalogue["item_id"].cast(pl.String))
    else:
        same = artifact.catalogue["item_id"].equals(dataset.catalogue["item_id"])
    if not same:
        raise DPFormerError(f"{data}: has another catalogue than the model; give the data that it was made from")
    return dataset.in_catalogue(artifact.catalogue)


def _users(artifact: Artifact, recipe: Recipe, dataset: Dataset | None, missing: str) -> Outcome:
    if dataset is None:
        raise NotChecked(missing)
    users = len(dataset.sequences)
    ids = dataset.sequences.users.n_unique()
    stated, population = artifact.statement.users, recipe.population
    given = "" if population is None else f" (a population of {population:,} was declared)"
    declared = artifact.statement.users_declared == (population is not None)
    return Outcome(
        users == ids and users <= stated == (population or users) and declared,
        f"{users:,} sequences of {ids:,} users in the data, {stated:,} users stated{given}",
        {"sequences": users, "users": ids, "stated": stated},
    )


def _data_part(artifact: Artifact, dataset: Dataset | None, missing: str) -> Outcome:
    """What the statement says of the catalogue and of the filters, against the manifest of the data."""
    if dataset is None:
        raise NotChecked(missing)
    said = artifact.statement.data
    expected = data_part(dataset, artifact.statement.private)
    pairs = {
        "catalogue": (expected.catalogue, said.catalogue),
        "outside of the guarantee": (expected.outside_guarantee, said.outside_guarantee),
    }
    wrong = [f"{name}: {a!r} in the data, {b!r} stated" for name, (a, b) in pairs.items() if a != b]
    detail = f"catalogue {said.catalogue!r}, {len(said.outside_guarantee)} things outside of the guarantee"
    return Outcome(not wrong, "; ".join(wrong) or detail, {"differences": wrong})
