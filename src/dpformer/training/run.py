"""A run: from prepared data, a recipe and a budget to a folder with a released model, through any number of interruptions.

    config.json         recipe, catalogue size, versions              items.jsonl       the catalogue
    model.safetensors   the released model                            privacy.json      the privacy statement
    ledger.jsonl        what was charged, before it was seen          events.jsonl      progress; losses are not private
    metrics.json        evaluation; not private                       README.md         the model card
    files.json          SHA-256 of the above that are released    run.lock          keeps a second process out
    private/            state of an unfinished run; owner only, removed at the end
    local.json          where the data was, for this machine; owner only

The order that keeps the ledger honest: the first checkpoint (with the noise to come) is saved before the histogram is released,
so that a crash after the release replays it with the same noise, which is the same release and costs nothing more. The model is
the last file written: a folder that has it has its statement too, and is finished.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dpformer.data import Dataset, PoissonSampler, load
from dpformer.errors import DPFormerError
from dpformer.models.statistics.transitions import DPTransitions
from dpformer.privacy import (
    ItemFrequencies,
    Ledger,
    PrivacyPlan,
    PrivacyStatement,
    TuningPart,
    build_statement,
    noise_source,
)
from dpformer.training import releases
from dpformer.training.checkpoint import Checkpoints
from dpformer.training.files import write_file
from dpformer.training.folder import (
    EVENTS,
    RunLock,
    closed_on_error,
    data_of,
    explained,
    hold,
    hold_new,
    make_folder,
    owner_only,
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
from dpformer.training.together import compare_data, explained_loss, lead
from dpformer.training.trackers import Tracker, Trackers, ended, started, stepped
from dpformer.training.trainer import StepReport, Trainer

CHECKPOINT_SECONDS = 60.0


@dataclass(frozen=True)
class Progress:
    """Where a run stands, for whoever shows it. `report` is not private; `speed` is in users a second."""

    report: StepReport
    plan: PrivacyPlan
    speed: float


class Run:
    """An open run. Make one with `start` or `resume`; `train` until it is done or told to stop."""

    def __init__(self, folder: Path, dataset: Dataset, recipe: Recipe, trainer: Trainer, lock: RunLock):
        self.folder, self.dataset, self.recipe, self.trainer, self.lock = folder, dataset, recipe, trainer, lock
        self.ranks = trainer.ranks
        self.frequencies: ItemFrequencies | None = None
        self.prior: DPTransitions | None = None
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
        with enough_memory(self.folder), explained_loss(self.folder, self.ranks):
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
        for report in self.trainer.run():
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

    def restore(self, tensors: dict[str, torch.Tensor], values: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.trainer.restore(tensors, values)

    def release_histogram(self) -> None:
        """Release the item histogram, if the plan has one."""
        frequencies = releases.histogram(self.trainer, len(self.dataset.catalogue))
        if frequencies is not None:
            self.use(frequencies)

    def use(self, frequencies: ItemFrequencies) -> None:
        """Choose the vocabulary by the released histogram, and tell Re-Attention the noise."""
        self.frequencies = frequencies
        self.trainer.choose(torch.from_numpy(frequencies.probability).float(), self.recipe.popularity_bias)
        releases.set_errors(self.trainer.model, self.plan, frequencies, self.recipe)

    def release_prior(self) -> None:
        """Release the statistics of the prior, if the plan has them; a network that learns from them does so now."""
        self.prior = releases.prior(self.trainer, self.recipe, len(self.dataset.catalogue))

    def lead(self) -> None:
        """Tell the others all that the coming steps depend on."""
        lead(self.trainer, self.recipe)

    def save(self) -> None:
        """A checkpoint of everything that the next steps depend on."""
        self.checkpoints.save(*self._state())

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        tensors, values = self.trainer.state()
        values["threads"] = torch.get_num_threads()  # sums are rounded in another order with more or fewer
        values["ranks"] = self.ranks.size  # and so they are with more or fewer processes
        if self.frequencies is not None:
            tensors["frequencies"] = torch.from_numpy(self.frequencies.probability)
            values["frequencies"] = {"source": self.frequencies.source, "floor": self.frequencies.floor}
        if self.prior is not None:
            tensors |= {f"prior.{name}": value for name, value in self.prior.state().items()}
        if self.trainer.ledger is not None:
            values["ledger"] = place_of(self.trainer.ledger)
        return tensors, values

    def _forget_events(self) -> None:
        """Drop events of steps that will be made again, and a torn last line."""
        path = self.folder / EVENTS
        with explained(self.folder):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        write_file(path, b"".join(line for line in lines[: self.trainer.step] if line.endswith(b"\n")), 0o600)

    def release(self) -> None:
        """Write the released model and its papers, then remove the private state."""
        averaging = self.trainer.finish()
        self.trainer.move(torch.device("cpu"))
        model = self.trainer.model
        releases.set_errors(model, self.trainer.plan, self.frequencies, self.recipe, averaging)
        tensors = {f"model.{name}": value.contiguous() for name, value in self.trainer.model.state_dict().items()}
        if self.frequencies is not None:
            tensors["popularity"] = torch.from_numpy(self.frequencies.probability).float()
        if self.prior is not None:
            tensors |= {f"prior.{name}": value.contiguous() for name, value in self.prior.state().items()}
        write_release(self.folder, self.recipe, self.statement(), len(self.dataset.catalogue), tensors)
        self.checkpoints.remove()
        self.close()

    def statement(self) -> PrivacyStatement:
        """The privacy statement, from what the ledger says was charged."""
        return state_privacy(self.plan, self.trainer.ledger, self.recipe)

    def close(self) -> None:
        """Let another process open the run."""
        if self.trainer.ledger is not None:
            self.trainer.ledger.close()
        self.lock.close()


def start(folder: Path, data: Path, recipe: Recipe, ranks: Ranks = ALONE) -> Run:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote. Rank 0 calls it, while the others `follow`."""
    refuse_used(folder)
    dataset = load(data)
    compare_data(ranks, dataset, data)
    plan = recipe.plan(len(dataset.sequences))
    lock = hold_new(folder)
    with closed_on_error(lock):
        ledger = make_folder(folder, data, dataset, recipe, plan, ranks.job)
        with closed_on_error(ledger), explained(folder):
            ranks.note_run(folder)
            run = _open(folder, dataset, recipe, plan, ledger, lock, ranks)
            run.save()
            run.release_histogram()
            run.release_prior()
            run.lead()
    return run


