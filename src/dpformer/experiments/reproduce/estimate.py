"""How long a cell will take one core, before it is run: from cells like it that are finished, else from steps measured here.

seconds = steps * (batch * seconds a user + seconds a step) + evaluation
"""

from __future__ import annotations

import functools
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpformer.data import Dataset, PoissonSampler, collate, load, micro_batches
from dpformer.evaluation.held_out import held_out
from dpformer.experiments.reproduce.cells import Cell
from dpformer.experiments.reproduce.work import PROGRESS
from dpformer.privacy import make_plan, noise_source
from dpformer.privacy.plan import steps_of
from dpformer.training.files import read_json
from dpformer.training.recipe import STATISTICS, Recipe
from dpformer.training.trainer import Trainer

USERS = 48
# What a step's time depends on; epsilon, rates and seeds do not change it.
_SHAPE = {
    "model",
    "max_length",
    "d",
    "heads",
    "blocks",
    "feed_forward",
    "dropout",
    "norm",
    "tied",
    "reattention",
    "token_budget",
}


@dataclass(frozen=True)
class Speed:
    """Seconds on one core: of a user's gradient, of a step besides, of ranking for a user."""

    user: float
    step: float
    rank: float


class Estimates:
    """Seconds that cells need. `learn` from those that finish."""

    def __init__(self, data: dict[str, Path], measure: Callable[[Recipe, Dataset], Speed] | None = None) -> None:
        self._data, self._measure = data, measure or measure_speed
        self._finished: dict[str, list[float]] = {}
        self._speeds: dict[str, Speed] = {}

    def learn(self, cell: Cell, seconds: float) -> None:
        """A cell took so long."""
        self._finished.setdefault(_kind(cell), []).append(seconds)

    def seconds(self, cell: Cell, folder: Path) -> float | None:
        """What is left to do of it; None where nothing is known: statistics of a kind that has not been run."""
        left = 1.0
        if (folder / PROGRESS).exists():
            known = read_json(folder / PROGRESS)
            if known["step"]:
                left = 1 - known["step"] / known["steps"]
        if found := self._finished.get(_kind(cell)):
            return left * sum(found) / len(found)
        if cell.work != "recipe" or cell.recipe.model in STATISTICS:
            return None
        return left * self._measured(cell)

    def _measured(self, cell: Cell) -> float:
        recipe, dataset = cell.recipe, self._load(cell.dataset)
        users = len(dataset.sequences)
        shape = json.dumps(
            [cell.dataset, recipe.epsilon == math.inf, recipe.model_dump(include=_SHAPE)], sort_keys=True
        )
        if shape not in self._speeds:
            self._speeds[shape] = self._measure(recipe, dataset)
        speed = self._speeds[shape]
        batch = min(recipe.batch_size or max(1, users // 2), users)
        evaluations = 2 + (0 if cell.every is None else recipe.epochs / cell.every)
        steps = steps_of(recipe.epochs, users, batch)
        return steps * (batch * speed.user + speed.step) + evaluations * users * speed.rank

    @functools.cache  # noqa: B019  - lives as long as one run of the runner
    def _load(self, name: str) -> Dataset:
        return load(self._data[name])


def _kind(cell: Cell) -> str:
    """Cells of one kind take the same time: all but epsilon, seed and learning rate the same."""
    settings = {
        name: value for name, value in cell.settings().items() if name not in ("epsilon", "seed", "delta", "recipe")
    }
    recipe: dict[str, Any] = {}
    if cell.work == "recipe":
        recipe = cell.recipe.model_dump(
            exclude={"epsilon", "seed", "delta", "learning_rate", "noise", "tried", "tuning"}
        )
    return json.dumps([cell.dataset, math.isinf(cell.epsilon), settings, recipe], sort_keys=True, default=str)


def measure_speed(recipe: Recipe, dataset: Dataset) -> Speed:
    """A few users through one core; the random state of the process is left as it was."""
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)
    try:
        return _measure(recipe, dataset)
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(random)


def _measure(recipe: Recipe, dataset: Dataset) -> Speed:
    train = dataset.split().train
    users = len(train)
    model = recipe.build(len(dataset.catalogue))
    plan = make_plan(users, math.inf, batch_size=min(USERS, users), steps=1)
    trainer = Trainer(model, train, plan, recipe.optimisation(), PoissonSampler(users, plan.rate, 0))
    drawn = np.random.default_rng(0).choice(users, min(USERS, users), replace=False)
    batches = list(micro_batches(train, drawn, max_length=recipe.max_length + 1, token_budget=recipe.token_budget))
    private = recipe.epsilon != math.inf

    def gradients() -> None:
        for batch in batches:
            if private:
                trainer.clipping.backward(lambda tokens=batch.tokens: trainer.losses(tokens))  # type: ignore[misc]
            else:
                trainer.losses(batch.tokens).sum().backward()

    def step() -> None:
        if private:
            grads = [(name, p.grad) for name, p in model.named_parameters() if p.grad is not None]
            noise_source("seeded", 0).add_noise_(grads, 1.0)
        trainer.optimizer.step()

    def ranking() -> None:
        with torch.no_grad():
            model.eval().scores(batch.tokens, batch.lengths).sort(1)

    model.train()
    user = _seconds(gradients) / len(drawn)
    a_step = _seconds(step)
    held = held_out(dataset.sequences, "test")
    batch = collate(held.histories, held.evaluated[:USERS], recipe.max_length)
    return Speed(user, a_step, _seconds(ranking) / len(batch.users))


def _seconds(do: Callable[[], None]) -> float:
    """The quicker of two, after one that warms up."""
    do()
    found = []
    for _ in range(2):
        start = time.process_time()
        do()
        found.append(time.process_time() - start)
    return min(found)
