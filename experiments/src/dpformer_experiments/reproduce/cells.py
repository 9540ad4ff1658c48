"""A cell: one training with one seed and its evaluation. What it is, by which it is found again, and how to type it."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.fit.presets import command, make_recipe
from dpformer.fit.recipe import Recipe, TransitionsSettings
from dpformer.statistics.settings import TransitionSettings

# Settings of a recipe on which its figures do not depend.
FREE = {"tuning"}


@dataclass(frozen=True)
class Cell:
    """work: a key of `work.WORK`; "recipe" trains `make_recipe(preset, **options)` in a run folder, with seeded noise.

    every: evaluate the iterate after so many epochs, again and again; those figures are not private, nor is their model.
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

    @property
    def recipe(self) -> Recipe:
        """The recipe of a cell that has one. Seeded: figures that can be made again, a model that must not be used."""
        chosen = {"epsilon": self.epsilon, "delta": self.delta, "seed": self.seed}
        return make_recipe(self.preset, **{**self.options, **chosen})

    @property
    def label(self) -> str:
        """For progress and messages."""
        return f"{self.dataset}: {self.method}, epsilon {self.epsilon:g}, seed {self.seed}"

    def settings(self) -> dict[str, Any]:
        """All that its figures depend on, but for the data and the code. What stands as in the preset is left out, so that a
        new setting with a default leaves old cells valid; `runs.Runs.find` sees a default that changed.
        """
        settings: dict[str, Any] = {
            "work": self.work,
            "epsilon": str(self.epsilon),
            "delta": self.delta,
            "seed": self.seed,
        }
        if self.every is not None:
            settings["every"] = self.every
        if self.work != "recipe":
            return settings | self.options
        typed = command(self.recipe)
        changed = {name: value for name, value in typed["set"].items() if name not in FREE}
        settings |= {"preset": typed["preset"], "set": changed}
        if self.recipe.stage(TransitionsSettings) is not None:
            settings["statistics"] = repr(TransitionSettings())
        return settings

    def defaults(self) -> dict[str, Any]:
        """Every setting of its recipe by dotted name, those at their defaults too; ready for JSON."""
        if self.work != "recipe":
            return {}
        values = self.recipe.settings()
        groups = {"network": values.pop("network") or {}, **{stage["stage"]: stage for stage in values.pop("stages")}}
        return values | {f"{group}.{name}": value for group, own in groups.items() for name, value in own.items()}

    def key(self, data: str) -> str:
        """What it is found by on disk; data: the fingerprint of its data set."""
        text = json.dumps([self.settings(), data], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def folder(self, root: Path, data: str) -> Path:
        """Where its run and record are: a readable name and the key."""
        name = re.sub(r"[^a-z0-9]+", "-", self.method.lower()).strip("-")
        return root / f"{self.dataset}-{name}-{self.epsilon:g}-{self.seed}-{self.key(data)}"

    def command(self, result: str) -> str:
        """What remakes it: `dpformer fit` where the cell is a run, else the result that holds it."""
        if self.work != "recipe":
            return f"dpformer reproduce {result} --method {shlex.quote(self.method)}"
        typed = command(self.recipe)
        words = ["dpformer", "fit", self.dataset, "--run", "RUN", "--epsilon", f"{self.epsilon:g}"]
        words += ["--preset", typed["preset"]] if typed["preset"] != "default" else []
        for name, value in typed["set"].items():
            text = value if isinstance(value, str) else json.dumps(value)
            words += [f"--{name}", text] if name in ("delta", "seed") else ["--set", f"{name}={text}"]
        return shlex.join(words)
