"""A run: from prepared data, a recipe and a budget to a folder with a released model, through any number of interruptions.

    config.json         recipe, catalogue size, versions              items.parquet     the catalogue
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

import io
import json
import math
import os
import platform
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl
import torch
from pydantic import ValidationError
from safetensors.torch import save as to_safetensors

from dpformer import __version__
from dpformer.data import Dataset, PoissonSampler, load
from dpformer.data.hashing import sha256_of
from dpformer.errors import DPFormerError
from dpformer.models.base import SequenceModel
from dpformer.models.distilled import distil
from dpformer.models.statistics.transitions import DPTransitions
from dpformer.models.transformer import Transformer
from dpformer.privacy import (
    ItemFrequencies,
    Ledger,
    Position,
    PrivacyPlan,
    PrivacyStatement,
    TuningPart,
    assume_public,
    build_statement,
    create_ledger,
    fingerprint,
    noise_source,
    noisy_histogram,
    open_ledger,
    take_lock,
)
from dpformer.training.card import model_card
from dpformer.training.charged import charged
from dpformer.training.checkpoint import PRIVATE, Checkpoints
from dpformer.training.files import read_json, sha256, write_file, write_json
from dpformer.training.memory import enough_memory
from dpformer.training.recipe import HISTOGRAM, PRIOR, STATISTICS, Recipe
from dpformer.training.sizes import column_hashes
from dpformer.training.trackers import Tracker, Trackers, ended, started, stepped
from dpformer.training.trainer import StepReport, Trainer, digest

CONFIG, MODEL, ITEMS, PRIVACY, EVENTS, CARD = (
    *("config.json", "model.safetensors", "items.parquet", "privacy.json", "events.jsonl", "README.md"),
)
# Where the data was, for `evaluate` on this machine; not part of the model, and without a hash, which would confirm a guess.
LOCAL = "local.json"
# Hashes of what is released, against damage; whoever forges the one forges the other.
FILES = "files.json"
LOCKED = "run.lock"
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
        with enough_memory(self.folder):
            return self._train(on_step, should_stop, checkpoint_seconds, told)

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
            with _explained(self.folder), open(self.folder / EVENTS, "a", encoding="utf-8", opener=_private) as events:
                events.write(json.dumps(event) + "\n")
            told.on_event(event)
            users += report.users
            on_step(Progress(report, self.trainer.plan, users / max(now - began, 1e-9)))
            if should_stop():
                self.save()
                told.on_event(ended(self.step, released=False))
                return False
            if now - saved > checkpoint_seconds:
                self.save()
                saved = now
        self.release()
        told.on_event(ended(self.step, released=True))
        return True

    def save(self) -> None:
        """A checkpoint of everything that the next steps depend on."""
        tensors, values = self.trainer.state()
        values["threads"] = torch.get_num_threads()  # sums are rounded in another order with more or fewer
        if self.frequencies is not None:
            tensors["frequencies"] = torch.from_numpy(self.frequencies.probability)
            values["frequencies"] = {"source": self.frequencies.source, "floor": self.frequencies.floor}
        if self.prior is not None:
            tensors |= {f"prior.{name}": value for name, value in self.prior.state().items()}
        if self.trainer.ledger is not None:
            values["ledger"] = place_of(self.trainer.ledger)
        self.checkpoints.save(tensors, values)

    def _forget_events(self) -> None:
        """Drop events of steps that will be made again, and a torn last line."""
        path = self.folder / EVENTS
        with _explained(self.folder):
            lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        write_file(path, b"".join(line for line in lines[: self.trainer.step] if line.endswith(b"\n")), 0o600)

    def release(self) -> None:
        """Write the released model and its papers, then remove the private state."""
        averaging = self.trainer.finish()
        model = self.trainer.model
        _set_errors(model, self.trainer.plan, self.frequencies, self.recipe, averaging)
        tensors = {f"model.{name}": value.contiguous() for name, value in model.state_dict().items()}
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


class RunLock:
    """A run folder, held against other processes: two of them would mix their settings and their checkpoints."""

    def __init__(self, folder: Path) -> None:
        self._descriptor: int | None = take_lock(folder / LOCKED)

    def close(self) -> None:
        """Let another process open the run."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def start(folder: Path, data: Path, recipe: Recipe) -> Run:
    """Begin a run in a new folder, on data that `dpformer prepare` wrote."""
    refuse_used(folder)
    dataset = load(data)
    plan = recipe.plan(len(dataset.sequences))
    lock = hold_new(folder)
    with closed_on_error(lock):
        ledger = make_folder(folder, data, dataset, recipe, plan)
        with closed_on_error(ledger), _explained(folder):
            run = _open(folder, dataset, recipe, plan, ledger, lock)
            run.save()
            _release_histogram(run)
            _release_prior(run)
    return run


