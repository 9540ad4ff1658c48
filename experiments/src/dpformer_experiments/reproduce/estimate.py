"""Estimate how long a cell takes on one core: from finished cells like it, else from a few steps measured here.

seconds = steps * (batch * seconds per user + seconds per step) + evaluation
"""

from __future__ import annotations

import functools
import json
import math
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from dpformer.data import Dataset, collate, held_out, load
from dpformer.files import read_json
from dpformer.fit.recipe import DPSGDSettings, Recipe
from dpformer.fit.run import start
from dpformer.models import build
from dpformer.privacy.plan import steps_of
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.work import PROGRESS

# Small batches have micro-batches of a few people each, which tell little about a batch of thousands: with 16 and 64 people the
# estimate for Amazon Games was 51 minutes where the training took 5.
BATCHES = (128, 1024)
RANKED = 64
# Settings that do not change the time of a step.
_FREE = {"epsilon", "delta", "seed", "tuning", "histogram.share", "dpsgd.learning_rate"}


@dataclass(frozen=True)
class Speed:
    """Seconds on one core: per user of a step, per step in addition, and per user to rank."""

    user: float
    step: float
    rank: float


class Estimates:
    """Estimates of the seconds that cells need, from finished ones (`learn`) and from measurements."""

    def __init__(self, data: Mapping[str, Path], measure: Callable[[Recipe, Path], Speed] | None = None) -> None:
        self._data, self._measure = data, measure or measure_speed
        self._finished: dict[str, list[float]] = {}
        self._speeds: dict[str, Speed] = {}

    def learn(self, cell: Cell, seconds: float) -> None:
        """Record the seconds of a finished cell."""
        self._finished.setdefault(_kind(cell), []).append(seconds)

    def seconds(self, cell: Cell, folder: Path) -> float | None:
        """The seconds left for a cell; None if there is no estimate: it has no steps, and none of its kind is finished."""
        if (seconds := self.finished(cell, folder)) is not None:
            return seconds
        if cell.work != "recipe" or not cell.recipe.steps_on_data:
            return None
        return _left(folder) * self._measured(cell)

    def finished(self, cell: Cell, folder: Path) -> float | None:
        """The seconds left by finished cells of its kind alone, without a measurement."""
        finished = self._finished.get(_kind(cell))
        return _left(folder) * sum(finished) / len(finished) if finished else None

    def _measured(self, cell: Cell) -> float:
        shape = _kind(replace(cell, every=None), {*_FREE, "dpsgd.batch_size", "dpsgd.epochs"})
        if shape not in self._speeds:
            self._speeds[shape] = self._measure(cell.recipe, self._data[cell.dataset])
        speed, users = self._speeds[shape], self._users(cell.dataset)
        how = cell.recipe.stage(DPSGDSettings)
        assert how is not None
        batch = how.batch_of(users)
        epochs = how.epochs_of(users)
        steps = steps_of(epochs, users, batch)
        evaluations = 2 + (0 if cell.every is None else epochs / cell.every)
        return steps * (batch * speed.user + speed.step) + evaluations * users * speed.rank

    @functools.cache  # noqa: B019  - lives as long as one run of the runner
    def _users(self, name: str) -> int:
        return len(load(self._data[name]).sequences)


def _left(folder: Path) -> float:
    """The part of a cell's steps that is left."""
    progress = read_json(folder / PROGRESS) if (folder / PROGRESS).exists() else {"step": 0}
    return 1 - progress["step"] / progress["steps"] if progress["step"] else 1.0


def _kind(cell: Cell, free: Collection[str] = _FREE) -> str:
    """The kind of a cell: all settings but those in `free`. Cells of one kind take the same time."""
    recipe = {name: value for name, value in cell.defaults().items() if name not in free}
    options = {} if cell.work == "recipe" else cell.options
    about = [cell.dataset, cell.work, cell.every, math.isinf(cell.epsilon), options, recipe]
    return json.dumps(about, sort_keys=True, default=str)


def measure_speed(recipe: Recipe, data: Path) -> Speed:
    """Time a few small steps of a real run on one core; the random state of the process is unchanged."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        with tempfile.TemporaryDirectory(prefix="dpformer-speed-") as folder:
            points = [point for batch in BATCHES for point in _steps(recipe, data, batch, Path(folder) / str(batch))]
            rank = _ranking(recipe, load(data))
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)
    users, seconds = np.array(points).T
    slope, base = np.polyfit(users, seconds, 1)
    if slope <= 0 or base < 0:  # too noisy to fit a line
        slope, base = seconds.sum() / users.sum(), 0.0
    return Speed(float(slope), float(base), rank)


def _steps(recipe: Recipe, data: Path, batch: int, folder: Path) -> list[tuple[int, float]]:
    """Users and seconds of steps of about `batch` users, after a first one."""
    users = len(load(data).sequences)
    batch = min(batch, users)
    few = {"dpsgd.batch_size": batch, "dpsgd.epochs": 3 * batch / users, "distil.steps": 1}
    run = start(folder, data, recipe.changed(few))
    try:
        trainer = run.begin_steps()
        trainer.make_step(run.curator)
        points = []
        for _ in range(run.plan.steps - 1):
            began = time.process_time()
            report = trainer.make_step(run.curator)
            points.append((report.users, time.process_time() - began))
        return points
    finally:
        run.close()


def _ranking(recipe: Recipe, dataset: Dataset) -> float:
    """Seconds to rank all items for a user."""
    assert recipe.network is not None
    model = build(recipe.network.spec(len(dataset.catalogue))).eval()
    held = held_out(dataset.sequences, "test")
    batch = collate(held.histories, held.evaluated[:RANKED], recipe.network.max_length)

    def ranking() -> None:
        with torch.no_grad():
            model.scores(batch.tokens, batch.lengths).sort(1)

    return _seconds(ranking) / len(batch.users)


def _seconds(do: Callable[[], None]) -> float:
    """The faster of two calls, after a first one."""
    do()
    seconds = []
    for _ in range(2):
        start = time.process_time()
        do()
        seconds.append(time.process_time() - start)
    return min(seconds)
