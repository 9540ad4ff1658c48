"""A run: from prepared data and a recipe to a folder with a released model, through any number of interruptions.

`artifact.layout` has the files of the folder, `artifact.write` the end of a run. The first checkpoint, with the keys of the noise
to come, is saved before the first answer: a run that is interrupted before its steps asks again from there, and with the same
keys gets the same answers, which cost nothing more. During the steps there is a checkpoint every minute.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import torch

from dpformer.artifact import publish
from dpformer.artifact.layout import ANSWERS, EVENTS
from dpformer.data import Dataset, Sequences, load
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.fit.dpsgd import Optimisation, Trainer, network_for_steps
from dpformer.fit.folder import (
    Begun,
    account_of,
    begin,
    data_of,
    drop_events,
    enough_memory,
    explained,
    finish_written,
    hold,
    hold_new,
    owner_only,
    read_recipe,
    refuse_used,
    reopen,
)
from dpformer.fit.lead_and_follow import compare_data, explained_rank_error, lead
from dpformer.fit.prior import read_prior, write_prior
from dpformer.fit.recipe import Recipe
from dpformer.fit.stage import Outputs, Progress, Setup, item_features
from dpformer.fit.stated import circumstances
from dpformer.fit.statistics_stages import choose_items, restrict, run_stages
from dpformer.fit.trackers import Tracker, Trackers
from dpformer.models import Network, build, parse_spec
from dpformer.privacy import Curator, Keys, PrivacyPlan, PrivacyStatement
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.replay import AnswerFiles
from dpformer.privacy.statement import TuningPart
from dpformer.statistics.prior import Prior
from dpformer.training.folder import RunFolder, state_privacy
from dpformer.training.ranks import SINGLE, Ranks

CHECKPOINT_SECONDS = 60.0
OnProgress = Callable[[Progress], None]


class Run:
    """An open run. Make one with `start` or `resume`; `train` until the model is released or it is stopped."""

    def __init__(
        self, dataset: Dataset, recipe: Recipe, curator: Curator[Sequences], begun: Begun, held: RunFolder
    ) -> None:
        self.folder, self.dataset, self.recipe, self.curator = held.path, dataset, recipe, curator
        self.ranks: Ranks = SINGLE
        self.outputs = Outputs()
        self._begun, self._held = begun, held
        curator.keep = AnswerFiles(self.folder / ANSWERS, begun.seed, begun.threads).keep
        self._account = held.spending(account_of(self.folder))
        self._trainer: Trainer | None = None
        self._asked = False

    @property
    def plan(self) -> PrivacyPlan:
        """What the run may spend."""
        return self.curator.plan

    @property
    def step(self) -> int:
        """How many steps have been made."""
        return 0 if self._trainer is None else self._trainer.step

    @property
    def trainer(self) -> Trainer:
        """What makes the steps; `begin_steps` makes it."""
        if self._trainer is None:
            raise DPFormerError(f"{self.folder}: the steps have not begun; call begin_steps first")
        return self._trainer

    def train(
        self,
        on_progress: OnProgress = lambda progress: None,
        should_stop: Callable[[], bool] = lambda: False,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        trackers: Iterable[Tracker] = (),
    ) -> bool:
        """Do the work that is left. True when the model is released; False if it was stopped, with everything saved.

        A run that was stopped before its steps is closed and resumed, not trained again.
        """
        drop_events(self.folder, self.step, self.recipe.steps_on_data)
        listeners = Trackers(trackers)
        recipe = self.recipe.settings()
        about = {"recipe": recipe, "budget": {name: recipe[name] for name in ("epsilon", "delta")}}
        listeners.on_event({"event": "start", "step": self.step, "steps": self.plan.steps, **about})
        with enough_memory(self.folder), explained_rank_error(self.folder):
            done = self._train(on_progress, should_stop, checkpoint_seconds, listeners)
            self.ranks.broadcast({"released": done})
        listeners.on_event({"event": "end", "step": self.step, "released": done})
        return done

    def _train(
        self, on_progress: OnProgress, should_stop: Callable[[], bool], checkpoint_seconds: float, listeners: Trackers
    ) -> bool:
        saved = time.monotonic()
        for progress in itertools.chain(self._before_steps(), self._steps(listeners)):
            on_progress(progress)
            if progress.report is None:
                part = {"stage": progress.stage, "done": progress.done, "total": progress.total}
                listeners.on_event({"event": "stage", **part})
            stop = should_stop() or (progress.report is not None and progress.report.stop)
            # Before the first step there is nothing to save but what `start` saved.
            if progress.report is not None and (stop or time.monotonic() - saved > checkpoint_seconds):
                self.save()
                saved = time.monotonic()
            if stop:
                return False
        self.release()
        return True

    def begin_steps(self) -> Trainer:
        """Run the stages before the steps, and make the trainer; `train` continues from there."""
        for _ in self._before_steps():
            pass
        return self.trainer

    def _before_steps(self) -> Iterator[Progress]:
        """The histogram, the transitions, the distilled network; then the trainer. Nothing if the steps have begun."""
        if self._trainer is not None:
            return
        if self._asked:
            raise DPFormerError(
                f"{self.folder}: was stopped before its steps; close it, then: dpformer resume {self.folder}"
            )
        self._asked = True
        self.dataset = choose_items(self.curator, self.dataset)
        self.outputs = yield from run_stages(self._setup(), self.curator)
        if self.recipe.steps_on_data:
            self._make_trainer(network_for_steps(self._setup(), self.outputs))
            self._lead()

    def _setup(self) -> Setup:
        catalogue, prior = self.dataset.catalogue, read_prior(self.folder)
        features = item_features(self.dataset.features, catalogue)
        return Setup(self.recipe, self.plan, len(catalogue), self._begun.seed, prior, features)

    def _make_trainer(self, network: Network) -> Trainer:
        self._trainer = Trainer(network, self.plan, Optimisation.of(self.recipe))
        self.outputs = replace(self.outputs, network=network)
        return self._trainer

    def _lead(self) -> None:
        """Send the other processes all that the coming steps depend on."""
        lead(self.trainer, self.ranks, self.recipe, self._chosen_items())

    def _steps(self, listeners: Trackers) -> Iterator[Progress]:
        if self._trainer is None:
            return
        began, users = time.monotonic(), 0
        how, total = self._trainer.how, self.plan.steps
        for report in self._trainer.run(self.curator):
            step = self._trainer.step
            figures = {"learning_rate": how.rate_at(step, total), "loss": report.mean_loss}
            event = {"event": "step", "step": step, **figures, "not_private": ["loss"]}
            with explained(self.folder), open(self.folder / EVENTS, "a", encoding="utf-8", opener=owner_only) as events:
                events.write(json.dumps(event) + "\n")
            listeners.on_event(event)
            users += report.users
            speed = users / max(time.monotonic() - began, 1e-9)
            yield Progress("dpsgd", step, total, self.plan, report, speed)

    def save(self) -> None:
        """Save a checkpoint of everything that the next steps depend on."""
        tensors, values = self.trainer.state()
        values["network"] = self.trainer.model.spec.model_dump(mode="json")
        values |= {"items": self._chosen_items(), "begun": asdict(self._begun)}
        before, about = self.outputs.state()
        self._held.save(self.curator.keys, tensors | before, values | about)

    def restore(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Continue from a checkpoint that `save` wrote, during the steps."""
        if values["items"] is not None:
            self.dataset = restrict(self.curator, self.dataset, values["items"])
        self.outputs = Outputs.of_state(tensors, values)
        network = cast(Network, build(parse_spec(values["network"])))
        self._make_trainer(network).restore(tensors, values)
        self._lead()

    def _chosen_items(self) -> list[Any] | None:
        """The ids of a private catalogue's items."""
        private = self.dataset.catalogue_mode == "private"
        return self.dataset.catalogue["item_id"].to_list() if private else None

    def release(self) -> None:
        """Write the released model with its statement, and remove the private state."""
        if self._trainer is not None:
            self._trainer.move(torch.device("cpu"))
        model = self.outputs.recommender(self.recipe)
        publish(self.folder, model, self.dataset.catalogue, self.statement())
        self.close()

    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        about = circumstances(self.plan, self.recipe, self.dataset, read_prior(self.folder))
        return state_privacy(self.curator, about, TuningPart(**self.recipe.tuning.model_dump()), self._account)

    def close(self) -> None:
        """Let another process open the run."""
        self._held.close()