def refuse_used(folder: Path) -> None:
    """A run begins in a new folder."""
    with _explained(folder):
        used = folder.exists() and (not folder.is_dir() or any(path.name != LOCKED for path in folder.iterdir()))
    if used:
        hint = f"continue it with: dpformer resume {folder}, or " if (folder / PRIVATE).is_dir() else ""
        raise DPFormerError(f"{folder}: exists already; {hint}choose another folder with --run")


def hold_new(folder: Path) -> RunLock:
    """Make the folder of a new run and hold it. Of two processes that begin at once, one gets it."""
    with _explained(folder):
        folder.mkdir(parents=True, exist_ok=True)
    lock = RunLock(folder)
    with closed_on_error(lock):
        refuse_used(folder)
    return lock


def hold(folder: Path) -> RunLock:
    """Hold the folder of a run that is there."""
    read_recipe(folder)
    return RunLock(folder)


def make_folder(folder: Path, data: Path, dataset: Dataset, recipe: Recipe, plan: PrivacyPlan) -> Ledger | None:
    """What every run folder has from the start: config, catalogue, ledger, and a private place."""
    config = {
        "format": "dpformer-run",
        "version": 1,
        "dpformer": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "recipe": recipe.settings(),
        "items": len(dataset.catalogue),
    }
    write_json(folder / CONFIG, config)
    items = io.BytesIO()
    dataset.catalogue.write_parquet(items)
    write_file(folder / ITEMS, items.getvalue())
    ledger = create_ledger(folder, plan) if plan.private else None
    with closed_on_error(ledger), _explained(folder):
        Checkpoints(folder).make_folder()
        write_json(folder / LOCAL, {"data": str(data.resolve())}, mode=0o600)
        known = {name: sha256(folder / name) for name in (CONFIG, ITEMS)}
        source = {"path": str(data.resolve()), "sha256": _hash(data), "files": known}
        source |= {"columns": column_hashes(dataset.catalogue)}
        write_json(folder / PRIVATE / "data.json", source, mode=0o600)
    return ledger


def place_of(ledger: Ledger) -> dict[str, Any]:
    """Where a ledger stands, for the checkpoint that is to go on with it."""
    position = ledger.position()
    return {"run_id": ledger.run_id, "entries": position.entries, "hash": position.hash}


def write_release(
    folder: Path, recipe: Recipe, statement: PrivacyStatement, items: int, tensors: dict[str, torch.Tensor]
) -> None:
    """The released model and its papers; the model last, so that a folder with a model is whole."""
    write_file(folder / PRIVACY, statement.to_json().encode())
    write_file(folder / CARD, model_card(recipe, statement, items).encode())
    model = to_safetensors(tensors)
    known: dict[str, Any] = {name: sha256(folder / name) for name in (CONFIG, PRIVACY)}
    known |= {MODEL: sha256(model), ITEMS: _read_source(folder)["columns"]}
    write_json(folder / FILES, known)
    write_file(folder / MODEL, model)


