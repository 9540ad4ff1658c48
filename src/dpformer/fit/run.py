"""A run: from prepared data, a recipe and a budget to a folder with a released model, through any number of interruptions.

    config.json         recipe, catalogue size, versions              items.jsonl       the catalogue
    model.safetensors   the released model                            privacy.json      the privacy statement
    ledger.jsonl        what was charged, before it was seen          events.jsonl      progress; losses are not private
    metrics.json        evaluation; not private                       README.md         the model card
    files.json          SHA-256 of the above that are released    run.lock          keeps a second process out
    private/            state of an unfinished run; owner only, removed at the end
    local.json          where the data was, for this machine; owner only

The first checkpoint (with the keys of the noise to come) is saved before the first answer, so that a crash after an answer asks
again with the same keys, which is the same answer and costs nothing more. How a run ends: see `finish`.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpformer.artifact import publish
from dpformer.artifact.layout import EVENTS
from dpformer.data import Dataset, Sequences, load
from dpformer.files import write_file
from dpformer.fit import statistics_stages as releases
from dpformer.fit.checkpoint import Checkpoints
from dpformer.fit.distributed.ranks import ALONE, Ranks
from dpformer.fit.distributed.restart import take_over
from dpformer.fit.distributed.together import about_run, compare_data, explained_loss, lead
from dpformer.fit.dpsgd import StepReport, Trainer
from dpformer.fit.events import Tracker, Trackers, ended, started, stepped
from dpformer.fit.folder import (
    Begun,
    RunLock,
    begun_values,
    closed_on_error,
    data_of,
    explained,
    hold,
    hold_new,
    make_folder,
    owner_only,
    read_recipe,
    refuse_used,
    reopen,
    save_begun,
)
from dpformer.fit.memory import enough_memory
from dpformer.fit.recipe import Recipe
from dpformer.fit.stated import state_privacy
from dpformer.models import Ensemble, Recommender, TransitionScorer
from dpformer.privacy import (
    Curator,
    Keys,
    PrivacyPlan,
    PrivacyStatement,
)
from dpformer.statistics.histogram import ItemFrequencies

CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever shows it. `report` is not private; `speed` is in users a second."""

    report: StepReport
    plan: PrivacyPlan
    speed: float


class Run:
    """An open run. Make one with `start` or `resume`; `train` until it is done or told to stop."""

    def __init__(
        self,
        folder: Path,
        dataset: Dataset,
        recipe: Recipe,
        trainer: Trainer,
        curator: Curator[Sequences],
        begun: Begun,
        lock: RunLock,
    ) -> None:
        self.folder, self.dataset, self.recipe, self.lock = folder, dataset, recipe, lock
        self.trainer, self.curator, self._begun = trainer, curator, begun
        self.ranks = trainer.ranks
        self.frequencies: ItemFrequencies | None = None
        self.prior: TransitionScorer | None = None
        self.checkpoints = Checkpoints(folder)

    @property
    def plan(self) -> PrivacyPlan:
        """What the run may spend."""
        return self.trainer.plan

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return self.trainer.step

    def train(
        self,
        on_step: Callable[[Progress], None] = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        trackers: Iterable[Tracker] = (),
    ) -> bool:
        """Make the steps that are left. True when the model is released; False if told to stop, with everything saved."""
        self._forget_events()
        told = Trackers(trackers)
        told.on_event(started(self.step, self.plan.steps, self.recipe.settings()))
        with enough_memory(self.folder), explained_loss(self.folder):
            done = self._train(on_step, should_stop, checkpoint_seconds, told)
            self.ranks.tell(done)
            return done

    def _train(
        self,
        on_step: Callable[[Progress], None],
        should_stop: Callable[[], bool],
        checkpoint_seconds: float,
        told: Trackers,
    ) -> bool:
        began = saved = time.monotonic()
        users = 0
        for report in self.trainer.run(self.curator):
            now = time.monotonic()
            event = stepped(report.step, self.trainer.how.rate_at(report.step, self.plan.steps), report.loss)
            with explained(self.folder), open(self.folder / EVENTS, "a", encoding="utf-8", opener=owner_only) as events:
                events.write(json.dumps(event) + "\n")
            told.on_event(event)
            users += report.users
            on_step(Progress(report, self.trainer.plan, users / max(now - began, 1e-9)))
            if self.ranks.agree(should_stop()):
                self.save()
                told.on_event(ended(self.step, released=False))
                return False
            if now - saved > checkpoint_seconds:
                self.save()
                saved = now
        self.release()
        told.on_event(ended(self.step, released=True))
        return True

    def ask(self) -> None:
        """Ask for the statistics that come before the steps: the item histogram and those of the prior."""
        frequencies = releases.histogram(self.curator, self.recipe, self.plan, len(self.dataset.catalogue))
        if frequencies is not None:
            self.use(frequencies)
        self.prior = releases.prior(self.curator, self.recipe, self.trainer, len(self.dataset.catalogue))

    def use(self, frequencies: ItemFrequencies) -> None:
        """Choose the vocabulary by the released histogram, and tell Re-Attention the noise."""
        self.frequencies = frequencies
        released = torch.from_numpy(frequencies.probability).float()
        self.trainer.choose(released, self.recipe.popularity_bias)
        if self.trainer.model.frequencies is not None:
            self.trainer.model.frequencies.copy_(released)
        releases.set_errors(self.trainer.model, self.plan, frequencies, self.recipe)

    def lead(self) -> None:
        """Tell the others all that the coming steps depend on."""
        lead(self.trainer, self.recipe, self._chosen_items())

    def save(self) -> None:
        """A checkpoint of everything that the next steps depend on."""
        self.checkpoints.save(*self._state())

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = self.trainer.state()
        if self.frequencies is not None:
            tensors["frequencies"] = torch.from_numpy(self.frequencies.probability)
            values["floor"] = self.frequencies.floor
        if self.prior is not None:
            tensors |= {f"prior.{name}": value for name, value in self.prior.state_dict().items()}
        values["items"] = self._chosen_items()
        values |= begun_values(self._begun, self.curator.keys, self.curator.ledger)
        return tensors, values

    def _chosen_items(self) -> list[Any] | None:
        """The ids of a private catalogue's items."""
        private = self.dataset.catalogue_mode == "private"
        return self.dataset.catalogue["item_id"].to_list() if private else None

    def _forget_events(self) -> None:
        """Drop events of steps that will be made again, and a torn last line."""
        path = self.folder / EVENTS
        with explained(self.folder):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        write_file(path, b"".join(line for line in lines[: self.trainer.step] if line.endswith(b"\n")), 0o600)

    def release(self) -> None:
        """Write the released model with its statement, and remove the private state."""
        averaging = self.trainer.finish()
        self.trainer.move(torch.device("cpu"))
        model: Recommender = self.trainer.model
        releases.set_errors(self.trainer.model, self.trainer.plan, self.frequencies, self.recipe, averaging)
        if self.prior is not None:
            model = Ensemble.of(self.trainer.model, self.prior, self.recipe.prior_weight)
        publish(self.folder, model, self.dataset.catalogue, self.statement())
        self.close()

    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        return state_privacy(self.curator, self.recipe, self.dataset)

    def close(self) -> None:
        """Let another process open the run."""
        if self.curator.ledger is not None:
            self.curator.ledger.close()
        self.lock.close()