MakeCurator = Callable[..., Curator[Sequences]]


def start(
    folder: Path,
    data: Path,
    recipe: Recipe,
    ranks: Ranks = SINGLE,
    make_curator: MakeCurator = Curator,
    account: PeopleAccount | None = None,
    prior: Prior | None = None,
) -> Run:
    """Start a run in a new folder, on data that `dpformer prepare` wrote.

    Of several processes rank 0 calls it, while the others `follow`; without steps they are not needed.
    make_curator: for tests that plant a defect. account: of the people, charged with the whole plan before anything is asked.
    prior: of earlier runs, charged to the same account.
    """
    with explained_rank_error(folder):
        refuse_used(folder)
        if prior is not None and account is None:
            raise PrivacyError("a prior of earlier runs needs the account of people that they were charged to; give it")
        dataset = load(data)
        item_features(dataset.features, dataset.catalogue)  # an error here costs nothing
        ranks = ranks if recipe.steps_on_data else ranks.release_others()
        compare_data(ranks, dataset, data)
        plan = recipe.plan(len(dataset.sequences), dataset.catalogue_mode == "private")
        held = hold_new(folder)
        with held.closed_on_error(), explained(folder):
            begin(held, data, recipe, plan, dataset.log, account)
            if prior is not None:
                write_prior(folder, prior)
            begun, keys = Begun.new(folder, data, recipe.seed), Keys(recipe.seed)
            # Before anything is asked: an interrupted run asks again with the same keys.
            held.save(keys, {}, {"begun": asdict(begun)})
            curator = make_curator(dataset.train(recipe.hold_out), plan, held.ledger, keys)
            run = Run(dataset, recipe, curator, begun, held)
        run.ranks = ranks
        return run


def resume(folder: Path, data: Path | None = None, ranks: Ranks = SINGLE, make_curator: MakeCurator = Curator) -> Run:
    """Resume a run that was interrupted, exactly where an uninterrupted one would be. Several processes: see `start`."""
    with explained_rank_error(folder):
        recipe = read_recipe(folder)
        if finish_written(folder):
            raise DPFormerError(f"{folder}: is finished; its model is released")
        ranks = ranks if recipe.steps_on_data else ranks.release_others()
        held = hold(folder)
        with held.closed_on_error():
            dataset, keys, tensors, values = reopen(held, data)
            private = dataset.catalogue_mode == "private"
            plan = held.ledger.plan if held.ledger is not None else recipe.plan(len(dataset.sequences), private)
            begun = Begun(**values["begun"])
            torch.set_num_threads(begun.threads)
            compare_data(ranks, dataset, data or data_of(folder))
            curator = make_curator(dataset.train(recipe.hold_out), plan, held.ledger, keys)
            run = Run(dataset, recipe, curator, begun, held)
            run.ranks = ranks
            if "step" in values:  # else it was interrupted before its steps
                run.restore(tensors, values)
        return run