def check_files(folder: Path) -> dict[str, Any]:
    """A finished run's files must be those that were released: a flipped bit in a model or a statement is not used.

    Gives the hashes of the catalogue's columns, for whoever reads it: `check_catalogue`.
    """
    known = read_json(folder / FILES)
    if not isinstance(known, dict) or not {CONFIG, PRIVACY, MODEL} <= known.keys() or not _is_table(known.get(ITEMS)):
        raise DPFormerError(f"{folder / FILES}: is damaged; copy the released folder again")
    columns: dict[str, Any] = known.pop(ITEMS)
    _compare(folder, known, "copy the released folder again")
    return columns


def check_catalogue(path: Path, catalogue: pl.DataFrame, known: dict[str, Any]) -> None:
    """Ids and titles must be those that were released."""
    found = column_hashes(catalogue)
    for name, expected in known.items():
        if found.get(name) != expected:
            raise DPFormerError(f"{path}: column {name!r} is damaged or was changed; copy the released folder again")


def _is_table(value: object) -> bool:
    return isinstance(value, dict) and "item_id" in value


def _compare(folder: Path, known: dict[str, Any], cure: str) -> None:
    for name, expected in known.items():
        if name in (CONFIG, ITEMS, PRIVACY, MODEL) and sha256(folder / name) != expected:
            raise DPFormerError(f"{folder / name}: is damaged or was changed (sha256 differs); {cure}")


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


def resume(folder: Path, data: Path | None = None) -> Run:
    """Go on with a run that was interrupted, exactly where an uninterrupted one would be."""
    lock = hold(folder)
    with closed_on_error(lock):
        recipe = read_recipe(folder)
        dataset, ledger, tensors, values = reopen(folder, data)
        plan = ledger.plan if ledger is not None else recipe.plan(len(dataset.sequences))
        torch.set_num_threads(values["threads"])
        with closed_on_error(ledger):
            run = _open(folder, dataset, recipe, plan, ledger, lock)
            found = tensors.pop("frequencies", None)
            known = {name.removeprefix("prior."): value for name, value in tensors.items() if name.startswith("prior.")}
            if found is not None:  # before the state: what was made of them since is in it
                about = values["frequencies"]
                _use(run, ItemFrequencies(found.numpy(), about["source"], about["floor"]))
            run.trainer.restore(tensors, values)
            if found is None:
                _release_histogram(run)
            if known:
                run.prior = DPTransitions.from_state(known)
            else:
                _release_prior(run)
    return run


def reopen(
    folder: Path, data: Path | None = None
) -> tuple[Dataset, Ledger | None, dict[str, torch.Tensor], dict[str, Any]]:
    """What an unfinished run left: its data, its ledger, and the tensors and values of its last checkpoint."""
    checkpoints = Checkpoints(folder)
    if (folder / MODEL).exists():
        checkpoints.remove()  # a crash may have come between the two
        raise DPFormerError(f"{folder}: is finished; its model is released")
    tensors, values = checkpoints.load()
    source = _read_source(folder)
    _compare(folder, source["files"], "put back the file that the run began with, or fit again in another folder")
    data = data or Path(source["path"])
    dataset = load(data)
    if _hash(data) != source["sha256"]:
        raise DPFormerError(f"{data}: is not the data that the run began with; give that with --data")
    known = values.get("ledger")
    ledger = None
    if known is not None:
        ledger = open_ledger(folder, Position(known["entries"], known["hash"]), known["run_id"])
    return dataset, ledger, tensors, values


def _read_source(folder: Path) -> dict[str, Any]:
    path = folder / PRIVATE / "data.json"
    source = read_json(path)
    kinds = {"path": str, "sha256": str, "files": dict, "columns": dict}
    if not isinstance(source, dict) or any(not isinstance(source.get(key), kind) for key, kind in kinds.items()):
        raise DPFormerError(f"{path}: is damaged; fit again in another folder (what was spent stays in the ledger)")
    return source