def state_privacy(plan: PrivacyPlan, ledger: Ledger | None, recipe: Recipe) -> PrivacyStatement:
    """The privacy statement of a run, from what its ledger says was charged."""
    public = ["the catalogue of items"]
    if recipe.model not in STATISTICS:
        public.append(f"the greatest length of a history, {recipe.max_length}")
    return build_statement(
        plan,
        None if ledger is None else ledger.account(),
        "none" if ledger is None else recipe.noise,
        tuple(public),
        TuningPart(kind=recipe.tuning, configurations=recipe.tried),
    )


def resume(folder: Path, data: Path | None = None, ranks: Ranks = ALONE) -> Run:
    """Go on with a run that was interrupted, exactly where an uninterrupted one would be. As `start` among several processes."""
    lock = hold(folder)
    with closed_on_error(lock):
        recipe = read_recipe(folder)
        dataset, ledger, tensors, values = reopen(folder, data)
        plan = ledger.plan if ledger is not None else recipe.plan(len(dataset.sequences))
        torch.set_num_threads(values["threads"])
        with closed_on_error(ledger):
            _refuse_other_ranks(folder, values, ledger, ranks)
            compare_data(ranks, dataset, data or data_of(folder))
            take_over(folder, ranks)
            run = _open(folder, dataset, recipe, plan, ledger, lock, ranks)
            found = tensors.pop("frequencies", None)
            known = {name.removeprefix("prior."): value for name, value in tensors.items() if name.startswith("prior.")}
            if found is not None:  # before the state: what was made of them since is in it
                about = values["frequencies"]
                run.use(ItemFrequencies(found.numpy(), about["source"], about["floor"]))
            run.restore(tensors, values)
            if found is None:
                run.release_histogram()
            if known:
                run.prior = DPTransitions.from_state(known)
            else:
                run.release_prior()
            if values.get("ranks", 1) != ranks.size:
                run.save()  # the checkpoint tells how many processes make the steps after it
            run.lead()
    return run


def _refuse_other_ranks(folder: Path, values: dict[str, Any], ledger: Ledger | None, ranks: Ranks) -> None:
    """Steps that were charged and must be made again are the same bits only among as many processes."""
    known, before = values.get("ledger"), values.get("ranks", 1)
    if values.get("split"):
        raise DPFormerError(
            f"{folder}: was started with --split-items, which was removed; fit again in another folder (what was spent stays in "
            "the ledger)"
        )
    if ledger is None or known is None or before == ranks.size:
        return
    again = [entry for entry in ledger.account().entries[known["entries"] :] if entry.kind == "step"]
    if again:
        how = "dpformer" if before == 1 else f"torchrun with {before} processes in all: torchrun ... -m dpformer"
        raise DPFormerError(
            f"{folder}: {len(again)} steps that were charged after the last checkpoint must be made again by as many processes "
            f"as made them, {before}, and now there are {ranks.size}; go on by {how} resume {folder}. After a stop by Ctrl-C any "
            "number can go on"
        )


def _open(
    folder: Path,
    dataset: Dataset,
    recipe: Recipe,
    plan: PrivacyPlan,
    ledger: Ledger | None,
    lock: RunLock,
    ranks: Ranks,
) -> Run:
    seed = recipe.seed
    torch.manual_seed(secrets.randbits(63) if seed is None else seed)  # initial weights and dropout; never the noise
    model = recipe.build(len(dataset.catalogue))
    sampler = PoissonSampler(plan.users, plan.rate, seed)
    noise = noise_source(recipe.noise, seed) if plan.private else None
    trainer = Trainer(
        model,
        dataset.train(recipe.hold_out),
        plan,
        recipe.optimisation(),
        sampler,
        noise,
        ledger,
        about=recipe.model_dump_json(),
        ranks=ranks,
    )
    return Run(folder, dataset, recipe, trainer, lock)
