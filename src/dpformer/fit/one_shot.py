"""Runs of the statistics: no network and no steps, a few queries, each charged before it is answered.

The keys are saved before the first query. A run that was interrupted asks all of them again from there: with the same keys they
get the same answers, and are not charged twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

from dpformer.artifact.write import publish
from dpformer.data import Dataset, Sequences, load
from dpformer.fit.distributed.ranks import ALONE, Ranks
from dpformer.fit.distributed.restart import take_over
from dpformer.fit.events import Tracker, Trackers, ended, started
from dpformer.fit.folder import (
    Begun,
    RunLock,
    closed_on_error,
    hold,
    hold_new,
    make_folder,
    read_recipe,
    refuse_used,
    release_files,
    reopen,
    save_begun,
)
from dpformer.fit.memory import enough_memory
from dpformer.fit.recipe import STATISTICS, Recipe
from dpformer.fit.run import Progress
from dpformer.fit.stated import state_privacy
from dpformer.fit.statistics_stages import choose_items
from dpformer.privacy import Curator, Keys, PrivacyPlan, PrivacyStatement
from dpformer.privacy.ledger import Ledger


class OneShotRun:
    """An open run of statistics, with the face of `Run`."""

    step, ranks = 0, ALONE

    def __init__(
        self, folder: Path, dataset: Dataset, recipe: Recipe, ledger: Ledger, keys: Keys, lock: RunLock
    ) -> None:
        self.folder, self.dataset, self.recipe, self.lock = folder, dataset, recipe, lock
        self.curator: Curator[Sequences] = Curator(dataset.train(recipe.hold_out), ledger.plan, ledger, keys)

    @property
    def plan(self) -> PrivacyPlan:
        """What the run may spend."""
        return self.curator.plan

    def train(
        self,
        on_step: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        trackers: Iterable[Tracker] = (),
    ) -> bool:
        """Make all releases, and the model from them. It takes seconds to minutes, and is not stopped in between."""
        told = Trackers(trackers)
        told.on_event(started(0, 0, self.recipe.settings()))
        model = STATISTICS[self.recipe.model]()
        with enough_memory(self.folder):
            self.dataset = choose_items(self.curator, self.dataset)
            model.fit(self.curator, len(self.dataset.catalogue))
        tensors = {f"model.{name}": value.contiguous() for name, value in model.state().items()}
        publish(self.folder, release_files(self.recipe, self.statement(), self.dataset.catalogue, tensors))
        self.close()
        told.on_event(ended(0, released=True))
        return True

    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        return state_privacy(self.curator, self.recipe, self.dataset)

    def close(self) -> None:
        """Let another process open the run."""
        assert self.curator.ledger is not None
        self.curator.ledger.close()
        self.lock.close()


def start_one_shot(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> OneShotRun:
    """Begin a run of statistics in a new folder. Of several processes rank 0 does it alone."""
    refuse_used(folder)
    dataset = load(data)
    plan = recipe.plan(len(dataset.sequences), dataset.catalogue_mode == "private")
    lock = hold_new(folder)
    with closed_on_error(lock):
        ledger = make_folder(folder, data, recipe, plan, ranks.job)
        assert ledger is not None  # `make_recipe` refuses statistics without privacy
        with closed_on_error(ledger):
            ranks.note_run(folder)
            keys = Keys(recipe.seed)
            save_begun(folder, Begun.new(folder, data, recipe.seed), keys, ledger)
    return OneShotRun(folder, dataset, recipe, ledger, keys, lock)


def resume_one_shot(folder: Path, data: Path | None = None, ranks: Ranks = ALONE) -> OneShotRun:
    """Make the releases of an interrupted run again, with the same noise."""
    lock = hold(folder)
    with closed_on_error(lock):
        recipe = read_recipe(folder)
        dataset, ledger, _, values = reopen(folder, data)
        take_over(folder, ranks)
        assert ledger is not None
        with closed_on_error(ledger):
            return OneShotRun(folder, dataset, recipe, ledger, Keys.restored(values["keys"]), lock)
