"""What is audited: a recipe, some users, and small runs of it that are thrown away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from dpformer.artifact import refuse_unfinished
from dpformer.artifact.layout import LOCAL
from dpformer.data import Dataset, Sequences, demo_frame, load, prepare
from dpformer.errors import DPFormerError
from dpformer.files import read_json
from dpformer.fit.folder import read_recipe
from dpformer.fit.presets import make_recipe
from dpformer.fit.recipe import DPSGDSettings, Recipe, TransitionsSettings, Tuning
from dpformer.fit.run import Run, start
from dpformer.trust.verify.people import write_data


@dataclass(frozen=True)
class Setting:
    """The recipe under audit and the data that it is tried on. `steps` bounds the trainings; figures come from `seed`."""

    name: str
    recipe: Recipe
    dataset: Dataset
    steps: int = 40
    seed: int = 1

    @property
    def items(self) -> int:
        """The size of the catalogue."""
        return len(self.dataset.catalogue)

    def sequences(self, count: int, seed: int) -> list[np.ndarray]:
        """Some users' whole sequences, at random."""
        random = np.random.default_rng([self.seed, seed])
        users = random.permutation(len(self.dataset.sequences))[:count]
        return [self.dataset.sequences[int(k)] for k in users]

    def begin(self, folder: Path, sequences: list[np.ndarray], **changes: Any) -> Run:
        """A run of the recipe on these users, seeded, with half of them in a batch on average."""
        offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum([len(part) for part in sequences])])
        users = pl.Series("user_id", [str(k) for k in range(len(sequences))])
        flat = Sequences(users, np.concatenate(sequences).astype(np.int32), offsets)
        data = write_data(folder.with_name(folder.name + "-data"), flat, self.dataset.catalogue)
        steps = self.recipe.stage(DPSGDSettings)
        assert steps is not None
        fixed: dict[str, Any] = {
            "seed": self.seed,
            "hold_out": "validation",
            "population": None,
            "delta": min(self.recipe.delta, 0.1 / len(sequences)),
            "tuning": Tuning(),
            "dpsgd.batch_size": len(sequences) // 2,
            "dpsgd.epochs": min(steps.epochs, self.steps / 2),
        }
        run = start(folder, data, self.recipe.changed({**fixed, **changes}))
        run.begin_steps()
        return run


def embedded(seed: int = 1, steps: int = 40) -> Setting:
    """A Transformer trained by DP-SGD, small, on the embedded library."""
    small: dict[str, Any] = {"d": 16, "max_length": 12, "vocabulary": None, "recency": None}
    recipe = make_recipe("pure", stages=[{"stage": "dpsgd", "epochs": 60.0}], epsilon=8.0, **small)
    return Setting("a Transformer by DP-SGD, d = 16, on the embedded data", recipe, prepare(demo_frame()), steps, seed)


def of_run(folder: Path, data: Path | None = None, seed: int = 1, steps: int = 40) -> Setting:
    """The recipe of a run, on its own data."""
    recipe = read_recipe(folder)
    refuse_unfinished(folder)
    if not recipe.steps_on_data:
        raise DPFormerError(f"{folder}: releases statistics, without steps to audit; use: dpformer verify {folder}")
    if recipe.stage(TransitionsSettings) is not None:
        raise DPFormerError(
            f"{folder}: has transitions, and an audit is of steps alone; use: dpformer verify {folder}, or audit a run of "
            "preset pure"
        )
    if recipe.epsilon == float("inf"):
        raise DPFormerError(f"{folder}: is not private and says so; there is no claim to audit")
    if data is None:
        if not (folder / LOCAL).exists():
            raise DPFormerError(f"{folder}: does not tell where its data is, and an audit trains on it; give --data")
        data = Path(read_json(folder / LOCAL)["data"])
    return Setting(
        f"the recipe of {folder} on its data", recipe.changed({"network.dropout": 0.0}), load(data), steps, seed
    )
