"""The prior of a `refit` as a file: made from the folder of the earlier run, and kept in that of the new one."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from dpformer.artifact import load as load_artifact
from dpformer.artifact.layout import ANSWERS, PRIOR
from dpformer.data import Dataset
from dpformer.errors import DPFormerError
from dpformer.files import read_small, write_file
from dpformer.fit.folder import read_recipe
from dpformer.fit.stage import Setup
from dpformer.fit.statistics_stages import ask_histogram, ask_transitions
from dpformer.privacy import read_ledger
from dpformer.privacy.build import Conditions
from dpformer.privacy.replay import Replay, read_answers
from dpformer.statistics.item_selection import ITEMS
from dpformer.statistics.prior import Prior

_CONDITIONS = "conditions"


def prior_from(run: Path, dataset: Dataset) -> Prior | None:
    """What a finished run and its own prior measured, for new data. None without transitions, or with a private catalogue."""
    artifact, recipe = load_artifact(run), read_recipe(run)
    names = [stage.stage for stage in recipe.stages]
    if "transitions" not in names or dataset.catalogue_mode == "private" or not (run / ANSWERS).is_dir():
        return None
    about, answers = read_answers(run / ANSWERS)
    plan = read_ledger(run).plan
    replay = Replay([answer for answer in answers if answer.name != ITEMS])
    setup = Setup(recipe, plan, len(artifact.catalogue), int(about["seed"]), read_prior(run))
    histogram = ask_histogram(setup, replay)
    measured = ask_transitions(setup, histogram, replay)
    old = artifact.catalogue["item_id"].cast(str).to_list()
    place = {name: n for n, name in enumerate(dataset.catalogue["item_id"].cast(str).to_list(), 1)}
    numbers = np.array([0, *(place.get(name, 0) for name in old)])
    prior = Prior.of(plan.users, histogram, measured, numbers, len(place))
    return replace(prior, conditions=Conditions.of(artifact.statement))


def write_prior(folder: Path, prior: Prior) -> None:
    """Keep a prior in the folder of the run that uses it, before the run asks anything."""
    write_file(folder / PRIOR, to_bytes(prior))


def to_bytes(prior: Prior) -> bytes:
    """The file of a prior: its arrays, and its conditions in the header."""
    return bytes(save(prior.arrays(), {_CONDITIONS: json.dumps(asdict(prior.conditions))}))


def read_prior(folder: Path) -> Prior | None:
    """The prior that a run was made with, if any."""
    if not (folder / PRIOR).exists():
        return None
    try:
        data = read_small(folder / PRIOR, 1 << 31)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        given = json.loads(header.get("__metadata__", {}).get(_CONDITIONS, "{}"))
        conditions = Conditions(**{name: tuple(map(str, values)) for name, values in given.items()})
        return Prior(**load(data), conditions=conditions)
    except (OSError, TypeError, ValueError, AttributeError, RecursionError, SafetensorError) as error:
        raise DPFormerError(f"{folder / PRIOR}: cannot be read ({error}); it is damaged") from None