def start(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> Run:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote. Rank 0 calls it, while the others `follow`."""
    refuse_used(folder)
    dataset = load(data)
    compare_data(ranks, dataset, data)
    plan = recipe.plan(len(dataset.sequences), dataset.catalogue_mode == "private")
    lock = hold_new(folder)
    with closed_on_error(lock):
        ledger = make_folder(folder, data, recipe, plan, ranks.job)
        with closed_on_error(ledger), explained(folder):
            ranks.note_run(folder)
            begun = Begun.new(folder, data, recipe.seed)
            keys = Keys(recipe.seed)
            save_begun(folder, begun, keys, ledger)
            run = _begin(
                folder, dataset, recipe, Curator(dataset.train(recipe.hold_out), plan, ledger, keys), begun, lock, ranks
            )
    return run


def resume(folder: Path, data: Path | None = None, ranks: Ranks = ALONE) -> Run:
    """Go on with a run that was interrupted, exactly where an uninterrupted one would be. As `start` among several processes."""
    lock = hold(folder)
    with closed_on_error(lock):
        recipe = read_recipe(folder)
        dataset, ledger, tensors, values = reopen(folder, data)
        with closed_on_error(ledger):
            private = dataset.catalogue_mode == "private"
            plan = ledger.plan if ledger is not None else recipe.plan(len(dataset.sequences), private)
            begun = Begun(**values["begun"])
            torch.set_num_threads(begun.threads)
            compare_data(ranks, dataset, data or data_of(folder))
            take_over(folder, ranks)
            people = dataset.train(recipe.hold_out)
            curator = Curator(people, plan, ledger, Keys.restored(values["keys"]))
            if "step" not in values:  # it was interrupted before its first checkpoint
                return _begin(folder, dataset, recipe, curator, begun, lock, ranks)
            if values["items"] is not None:
                dataset = releases.restrict(curator, dataset, values["items"])
            run = _build(folder, dataset, recipe, curator, begun, lock, ranks)
            released = tensors.pop("frequencies", None)
            prior = {name.removeprefix("prior."): value for name, value in tensors.items() if name.startswith("prior.")}
            if released is not None:  # before the state: what was made of them since is in it
                run.use(ItemFrequencies(released.numpy(), values["floor"]))
            run.trainer.restore(tensors, values)
            if prior:
                run.prior = TransitionScorer.of(prior)
            run.lead()
    return run


def _begin(
    folder: Path,
    dataset: Dataset,
    recipe: Recipe,
    curator: Curator[Sequences],
    begun: Begun,
    lock: RunLock,
    ranks: Ranks,
) -> Run:
    """Ask for all that comes before the steps, and build the model."""
    run = _build(folder, releases.choose_items(curator, dataset), recipe, curator, begun, lock, ranks)
    run.ask()
    run.lead()
    return run


def _build(
    folder: Path,
    dataset: Dataset,
    recipe: Recipe,
    curator: Curator[Sequences],
    begun: Begun,
    lock: RunLock,
    ranks: Ranks,
) -> Run:
    torch.manual_seed(begun.seed)  # initial weights; never the noise
    model = recipe.build(len(dataset.catalogue))
    about = about_run(recipe, len(dataset.catalogue))
    trainer = Trainer(model, curator.plan, recipe.optimisation(), ranks, about)
    return Run(folder, dataset, recipe, trainer, curator, begun, lock)
