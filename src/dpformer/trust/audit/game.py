"""What is audited: a recipe on a small log that is made for the attack, with many canaries, each of them in by a coin.

A guarantee holds for any log, so the audit takes one in which a person is easiest to find: everybody is a canary. Canaries are

    own items    one item each that nobody else has                          where the histogram is all
    walks        12 items at random: 66 cells of the transitions, hardly any of them another canary's    with transitions
    pairs        an item at random, then one that nobody else has            with steps on people's data

A canary that is out has no events, as the neighbours of the guarantee have it. Nothing of a fit is kept.

The controls of the attacks are Curators with a known defect, each handed to a run where `Curator` stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl

from dpformer.artifact.read import refuse_unfinished
from dpformer.data import Sequences
from dpformer.errors import DPFormerError
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe, named
from dpformer.fit.recipe import Recipe, TransitionsStageSettings, Tuning
from dpformer.fit.run import start
from dpformer.privacy import Answer, Curator, Query
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import Statistic
from dpformer.trust.verify.people import emptied, joined, write_data
from dpformer.trust.verify.recorder import keys_at, ledger_at, no_noise

Kind = Literal["own items", "walks", "pairs"]
WALK, STEPS, RATE = 12, 8, 0.5
# Canaries of one fit, items, and fits: as many as some minutes allow.
_SIZES: dict[Kind, tuple[int, int, int]] = {
    "own items": (2000, 2000, 50),
    "walks": (2000, 400, 60),
    "pairs": (200, 200, 60),
}


@dataclass(frozen=True)
class Setting:
    """A recipe under audit. canaries: of each fit. All draws come from `seed`: the same figures every time."""

    name: str
    recipe: Recipe
    kind: Kind
    canaries: int
    items: int
    fits: int
    seed: int = 1

    def play(self, place: Path, fit: int, make: Callable[..., Any] = Curator) -> Game:
        """Flip the coins, fit, and give the attacker what there is. `make` makes the Curator; another one is a control."""
        random = np.random.default_rng([self.seed, fit])
        canaries = joined(self._histories(random))
        inside = random.random(self.canaries) < 0.5
        data = write_data(place / f"data-{fit}", emptied(canaries, np.flatnonzero(~inside)), self._catalogue())
        recipe = self.recipe.changed({"seed": int(random.integers(2**62))})
        curators: list[Any] = []

        def made(*arguments: Any) -> Any:
            curators.append(make(*arguments))
            return curators[0]

        folder = place / f"fit-{fit}"
        start(folder, data, recipe, make_curator=made).train()
        return Game(folder, canaries, inside, curators[0])

    def _histories(self, random: np.random.Generator) -> list[np.ndarray]:
        own = random.permutation(self.items)[: self.canaries] + 1
        if self.kind == "own items":
            return [np.array([item]) for item in own]
        if self.kind == "pairs":
            return [np.array([random.integers(1, self.items + 1), item]) for item in np.resize(own, self.canaries)]
        return [random.permutation(self.items)[:WALK] + 1 for _ in range(self.canaries)]

    def _catalogue(self) -> pl.DataFrame:
        ids = [f"item {k}" for k in range(1, self.items + 1)]
        return pl.DataFrame({"item": np.arange(1, self.items + 1, dtype=np.int32), "item_id": ids})


@dataclass(frozen=True)
class Game:
    """A finished fit. canaries: all of them, as if they were in. curator: what answered; the attacker does not see it."""

    folder: Path
    canaries: Sequences
    inside: np.ndarray
    curator: Any


def of_preset(preset: str, epsilon: float = 8.0, seed: int = 1, fits: int | None = None) -> Setting:
    """A preset at a claim."""
    return _setting(f"preset {named(preset)}", make_recipe(preset, epsilon=epsilon), seed, fits)


def of_run(folder: Path, seed: int = 1, fits: int | None = None) -> Setting:
    """The recipe of a finished run: its stages, budget and kind of network; the log is the audit's own."""
    refuse_unfinished(folder)
    return _setting(f"the recipe of {folder}", read_recipe(folder), seed, fits)


def _setting(name: str, recipe: Recipe, seed: int, fits: int | None) -> Setting:
    """The recipe with a small network and few steps, which change nothing of what is claimed for it."""
    if not math.isfinite(recipe.epsilon):
        raise DPFormerError(f"{name} is not private and says so; there is no claim to audit")
    kind: Kind = "own items"
    if recipe.stage(TransitionsStageSettings) is not None:
        kind = "walks"
    if recipe.steps_on_data:
        kind = "pairs"
    canaries, items, usual = _SIZES[kind]
    changes: dict[str, Any] = {"hold_out": "nothing", "population": None, "tuning": Tuning(), "distil.steps": 2}
    changes |= {"delta": min(recipe.delta, 0.1 / canaries), "dpsgd.batch_size": round(RATE * canaries)}
    changes |= {"dpsgd.epochs": STEPS * RATE}
    if recipe.network is not None:
        changes |= {"network.d": 8, "network.max_length": 8, "network.dropout": 0.0, "network.vocabulary": None}
    return Setting(name, recipe.changed(changes), kind, canaries, items, fits or usual, seed)


class Scaled:
    """A share of the noise."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        return np.rint(self.share * rounded_gaussian(key, shape, std)).astype(np.int64)


class Exact(Curator[Any]):
    """Charges and keeps a noisy answer, and hands the exact sum to the stage: the published tensors have no noise."""

    def ask(self, query: Query[Any]) -> Answer:
        place = self.keys.place
        exact = Curator(
            self._people, self.plan, ledger_at(self.plan, place), keys_at(place), noise=no_noise, draw=self._draw
        )
        sums = exact.ask(query)
        super().ask(query)
        return sums


class OldNoise(Curator[Any]):
    """Exact sums in float64, to which float32 Gaussians times the standard deviation are added. No grid.

    That is how noise was made before there was a Curator. Plan, ledger, multipliers and bounds are those of the product. It
    cannot keep its answers as whole steps, so it keeps them in `heard`.
    """

    def __init__(self, *arguments: Any, seed: int) -> None:
        super().__init__(*arguments)
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self.heard: list[Answer] = []

    def ask(self, query: Query[Any]) -> Answer:
        if not isinstance(query, Statistic):
            self.heard.append(super().ask(query))
            return self.heard[-1]
        planned = self.plan.planned(self.keys.place)
        exact = np.zeros(query.numbers)
        for _, cell, value in query.vectors(self._people):
            exact += np.bincount(cell, weights=value, minlength=query.numbers)
        std = planned.noise_multiplier * query.bound
        assert self.ledger is not None
        self.ledger.charge(self.keys.place, query.name, self.keys.tag(query.name, b""))
        noise = std * self._generator.standard_normal(query.numbers, dtype=np.float32).astype(np.float64)
        self.keys.ratchet()
        self.heard.append(Answer(query.name, {query.name: (exact + noise).reshape(query.shape)}, std, 0.0))
        return self.heard[-1]
