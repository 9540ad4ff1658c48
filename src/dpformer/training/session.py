"""One way in for every model: a run is begun or gone on with by its recipe.

Among several processes rank 0 calls `begin` or `go_on`, and the others `follow` meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from dpformer.training.folder import read_recipe, refuse_used
from dpformer.training.jobs import began_in, finished_in, refuse_second
from dpformer.training.one_shot import OneShotRun, resume_one_shot, start_one_shot
from dpformer.training.ranks import ALONE, Ranks
from dpformer.training.recipe import STATISTICS, Recipe
from dpformer.training.run import Run, resume, start
from dpformer.training.together import alone, explained_loss

AnyRun = Run | OneShotRun


def begin(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> AnyRun:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote.

    When torchrun has restarted its processes, the run that they began goes on; anybody else's is refused as ever.
    """
    with ranks.leading():
        again = ranks.restarts > 0 and began_in(folder, ranks.job)
    if again:
        return go_on(folder, data, ranks)
    with explained_loss(folder, ranks), ranks.leading():
        refuse_second(folder, ranks)
        if has_steps(recipe):
            return start(folder, data, recipe, ranks)
        # Without steps there is nothing to share out, and the others need not wait until rank 0 has made the releases.
        refuse_used(folder)
        ranks = alone(ranks)
    if recipe.model in STATISTICS:
        return start_one_shot(folder, data, recipe, ranks)
    return start(folder, data, recipe, ranks)


def go_on(folder: Path, data: Path | None = None, ranks: Ranks = ALONE) -> AnyRun:
    """Go on with a run that was interrupted."""
    with explained_loss(folder, ranks), ranks.leading():
        recipe = read_recipe(folder)
        if has_steps(recipe):
            return resume(folder, data, ranks)
        ranks = alone(ranks)
    if recipe.model in STATISTICS:
        return resume_one_shot(folder, data, ranks)
    return resume(folder, data, ranks)


def finished(folder: Path, ranks: Ranks) -> bool:
    """Did these processes release their model before torchrun restarted them? Then nothing is left to do, for any of them."""
    with ranks.leading():
        done = finished_in(folder, ranks)
        if done:
            alone(ranks)
        return done


def has_steps(recipe: Recipe) -> bool:
    """Are there steps for several processes to share out? Otherwise rank 0 makes the run alone."""
    return recipe.epochs > 0 and recipe.model not in STATISTICS
