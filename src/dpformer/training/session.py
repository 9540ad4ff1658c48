"""One way in for every model: a run is begun or gone on with by its recipe."""

from __future__ import annotations

from pathlib import Path

from dpformer.training.folder import read_recipe
from dpformer.training.one_shot import OneShotRun, resume_one_shot, start_one_shot
from dpformer.training.recipe import STATISTICS, Recipe
from dpformer.training.run import Run, resume, start

AnyRun = Run | OneShotRun


def begin(folder: Path, data: Path, recipe: Recipe) -> AnyRun:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote."""
    return (start_one_shot if recipe.model in STATISTICS else start)(folder, data, recipe)


def go_on(folder: Path, data: Path | None = None) -> AnyRun:
    """Go on with a run that was interrupted."""
    return (resume_one_shot if read_recipe(folder).model in STATISTICS else resume)(folder, data)
