"""Runs of the statistics: no network and no steps, a few one-shot releases, each charged before it is made.

The state of the noise is saved before the first release. A run that was interrupted makes all of them again from there: with the
same noise they are the same releases, and are not charged twice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path

import torch

from dpformer.data import Dataset, load
from dpformer.privacy import Ledger, NoiseSource, PrivacyPlan, PrivacyStatement, fingerprint, noise_source
from dpformer.training.charged import charged
from dpformer.training.checkpoint import Checkpoints
from dpformer.training.folder import (
    RunLock,
    closed_on_error,
    hold,
    hold_new,
    make_folder,
    place_of,
    read_recipe,
    refuse_used,
    reopen,
    write_release,
)
from dpformer.training.jobs import take_over
from dpformer.training.memory import enough_memory
from dpformer.training.ranks import ALONE, Ranks
from dpformer.training.recipe import STATISTICS, Recipe
from dpformer.training.run import Progress, state_privacy
from dpformer.training.trackers import Tracker, Trackers, ended, started
from dpformer.training.trainer import digest


class OneShotRun:
    """An open run of statistics, with the face of `Run`."""

    step, ranks = 0, ALONE

    def __init__(
        self, folder: Path, dataset: Dataset, recipe: Recipe, ledger: Ledger, noise: NoiseSource, lock: RunLock
    ) -> None:
        self.folder, self.dataset, self.recipe, self.ledger, self.noise = folder, dataset, recipe, ledger, noise
        self.lock = lock

    @property
    def plan(self) -> PrivacyPlan:
        """What the run may spend."""
        return self.ledger.plan

    def train(
        self,
        on_step: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        trackers: Iterable[Tracker] = (),
    ) -> bool:
        """Make all releases, and the model from them. It takes seconds to minutes, and is not stopped in between."""
        told = Trackers(trackers)
        told.on_event(started(0, 0, self.recipe.settings()))
        train, items = self.dataset.train(self.recipe.hold_out), len(self.dataset.catalogue)
        about = fingerprint(self.recipe.model_dump_json(), digest(train.items, train.offsets))
        gaussian = charged(self.plan.releases, self.ledger, self.noise, about)
        first = self.plan.releases[0]
        model = STATISTICS[self.recipe.model]()
        sigma = first.noise_multiplier * math.sqrt(model.shares[first.name])
        with enough_memory(self.folder):
            model.fit(train.items, train.offsets, items, noise_multiplier=sigma, gaussian=gaussian)
        tensors = {f"model.{name}": value.contiguous() for name, value in model.state().items()}
        write_release(self.folder, self.recipe, self.statement(), items, tensors)
        Checkpoints(self.folder).remove()
        self.close()
        told.on_event(ended(0, released=True))
        return True

    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        return state_privacy(self.plan, self.ledger, self.recipe)

    def close(self) -> None:
        """Let another process open the run."""
        self.ledger.close()
        self.lock.close()


def start_one_shot(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> OneShotRun:
    """Begin a run of statistics in a new folder. Of several processes rank 0 does it alone."""
    refuse_used(folder)
    dataset = load(data)
    plan = recipe.plan(len(dataset.sequences))
    lock = hold_new(folder)
    with closed_on_error(lock):
        ledger = make_folder(folder, data, dataset, recipe, plan, ranks.job)
        assert ledger is not None  # `make_recipe` refuses statistics without privacy
        with closed_on_error(ledger):
            ranks.note_run(folder)
            noise = noise_source(recipe.noise, recipe.seed)
            Checkpoints(folder).save({"none": torch.zeros(0)}, {"noise": noise.state(), "ledger": place_of(ledger)})
    return OneShotRun(folder, dataset, recipe, ledger, noise, lock)


def resume_one_shot(folder: Path, data: Path | None = None, ranks: Ranks = ALONE) -> OneShotRun:
    """Make the releases of an interrupted run again, with the same noise."""
    lock = hold(folder)
    with closed_on_error(lock):
        recipe = read_recipe(folder)
        dataset, ledger, _, values = reopen(folder, data)
        take_over(folder, ranks)
        assert ledger is not None
        with closed_on_error(ledger):
            noise = noise_source(recipe.noise, recipe.seed)
            noise.restore(values["noise"])
    return OneShotRun(folder, dataset, recipe, ledger, noise, lock)