def read_recipe(folder: Path) -> Recipe:
    """The recipe of a run."""
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict) or config.get("format") != "dpformer-run":
        raise DPFormerError(f"{folder}: is not a run folder")
    try:
        return Recipe.model_validate(config["recipe"])
    except (KeyError, ValidationError) as error:
        reason = " ".join(str(error).split())[:200]
        raise DPFormerError(f"{folder / CONFIG}: is damaged or of another version ({reason})") from None


def _open(
    folder: Path, dataset: Dataset, recipe: Recipe, plan: PrivacyPlan, ledger: Ledger | None, lock: RunLock
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
    )
    return Run(folder, dataset, recipe, trainer, lock)


def _release_histogram(run: Run) -> None:
    """Release the item histogram, if the plan has one; a replay from the first checkpoint gives the same."""
    trainer, plan, items = run.trainer, run.trainer.plan, len(run.dataset.catalogue)
    release = next((r for r in plan.releases if r.name == HISTOGRAM), None)
    if release is None:
        return
    train = trainer.train
    if not plan.private:
        _use(run, assume_public(train.items, train.offsets, items, floor=1 / plan.users))
        return
    assert trainer.noise is not None
    assert trainer.ledger is not None
    noise = trainer.noise.state()
    # With the noise: the ledger is published, and a bare hash of the data would confirm a guess of it.
    inputs = fingerprint(noise, HISTOGRAM, digest(train.items, train.offsets))
    trainer.ledger.authorise_release(HISTOGRAM, fingerprint(noise), inputs)
    _use(run, noisy_histogram(train.items, train.offsets, items, release, trainer.noise, plan.users))


def _release_prior(run: Run) -> None:
    """Release the statistics of the prior, if the plan has them; a replay from the first checkpoint gives the same."""
    trainer, train = run.trainer, run.trainer.train
    releases = [r for r in trainer.plan.releases if r.name.startswith(PRIOR)]
    if not releases:
        return
    assert trainer.noise is not None
    assert trainer.ledger is not None
    prior = DPTransitions()
    share = prior.shares[releases[0].name.removeprefix(PRIOR)]
    about = fingerprint(run.recipe.model_dump_json(), digest(train.items, train.offsets))
    run.prior = prior.fit(
        train.items,
        train.offsets,
        len(run.dataset.catalogue),
        noise_multiplier=releases[0].noise_multiplier * math.sqrt(share),
        gaussian=charged(releases, trainer.ledger, trainer.noise, about),
    )
    if run.recipe.distil:
        distil(trainer.model, prior, run.recipe.distil)
        trainer.know_vocabulary()


def _use(run: Run, frequencies: ItemFrequencies) -> None:
    run.frequencies = frequencies
    run.trainer.choose(torch.from_numpy(frequencies.probability).float(), run.recipe.popularity_bias)
    _set_errors(run.trainer.model, run.trainer.plan, frequencies, run.recipe)


def _set_errors(
    model: SequenceModel, plan: PrivacyPlan, frequencies: ItemFrequencies | None, recipe: Recipe, averaging: float = 1.0
) -> None:
    """Tell Re-Attention the noise. Positions are counted as if all sequences were of the greatest length: lengths are private."""
    if isinstance(model, Transformer) and model.reattention is not None and frequencies is not None and plan.private:
        p = torch.from_numpy(frequencies.probability).float()
        model.set_errors(plan.noise_multiplier, plan.batch_size, p, torch.ones(recipe.max_length), averaging)


@contextmanager
def closed_on_error(held: Ledger | RunLock | None) -> Iterator[None]:
    """Let go of a lock if what follows fails."""
    try:
        yield
    except BaseException:
        if held is not None:
            held.close()
        raise


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn what the file system refuses into one line."""
    try:
        yield
    except OSError as error:
        raise DPFormerError(
            f"{folder}: cannot be written ({error.strerror}); what was saved before is untouched"
        ) from None


def _private(path: str, flags: int) -> int:
    """Opens a file that carries no noise: for its owner only."""
    return os.open(path, flags, 0o600)


def _hash(data: Path) -> str:
    return sha256_of([data / "sequences.parquet"])
