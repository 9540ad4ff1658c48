"""`verify` of a run folder: its files, its recipe in a small run of its own, and its released weights."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import polars as pl

from dpformer.artifact import Artifact
from dpformer.artifact import load as load_artifact
from dpformer.artifact.layout import LOCAL
from dpformer.data import Dataset, Sequences, load
from dpformer.errors import DPFormerError
from dpformer.files import read_json
from dpformer.fit.dpsgd import Optimisation, Trainer
from dpformer.fit.folder import read_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.stage import Setup, new_network
from dpformer.fit.stated import data_part
from dpformer.models import Network
from dpformer.trust.verify.answers import check_answers, statistics_of
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.clipping import check_clipping
from dpformer.trust.verify.float32 import a_group, float32_slack, query_of
from dpformer.trust.verify.folder import ledger_against_statement, no_pickle, recount
from dpformer.trust.verify.reference import Subject
from dpformer.trust.verify.resume import check_resume
from dpformer.trust.verify.scratch import SEED, a_few, invented, small, write_data
from dpformer.trust.verify.selection import items_chosen
from dpformer.trust.verify.steps import STEP_CHECKS, check_steps, definition, losses_of, tokens_of
from dpformer.trust.verify.watch import Curators

# A history that is longer than any window of the statistics, for models that have no greatest length.
LONGEST = 51


def verify_run(folder: Path, data: Path | None = None, subject: str | None = None) -> Verification:
    """All checks of a finished run. `data` is its prepared folder; by default the one that it remembers, if that is there.

    Without the data, sequences are invented over the run's catalogue, and what only the data can tell is not checked.
    """
    model, recipe = load_artifact(folder), read_recipe(folder)
    dataset, missing = _find(folder, model, data)
    verification = Verification(subject or f"{folder} ({model.model.spec.name})")
    longest = recipe.network.max_length + 1 if recipe.network is not None else LONGEST
    few = a_few(dataset, longest) if dataset is not None else invented(len(model.catalogue), longest)
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        place = Path(name)
        prepared = write_data(place / "data", few, model.catalogue)
        if _check_small(verification, model, recipe, place, load(prepared).train(recipe.hold_out)):
            verification.check("float32 slack", lambda: _float32(model, recipe, dataset))
        if model.statement.data.catalogue == "private" and model.statement.private:
            verification.check("items chosen", lambda: items_chosen(place / "items", recipe))
        verification.check("resume equality", lambda: check_resume(place / "resume", prepared, small(recipe, len(few))))
    verification.check("ledger against statement", lambda: ledger_against_statement(folder, model.statement, recipe))
    verification.check("recount of epsilon", lambda: recount(model.statement))
    verification.check("users", lambda: _users(model, recipe, dataset, missing))
    verification.check("data against statement", lambda: _data_part(model, dataset, missing))
    verification.check("no pickle", lambda: no_pickle(folder))
    return verification


def _check_small(verification: Verification, model: Artifact, whole: Recipe, place: Path, people: Sequences) -> bool:
    """The run's recipe on a few people: its statistics, its clipping and its steps, by Curators whose answers nobody sees.

    True if there are steps, and their clipped sum can be computed.
    """
    recipe, items = small(whole, len(people)), len(model.catalogue)
    plan = recipe.plan(len(people))
    # The keys of a run without a seed are new each time, as the run's were.
    curators = Curators(people, plan, place / "curators", whole.seed)
    try:
        setup = Setup(recipe, plan, items, SEED)
        if plan.releases:
            check_answers(verification, statistics_of(setup), curators)
        if not recipe.steps_on_data:
            return False
        how = Optimisation.of(recipe)
        # Several micro-batches, each with room for three of the longest users: see `clipping.tiles.row_budget`.
        how = replace(how, weight_decay=0.0, token_budget=8 * (how.max_length + 1))
        trainer = Trainer(new_network(setup, _network(model).frequencies), plan, how)
        return _check_network(verification, model, trainer, curators)
    finally:
        curators.close()


def _check_network(verification: Verification, model: Artifact, trainer: Trainer, curators: Curators) -> bool:
    network, how = _network(model), trainer.how
    sequences = (tokens_of(curators.people, how.max_length, network),)
    subject = Subject(network, losses_of(trainer), sequences, definition, how.max_norm, how.rule)
    if not check_clipping(verification, subject, may_freeze=False):
        for name in (*STEP_CHECKS, "float32 slack"):
            verification.skip(name, "the clipping refuses this model; see 'parameters recorded'")
        return False
    check_steps(verification, trainer, dict(network.state_dict()), curators)
    return True


def _network(model: Artifact) -> Network:
    network = model.model.trained_network()
    assert network is not None
    return network


def _float32(model: Artifact, recipe: Recipe, dataset: Dataset | None) -> Outcome:
    query = query_of(_network(model), recipe, model.statement)
    people, drawn = a_group(dataset, recipe, model.statement, len(model.catalogue))
    return float32_slack(query, people, drawn, dataset is None)


def _find(folder: Path, model: Artifact, data: Path | None) -> tuple[Dataset | None, str]:
    """The data of a run, or why it is not here."""
    if data is not None:
        return _same_items(load(data), model, data), ""
    if not (folder / LOCAL).exists():
        return None, "the folder does not tell where its data is; give it with --data"
    try:
        path = Path(read_json(folder / LOCAL)["data"])
        return _same_items(load(path), model, path), ""
    except (DPFormerError, KeyError, TypeError) as error:
        return None, f"its data cannot be read: {error}"


def _same_items(dataset: Dataset, model: Artifact, data: Path) -> Dataset:
    if dataset.catalogue_mode == "private":  # the model has some of its items
        own = set(dataset.catalogue["item_id"].cast(pl.String))
        same = own >= set(model.catalogue["item_id"].cast(pl.String))
    else:
        same = model.catalogue["item_id"].equals(dataset.catalogue["item_id"])
    if not same:
        raise DPFormerError(f"{data}: has another catalogue than the model; give the data that it was made from")
    return dataset.in_catalogue(model.catalogue)


def _users(model: Artifact, recipe: Recipe, dataset: Dataset | None, missing: str) -> Outcome:
    if dataset is None:
        raise NotChecked(missing)
    users = len(dataset.sequences)
    ids = dataset.sequences.users.n_unique()
    stated, population = model.statement.users, recipe.population
    given = "" if population is None else f" (a population of {population:,} was declared)"
    declared = model.statement.users_declared == (population is not None)
    return Outcome(
        users == ids and users <= stated == (population or users) and declared,
        f"{users:,} sequences of {ids:,} users in the data, {stated:,} users stated{given}",
        {"sequences": users, "users": ids, "stated": stated},
    )


def _data_part(model: Artifact, dataset: Dataset | None, missing: str) -> Outcome:
    """What the statement says of the catalogue and of the filters, against the manifest of the data."""
    if dataset is None:
        raise NotChecked(missing)
    said = model.statement.data
    expected = data_part(dataset, model.statement.private)
    pairs = {
        "catalogue": (expected.catalogue, said.catalogue),
        "outside of the guarantee": (expected.outside_guarantee, said.outside_guarantee),
    }
    wrong = [f"{name}: {a!r} in the data, {b!r} stated" for name, (a, b) in pairs.items() if a != b]
    detail = f"catalogue {said.catalogue!r}, {len(said.outside_guarantee)} things outside of the guarantee"
    return Outcome(not wrong, "; ".join(wrong) or detail, {"differences": wrong})
