"""`verify` of a run folder: its papers, its recipe in a small run of its own, and its released weights."""

from __future__ import annotations

import tempfile
from pathlib import Path

from torch import Tensor

from dpformer.data import Dataset, load
from dpformer.errors import DPFormerError
from dpformer.models.base import SequenceModel
from dpformer.models.joined import Joined
from dpformer.privacy import noise_source
from dpformer.training.files import read_json
from dpformer.training.folder import LOCAL
from dpformer.training.recipe import HISTOGRAM, STATISTICS, Recipe
from dpformer.training.released import Released, load_model
from dpformer.training.run import start
from dpformer.trust.verify.checks import Found, NotChecked, Verification
from dpformer.trust.verify.clipped import check_clipping
from dpformer.trust.verify.loop import Subject
from dpformer.trust.verify.papers import ledger_against_statement, no_pickle, recount
from dpformer.trust.verify.releases import check_histogram, check_statistics
from dpformer.trust.verify.resume import check_resume
from dpformer.trust.verify.scratch import a_few, invented, small, write_data
from dpformer.trust.verify.steps import STEP_CHECKS, check_steps, definition, losses_of, tokens_of


def verify_run(folder: Path, data: Path | None = None, subject: str | None = None) -> Verification:
    """All checks of a finished run. `data` is its prepared folder; by default the one that it remembers, if that is there.

    Without the data, sequences are invented over the run's catalogue, and what only the data can tell is not checked.
    """
    model = load_model(folder)
    dataset, missing = _find(folder, model, data)
    found = Verification(subject or f"{folder} ({model.recipe.model})")
    longest = model.recipe.max_length + 1
    few = a_few(dataset, longest) if dataset is not None else invented(len(model.catalogue), longest)
    recipe = model.recipe
    # Without steps all that a network has seen of people are the releases of its prior: those of the statistics.
    seen = recipe if recipe.model in STATISTICS or recipe.epochs else _as_statistics(recipe)
    with tempfile.TemporaryDirectory(prefix="dpformer-verify-") as name:
        place = Path(name)
        prepared = write_data(place / "data", few, model.catalogue)
        if seen.model in STATISTICS:
            noise = noise_source(recipe.noise, recipe.seed)
            check_statistics(found, few, len(model.catalogue), small(seen, len(few)), noise)
        else:
            _check_network(found, model, place, prepared)
        found.check("resume equality", lambda: check_resume(place / "resume", prepared, small(seen, len(few))))
    found.check("ledger against statement", lambda: ledger_against_statement(folder, model.statement, recipe))
    found.check("recount of epsilon", lambda: recount(model.statement))
    found.check("users", lambda: _users(model, dataset, missing))
    found.check("no pickle", lambda: no_pickle(folder))
    return found


def _as_statistics(recipe: Recipe) -> Recipe:
    return recipe.model_copy(update={"model": "transitions", "prior_share": 0.0, "distil": 0})


def _check_network(found: Verification, model: Released, place: Path, prepared: Path) -> None:
    network = model.model.network if isinstance(model.model, Joined) else model.model
    assert isinstance(network, SequenceModel)
    recipe, few = model.recipe, load(prepared)
    run = start(place / "steps", prepared, small(recipe, len(few.sequences)))
    try:
        sequences = (tokens_of(run.trainer, network),)
        subject = Subject(network, losses_of(run.trainer), sequences, definition, recipe.max_norm, recipe.rule)
        if check_clipping(found, subject, may_freeze=False):
            weights: dict[str, Tensor] = dict(network.state_dict())
            check_steps(found, run, recipe, weights)
        else:
            for name in STEP_CHECKS:
                found.skip(name, "the clipping refuses this model; see 'parameters recorded'")
    finally:
        run.close()
    for release in run.plan.releases:
        if release.name == HISTOGRAM:
            noise = noise_source(recipe.noise, recipe.seed)
            check_histogram(found, few.split().train, len(model.catalogue), release, noise)


def _find(folder: Path, model: Released, data: Path | None) -> tuple[Dataset | None, str]:
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


def _same_items(dataset: Dataset, model: Released, data: Path) -> Dataset:
    if not model.catalogue["item_id"].equals(dataset.catalogue["item_id"]):
        raise DPFormerError(f"{data}: has another catalogue than the model; give the data that it was made from")
    return dataset


def _users(model: Released, dataset: Dataset | None, missing: str) -> Found:
    if dataset is None:
        raise NotChecked(missing)
    users = len(dataset.sequences)
    ids = dataset.sequences.users.n_unique()
    stated = model.statement.users
    return Found(
        users == stated == ids,
        f"{users:,} sequences of {ids:,} users in the data, {stated:,} users stated",
        {"sequences": users, "users": ids, "stated": stated},
    )
