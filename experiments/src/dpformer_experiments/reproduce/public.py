"""DP transitions with public titles and genres: they use additional data, so they have their own row.

The answers are the same as without these facts, with the same noise: public facts cost no budget. This row assumes that genres
and titles of MovieLens-1M are public, and its record states that.
"""

from __future__ import annotations

from pathlib import Path

import torch

from dpformer.data import Dataset, load
from dpformer.errors import DataError
from dpformer.evaluation import held_out
from dpformer.fit.scorers import to_scorer
from dpformer.models import TransitionScorer
from dpformer.privacy import epsilon, make_plan
from dpformer.privacy.calibration import gaussian_multiplier
from dpformer.statistics.combine import Measured
from dpformer.statistics.settings import TransitionSettings
from dpformer_experiments.curators import seeded_curator
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.public_facts import Facts, class_log_lift, facts, pair_classes
from dpformer_experiments.reproduce.work import Done, OnStep, ShouldStop, figures_of
from dpformer_experiments.transition_answers import measure_transitions, transition_shares

MOVIES = "movies.dat"
# Chosen on the validation item among .1, .2, .4, .6 and .9.
WEIGHT = 0.4


def public_transitions(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done:
    """Ask for the statistics on all but the test item, add the log-lifts of classes of pairs, evaluate."""
    dataset = load(data)
    facts_of_items = read_facts(dataset)
    train, items = held_out(dataset.sequences, "test").histories, len(dataset.catalogue)
    settings = TransitionSettings()
    plan = make_plan(len(train), cell.epsilon, cell.delta, shares=transition_shares(settings))
    with seeded_curator(train, plan, cell.seed) as curator:
        measured = measure_transitions(curator, items, settings)
    privacy = {
        "epsilon": plan.total.epsilon,
        "delta": cell.delta,
        "epsilon_at_delta_1_over_users": epsilon(plan.releases, 1 / len(train)).epsilon,
        "noise_multiplier": gaussian_multiplier(cell.epsilon, cell.delta),
        "assumed_public": ["the catalogue of items", f"titles, years and genres of items ({MOVIES})"],
    }
    model = with_public(measured, settings, facts_of_items, WEIGHT)
    return {**figures_of(model, dataset, ("test",)), "privacy": privacy}


def with_public(
    measured: Measured, settings: TransitionSettings, facts_of_items: list[Facts], weight: float
) -> TransitionScorer:
    """The statistics with `weight` times the log-lift of each pair's class added. facts_of_items: of items 1, 2, ..."""
    state = to_scorer(measured, settings).state_dict()
    classes = pair_classes([facts_of_items[item - 1] for item in state["head"].tolist()])
    matrix = state["matrix"].clone()
    matrix[:-1] += weight * torch.from_numpy(class_log_lift(measured, classes)).float()
    return TransitionScorer.of({**state, "matrix": matrix}, settings.window, settings.popularity)


def read_facts(dataset: Dataset) -> list[Facts]:
    """Titles and genres of all items, from `movies.dat` beside the ratings that the data was prepared from."""
    path = Path(dataset.manifest["input"]["name"]).parent / MOVIES
    if not path.is_file():
        raise DataError(f"{path}: is missing; this row needs the titles and genres in the archive of MovieLens-1M")
    by_id = {}
    for line in path.read_text(encoding="latin-1").splitlines():
        item, title, genres = line.split("::")
        by_id[item] = facts(title, genres.split("|"))
    nothing = facts("", [])
    return [by_id.get(str(item), nothing) for item in dataset.catalogue["item_id"].to_list()]
