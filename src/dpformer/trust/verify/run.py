"""`verify` of a run folder (answers, files, small recorded runs of its recipe, released weights), and of built-in models."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import polars as pl

from dpformer.artifact import Artifact
from dpformer.artifact import load as load_artifact
from dpformer.artifact.layout import LOCAL, PRIOR
from dpformer.data import Dataset, demo_frame, load, prepare, save
from dpformer.errors import DPFormerError
from dpformer.files import read_json
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.prior import read_prior
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import start
from dpformer.fit.stated import data_part
from dpformer.models.network import NetworkSpec
from dpformer.models.recommender import kinds
from dpformer.privacy import Curator
from dpformer.privacy.build import inherited
from dpformer.statistics.prior import Prior
from dpformer.trust.verify.answers import check_answers, check_resume
from dpformer.trust.verify.checks import Outcome, Verification, agreement
from dpformer.trust.verify.fields import fields, no_pickle
from dpformer.trust.verify.ledger import account_against_run, ledger_against_statement, recount
from dpformer.trust.verify.network import check_network
from dpformer.trust.verify.noise import items_chosen
from dpformer.trust.verify.own import check_own, prior_again
from dpformer.trust.verify.people import a_few, small, without_data, write_data
from dpformer.trust.verify.recorder import MakeCurator

# A history that is longer than any window of the statistics, for models that have no greatest length.
LONGEST = 51
# Built-in models are made on so many readers of the embedded library; with transitions, on so many of their books: pairs of
# these are numbers enough to see the noise. A histogram alone needs all the books.
USERS, BOOKS = 60, 100
_SMALL = {"d": 16, "max_length": 12}
_STEPS = {**_SMALL, "epochs": 2.0, "batch_size": None}
# One block, pre-norm, the whole catalogue, no dropout.
_PLAIN = {**_STEPS, "preset": "paper", "blocks": 1, "norm": "pre", "dropout": 0.0, "reattention": "off"}
BUILT_IN: dict[str, dict[str, Any]] = {
    "the default preset": {**_STEPS, "vocabulary": 40},
    "preset dpformer": {**_STEPS, "preset": "dpformer", "vocabulary": 40},
    "preset distilled": {**_SMALL, "preset": "distilled", "distil.steps": 2},
    "transformer": _PLAIN,
    "transformer, Re-Attention": {**_PLAIN, "reattention": "logits", "blocks": 2},
    "transformer, untied, post-norm, flat": {**_PLAIN, "tied": False, "norm": "post", "max_norm": 0.3},
    **{kind: {**_PLAIN, "model": kind} for kind in kinds(NetworkSpec) if kind != "transformer"},
    "transitions": {"preset": "transitions"},
    "popularity": {"preset": "popularity"},
}


def verify_built_in(
    names: list[str] | None = None, on_model: Callable[[str], None] = lambda name: None
) -> Iterator[Verification]:
    """Train each model for a few steps on the first readers of the embedded library, and verify the folder."""
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        for k, model in enumerate(names or BUILT_IN):
            on_model(model)
            yield verify_run(make(model, Path(name) / f"run-{k}"), subject=model)


def embedded(folder: Path, books: int | None = None) -> Path:
    """The first readers of the embedded library, prepared; all their books, or only the first so many."""
    log = demo_frame()
    readers = log["user_id"].unique(maintain_order=True)[:USERS]
    log = log.filter(pl.col("user_id").is_in(readers.to_list()))
    few = log["item_id"].unique(maintain_order=True)[:books]
    save(prepare(log.filter(pl.col("item_id").is_in(few.to_list()))), folder)
    return folder


def make(model: str, folder: Path) -> Path:
    """A finished run of a built-in model, of a few steps; its data stands beside it."""
    recipe = make_recipe(**BUILT_IN[model])
    counts_pairs = any(stage.stage == "transitions" for stage in recipe.stages)
    data = folder.with_name(f"data-{counts_pairs}")
    if not data.exists():
        embedded(data, BOOKS if counts_pairs else None)
    start(folder, data, recipe).train()
    return folder


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
    if (folder / PRIOR).exists():
        verification.check("prior of earlier runs", prior_again, folder, dataset, missing)
    longest = recipe.network.max_length + 1 if recipe.network is not None else LONGEST
    few = a_few(dataset, longest) if dataset is not None else without_data(len(artifact.catalogue), longest)
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        place = Path(name)
        prepared = write_data(place / "data", few, artifact.catalogue)
        tiny = small(recipe, len(few))
        check_answers(verification, make, tiny, prepared, place)
        if recipe.steps_on_data:
            check_network(verification, artifact, recipe, load(prepared).train(recipe.hold_out), dataset)
        if statement.data.catalogue == "private" and statement.private:
            verification.check("items chosen", items_chosen, recipe)
        resumed = (place / "recorded", place / "resume", prepared, tiny, make)
        verification.check("resume equality", check_resume, *resumed)
    check_files(verification, folder, artifact, recipe)
    if dataset is None:
        verification.skip(missing, "users", "data against statement")
    else:
        verification.check("users", _users, artifact, recipe, dataset)
        verification.check("data against statement", _data_part, artifact, dataset, read_prior(folder))
    return verification


def check_files(verification: Verification, folder: Path, artifact: Artifact, recipe: Recipe) -> None:
    """What needs neither data nor training: fields, ledger, statement, epsilon, pickles."""
    statement = artifact.statement
    verification.check("fields", fields, folder, artifact, recipe)
    verification.check("ledger against statement", ledger_against_statement, folder, statement, recipe)
    verification.check("recount of epsilon", recount, statement)
    if statement.account is not None:
        verification.check("account of people", account_against_run, folder, statement)
    verification.check("no pickle", no_pickle, folder)


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
    own, released = dataset.catalogue["item_id"], artifact.catalogue["item_id"]
    same = own.equals(released)
    if dataset.catalogue_mode == "private":  # the model has some of its items
        same = set(own.cast(pl.String)) >= set(released.cast(pl.String))
    if not same:
        raise DPFormerError(f"{data}: has another catalogue than the model; give the data that it was made from")
    return dataset.in_catalogue(artifact.catalogue)


def _users(artifact: Artifact, recipe: Recipe, dataset: Dataset) -> Outcome:
    users, ids = len(dataset.sequences), dataset.sequences.users.n_unique()
    stated, population = artifact.statement.users, recipe.population
    given = "" if population is None else f" (a population of {population:,} was declared)"
    declared = artifact.statement.users_declared == (population is not None)
    return Outcome(
        users == ids and users <= stated == (population or users) and declared,
        f"{users:,} sequences of {ids:,} users in the data, {stated:,} users stated{given}",
        {"sequences": users, "users": ids, "stated": stated},
    )


def _data_part(artifact: Artifact, dataset: Dataset, prior: Prior | None = None) -> Outcome:
    """What the statement says of the catalogue and of the filters, against the manifest of the data."""
    said, expected = artifact.statement.data, data_part(dataset, artifact.statement.private)
    outside = inherited(expected.outside_guarantee, prior.conditions.outside_guarantee if prior is not None else ())
    pairs: dict[str, tuple[object, object]] = {
        "catalogue": (expected.catalogue, said.catalogue),
        "outside of the guarantee": (outside, said.outside_guarantee),
    }
    return agreement(
        pairs, f"catalogue {said.catalogue!r}, {len(said.outside_guarantee)} things outside of the guarantee"
    )
