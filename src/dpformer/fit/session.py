"""One way in for every model: a run is begun or gone on with by its recipe.

Among several processes rank 0 calls `begin` or `go_on`, and the others `follow` meanwhile.
"""

from __future__ import annotations

from pathlib import Path

from dpformer.artifact import complete, is_written
from dpformer.errors import DPFormerError
from dpformer.fit.distributed.ranks import ALONE, Ranks
from dpformer.fit.distributed.restart import began_in, finished_in, refuse_second
from dpformer.fit.distributed.together import alone, explained_loss
from dpformer.fit.folder import closed_on_error, hold, read_recipe, refuse_used
from dpformer.fit.one_shot import OneShotRun, resume_one_shot, start_one_shot
from dpformer.fit.recipe import STATISTICS, Recipe
from dpformer.fit.run import Run, resume, start

AnyRun = Run | OneShotRun


def begin(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> AnyRun:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote.

    When torchrun has restarted its processes, the run that they began goes on; anybody else's is refused as ever.
    """
    with ranks.leading():
        again = ranks.restarts > 0 and began_in(folder, ranks.job)
    if again:
        return go_on(folder, data, ranks)
    with explained_loss(folder), ranks.leading():
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
    with explained_loss(folder), ranks.leading():
        recipe = read_recipe(folder)
        if finish_written(folder):
            raise DPFormerError(f"{folder}: is finished; its model is released")
        if has_steps(recipe):
            return resume(folder, data, ranks)
        ranks = alone(ranks)
    if recipe.model in STATISTICS:
        return resume_one_shot(folder, data, ranks)
    return resume(folder, data, ranks)


def finish_written(folder: Path) -> bool:
    """Put the release of a run in place whose process ended after it was written. False where there is none."""
    if not is_written(folder):
        return False
    lock = hold(folder)
    with closed_on_error(lock):
        complete(folder)
    lock.close()
    return True


def finished(folder: Path, ranks: Ranks, resuming: bool = True) -> bool:
    """Is the model released, but for its last files? Then they are put in place, and nothing is left to do, for any process.

    resuming: False for a command that begins a run; only a restart of it may end what it began.
    """
    with ranks.leading():
        own = resuming or (ranks.restarts > 0 and began_in(folder, ranks.job))
        done = own and (finish_written(folder) or finished_in(folder, ranks))
        if done:
            alone(ranks)
        return done


def has_steps(recipe: Recipe) -> bool:
    """Are there steps for several processes to share out? Otherwise rank 0 makes the run alone."""
    return recipe.epochs > 0 and recipe.model not in STATISTICS
