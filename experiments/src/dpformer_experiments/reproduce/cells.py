"""A cell, which is one training with one seed and its evaluation: its settings, its key, and its command."""

from __future__ import annotations

import hashlib
import json
import math
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.fit.dpsgd import BLOCK_SCALE
from dpformer.fit.presets import command, make_recipe
from dpformer.fit.recipe import DPSGDSettings, Recipe, TransitionsStageSettings
from dpformer.statistics.settings import TransitionSettings

# Settings of a recipe on which its figures do not depend.
FREE = {"tuning"}
# Keys keep the names that presets had when the first runs finished.
FORMER_NAMES = {"dpformer": "pure", "default": "whole", "distilled": "default"}


@dataclass(frozen=True)
class Cell:
    """work: a key of `work.WORK`; "recipe" trains `make_recipe(preset, **options)` in a run folder, with seeded noise.

    every: also evaluate the iterate each time this many epochs have passed; these figures are not private. search: look at the
    validation item only. paired: noise by place alone (`curators.KeysByPlace`), to compare with runs of the same seed. sample:
    rank items for so many users at the most, the same ones for every model. alone: also evaluate the transitions of an ensemble
    without its network.
    optimiser: of `optimisers.OPTIMISERS`, instead of the library's. noisy: also measure its attention (`noisy_attention`).
    """

    dataset: str
    method: str
    epsilon: float
    seed: int
    work: str = "recipe"
    preset: str = "default"
    options: dict[str, Any] = field(default_factory=dict)
    every: float | None = None
    delta: float = 1e-5
    search: bool = False
    paired: bool = False
    sample: int | None = None
    alone: bool = False
    optimiser: str | None = None
    noisy: bool = False

    @property
    def recipe(self) -> Recipe:
        """The recipe of a cell that has one. It is seeded: the figures can be reproduced, and the model must not be used."""
        chosen = {"epsilon": self.epsilon, "delta": self.delta, "seed": self.seed}
        return make_recipe(self.preset, **{**self.options, **chosen})

    @property
    def label(self) -> str:
        """The name in progress and messages."""
        return f"{self.dataset}: {self.method}, epsilon {self.epsilon:g}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """All that its figures depend on, except data and code. Settings with the value of the preset are left out, so that a
        new setting with a default leaves old cells valid; `runs.Runs.find` notices a default that changed.
        """
        settings: dict[str, Any] = {
            "work": self.work,
            "epsilon": str(self.epsilon),
            "delta": self.delta,
            "seed": self.seed,
        }
        if self.every is not None:
            settings["every"] = self.every
        if self.search:
            settings["search"] = True
        if self.paired:
            settings["paired"] = True
        if self.sample is not None:
            settings["sample"] = self.sample
        if self.alone:
            settings["alone"] = True
        if self.optimiser is not None:
            settings["optimiser"] = self.optimiser
        if self.noisy:
            settings["noisy"] = "by key"  # earlier runs measured less
        if self.work != "recipe":
            return settings | self.options
        typed = command(self.recipe)
        changed = {name: value for name, value in typed["set"].items() if name not in FREE}
        steps, network = self.recipe.stage(DPSGDSettings), self.recipe.network
        if steps is not None and network is not None and network.recency is not None and math.isfinite(self.epsilon):
            changed["scale of blocks"] = BLOCK_SCALE  # runs of versions without it are not found
        settings |= {"preset": FORMER_NAMES.get(typed["preset"], typed["preset"]), "set": changed}
        if self.recipe.stage(TransitionsStageSettings) is not None:
            settings["statistics"] = repr(TransitionSettings())
        return settings

    def defaults(self) -> dict[str, Any]:
        """Every setting of its recipe by dotted name, defaults included; ready for JSON."""
        if self.work != "recipe":
            return {}
        values = self.recipe.settings()
        groups = {"network": values.pop("network") or {}, **{stage["stage"]: stage for stage in values.pop("stages")}}
        return values | {f"{group}.{name}": value for group, own in groups.items() for name, value in own.items()}

    def key(self, data: str) -> str:
        """The name under which its line and its folder are found. data: the fingerprint of its data set."""
        text = json.dumps([self.settings(), data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self, root: Path, data: str) -> Path:
        """The folder of its run: a readable name and the key."""
        name = re.sub(r"[^a-z0-9]+", "-", self.method.lower()).strip("-")
        return root / f"{self.dataset}-{name}-{self.epsilon:g}-{self.seed}-{self.key(data)}"

    def command(self, result: str) -> str:
        """The command that remakes it: `dpformer fit` if it can make the run, else the result that contains it."""
        if self.work != "recipe" or self.optimiser is not None:
            return f"dpformer reproduce {result} --method {shlex.quote(self.method)}"
        typed = command(self.recipe)
        words = ["dpformer", "fit", self.dataset, "--run", "RUN", "--epsilon", f"{self.epsilon:g}"]
        words += ["--preset", typed["preset"]] if typed["preset"] != "default" else []
        for name, value in typed["set"].items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{name}", text] if name in ("delta", "seed") else ["--set", f"{name}={text}"]
        return shlex.join(words)
