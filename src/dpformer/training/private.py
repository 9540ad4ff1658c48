"""The loop of DP-SGD around a model, an optimiser and a data set of the caller's.

    G = (1 / B) (sum_i c_i g_i + sigma C N(0, I))        B the *expected* batch size, a public constant

A batch that is handed to the loop is private data in its owner's hands, as the data set is. What the guarantee rests on is that
the model changes by answers of the Curator alone: the people of a step are the Curator's draw, each batch of them is added once,
the Curator answers for exactly these, and weights or learning rates that change in any other way are refused before a charge.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from dpformer.clipping import PhantomClipping
from dpformer.errors import DPFormerError, PrivacyError
from dpformer.privacy import Curator, Keys, PrivacyPlan, PrivacyStatement, make_plan
from dpformer.privacy.account import PeopleAccount
from dpformer.privacy.build import Circumstances
from dpformer.privacy.plan import declared_users, steps_of
from dpformer.privacy.statement import DataPart
from dpformer.training.clipped_sum import Losses, Report, trainable
from dpformer.training.following import FollowingRun
from dpformer.training.groups import OWN_MODEL, Groups, slack_in_words
from dpformer.training.module_sum import ModuleSum
from dpformer.training.people import ONE_ENTRY_EACH, Loader, group_people
from dpformer.training.ranks import Membership
from dpformer.training.run import MakeCurator, TrainingRun
from dpformer.training.watch import Movement, Watch, refuse_length, refuse_unsuited

CHECKPOINT_SECONDS = 60.0


class PrivateTraining:
    """Trains a model of any kind with differential privacy for each person of a data set.

        private = PrivateTraining(model, optimizer, dataset, epsilon=8, delta=1e-5, batch_size=512, epochs=3, run="runs/a")
        for batch in private:
            private.step(lambda: loss_per_sample(model, batch))  # one loss for each person of the batch
        print(private.statement.text())

    Guarantee: after the loop, model and run folder (but for private/, which is removed) are (epsilon, delta)-DP between
    neighbours: the number of people stays, and one person's records are replaced by none; if the loss of a person is a function
    of that person and the parameters alone. `step` clips; after the last micro-batch of a draw it asks the Curator for the sum,
    divides by the expected batch size and lets the optimiser step. A draw without people is a step of noise alone.

    Args:
        model: in float32. The optimiser has its trainable parameters, and steps when this object lets it.
        dataset: with `len` and indices; an entry for each person, or records with `person`.
        epsilon: the budget of the run, with `delta`. inf trains without clipping and noise, and says so.
        batch_size: people expected in a step.
        epochs: how long; or give `steps`.
        run: the folder of ledger, checkpoints and results. The same program goes on where it was interrupted.
        account: the folder of an account of people, charged with the whole plan before anything is asked.
        max_norm: of a person's gradient; by default each is scaled to about 1 (automatic clipping).
        micro_batch: people at a time; lower it when memory runs out.
        collate_fn: as of torch's DataLoader, and so is `num_workers`. Padding to the longest person of a batch is refused.
        person: what groups records into people: a column, a function of a record, or one id for each record.
        records_per_person: the greatest number that a person may bring; later ones are left out.
        combine: makes one sample of a person's records (`random.choice` takes one of them in each step); else a list.
        population: a declared number of people, of which the data set may have fewer: its own is then not assumed public.
        scheduler: of the learning rate; steps after the optimiser.
        average: a `torch.optim.swa_utils.AveragedModel`, updated after each step.
        seed: research only; the noise can be subtracted.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Any,
        *,
        epsilon: float,
        delta: float,
        batch_size: int,
        run: Path | str,
        epochs: float | None = None,
        steps: int | None = None,
        account: Path | str | None = None,
        max_norm: float | None = None,
        micro_batch: int = 32,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        num_workers: int = 0,
        person: str | Callable[[Any], Any] | Sequence[Any] | None = None,
        records_per_person: int | None = None,
        combine: Callable[[list[Any]], Any] | None = None,
        population: int | None = None,
        scheduler: LRScheduler | None = None,
        average: AveragedModel | None = None,
        checkpoint_seconds: float = CHECKPOINT_SECONDS,
        seed: int | None = None,
        make_curator: MakeCurator = Curator,
    ) -> None:
        refuse_unsuited(model, optimizer, scheduler)
        refuse_length(epochs, steps, micro_batch)
        if account is not None and math.isinf(epsilon):
            raise PrivacyError("epsilon inf has no bound that an account could be charged with; leave account= out")
        self.model, self.optimizer, self.scheduler, self.average = model, optimizer, scheduler, average
        people = group_people(dataset, person, records_per_person, combine, collate_fn is not None)
        users = declared_users(len(people), population)
        steps = steps_of(epochs, users, batch_size) if epochs is not None else steps
        settings = {
            **{"epsilon": str(float(epsilon)), "delta": delta, "batch_size": batch_size, "steps": steps},
            **{"population": population, "records_per_person": records_per_person},
            **{"max_norm": max_norm, "optimizer": type(optimizer).__name__, "account": account is not None},
            "parameters": {name: list(p.shape) for name, p in trainable(model)},
        }
        self._watch = Watch(model, optimizer)
        kept = {"optimizer": optimizer, "scheduler": scheduler, "average": average}
        kept = {name: part for name, part in kept.items() if part is not None}
        sizes = {"people": len(people), "records": len(dataset)}
        charged = None if account is None else PeopleAccount(account)
        new_plan = partial(make_plan, users, epsilon, delta, batch_size, steps=steps, declared=population is not None)
        self._membership = Membership()
        with self._membership.exchange() as ranks:
            kind = TrainingRun if ranks.first else FollowingRun
            self._run = kind(Path(run), settings, model, kept, micro_batch, sizes, charged, ranks)
            self.plan: PrivacyPlan = self._run.open(people, new_plan, partial(Keys, seed), make_curator)
        self._watch.note()
        self._loader = Loader(people, collate_fn, num_workers)
        self._about = (records_per_person, person is not None)
        self._checkpoint_seconds, self._saved = checkpoint_seconds, time.monotonic()
        # loop: which one is running, batches of an earlier one are refused; waiting: `step` was not called for a batch
        self._loop, self._steps_here, self._waiting, self._stepping, self._torn = 0, 0, False, False, False
        clipping = PhantomClipping(model, max_norm or 1.0, "flat" if max_norm else "automatic")
        groups = Groups.of(self.plan.users, self.plan.rate, self.plan.declared)
        self._query = ModuleSum(model, clipping if self.plan.private else None, groups, micro_batch, ranks)
        self._hook = optimizer.register_step_pre_hook(self._check_step)

    @property
    def run(self) -> Path:
        """The run folder."""
        return self._run.path

    @property
    def steps_made(self) -> int:
        """Steps of the plan that have been made."""
        return self._run.steps_made

    @property
    def movement(self) -> Movement | None:
        """How far the weights have moved, when the last step is made."""
        return self._run.movement

    @property
    def report(self) -> Report:
        """People, summed loss and non-finite gradients of the draw at hand. Computed without noise: not for publication."""
        return self._query.report

    @property
    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        return self._run.statement(self._circumstances())

    def _circumstances(self) -> Circumstances:
        (most, grouped), public = self._about, self._run.public_steps
        trained_on = f"at most {most} records of each person" if most else "all records"
        return Circumstances(
            data=DataPart(catalogue="none", trained_on=trained_on),
            assumed_public=(f"the data of {public} steps declared public, which were not charged",) if public else (),
            assumptions=(slack_in_words(self._query.groups, OWN_MODEL), *(() if grouped else (ONE_ENTRY_EACH,))),
        )

    def __iter__(self) -> Iterator[Any]:
        """The batches of the steps that are left, as micro-batches; call `step` once for each."""
        self._loop += 1
        mine, self._waiting = self._loop, False
        try:
            while self._run.is_open:
                with self._membership.exchange():
                    parts, key = self._run.start(self._query)
                if not self._run.ranks.first:
                    self._watch.note()  # the weights are rank 0's
                if not parts:
                    self._make_step()
                    continue
                for batch in self._loader.batches(parts, key):
                    self._waiting = True
                    yield batch
                    if self._loop != mine:
                        raise PrivacyError("another loop over this object has begun; go on with that one")
                    if self._waiting:
                        raise PrivacyError(
                            "step was not called for the last batch: leaving people out by what their data is breaks the "
                            "guarantee. Call private.step(lambda: losses) once for each batch, and no backward(); a loss may be 0"
                        )
        finally:
            if self._loop == mine:
                with suppress(DPFormerError):  # an error that ended the loop is the one to show
                    self._save_if_open()

    def step(self, compute_losses: Losses) -> bool:
        """Add the clipped gradients of the batch at hand. True if it was the last of a draw, and the optimiser has stepped.

        compute_losses: returns one loss for each person of the batch, `[people]`.
        """
        self._check_open()
        if not callable(compute_losses):
            raise PrivacyError("step takes a function that computes the losses: private.step(lambda: losses)")
        if not self._waiting:
            raise PrivacyError("there is no batch to step for: call step once for each batch of `for batch in private`")
        self._query.add(compute_losses)
        self._waiting = False
        if self._query.missing:
            return False
        self._make_step()
        return True

    def public_step(self, compute_loss: Callable[[], Tensor]) -> None:
        """A step on data that is public: neither clipped nor charged, and named in the statement. Between two steps only."""
        self._check_open()
        if self._query.missing:
            raise PrivacyError("a step is not finished: make public steps after `step` has returned True")
        self._watch.check()
        compute_loss().backward()
        self._update()
        self._watch.note()
        self._run.public_steps += 1
        self.save()  # the same public batches need not come again, so this step cannot be made again

    def _make_step(self) -> None:
        """Ask for the sum that is complete, and step."""
        self._watch.check()
        self._steps_here += 1
        # Another rank may never have a batch.
        if self._run.ranks.first and self._query.clipping is not None and 10 * self._steps_here >= self.plan.steps:
            self._query.clipping.check_used()
        self._torn = True
        with self._membership.exchange():
            made = self._run.gradients(self._query, self.plan.batch_size)
        for (_, p), gradient in zip(trainable(self.model), made, strict=True):
            p.grad = gradient
        self._update()
        self._run.steps_made += 1
        if self.scheduler is not None:
            self.scheduler.step()
        if self.average is not None:
            self.average.update_parameters(self.model)
        self._watch.note()
        self._torn = False
        if self.steps_made == self.plan.steps:
            with self._membership.exchange():
                self._run.finish(self._circumstances())
            self._membership.leave()
        elif time.monotonic() - self._saved >= self._checkpoint_seconds:
            self.save()

    def _update(self) -> None:
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
        for _, p in trainable(self.model):
            p.grad = None

    def _check_step(self, *_: object) -> None:
        if not self._stepping:
            left = "private.step makes its steps" if self._run.is_open else "all steps of the plan are made"
            raise PrivacyError(
                f"optimizer.step() was called outside of PrivateTraining: {left}. Leave it out; close() gives the optimiser back"
            )

    def _check_open(self) -> None:
        if not self._run.is_open:
            raise PrivacyError(
                f"all {self.plan.steps} steps of the plan are made, or this object was closed; more need a run of their own"
            )
        if self._torn:
            raise PrivacyError("the last step was interrupted; start the program again: it goes on from its checkpoint")

    def save(self) -> None:
        """Save a checkpoint of the last whole step; refused if the weights are not that step's."""
        self._check_open()
        self._watch.check()
        self._run.save()
        self._saved = time.monotonic()

    def _save_if_open(self) -> None:
        if self._run.is_open and not self._torn:
            self.save()

    def close(self) -> None:
        """Save, let another process go on with the run, and let the optimiser step by itself again."""
        try:
            self._save_if_open()
        finally:
            self._run.close()
            self._membership.leave()
            self._hook.remove()
