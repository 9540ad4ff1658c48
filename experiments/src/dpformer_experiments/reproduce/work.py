"""The work on one cell: train or resume, evaluate, return its record (a line of `runs.Runs`).

FOLDER/run/             the run folder, for cells that have one
FOLDER/progress.json    seconds used so far and steps made, for estimates
FOLDER/iterates.jsonl   figures of iterates, if the cell has `every`; not private
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from dpformer import __version__
from dpformer.artifact import load as load_artifact
from dpformer.artifact import read_statement
from dpformer.artifact.layout import MODEL, PRIVACY, PRIVATE
from dpformer.data import Dataset, collate, load
from dpformer.evaluation import Scorer, evaluate, held_out
from dpformer.files import read_json, sha256, write_json
from dpformer.fit.folder import finish_written, read_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import Run, resume, start
from dpformer.fit.scorers import count_events
from dpformer.fit.stage import Progress
from dpformer.models import Ensemble, Recommender
from dpformer.models.transformer import Transformer
from dpformer.privacy import Curator
from dpformer.report.attention_plot import attention_shift
from dpformer_experiments import noisy_attention
from dpformer_experiments.curators import curator_by_place
from dpformer_experiments.optimisers import exchange
from dpformer_experiments.reproduce.cells import FREE, Cell
from dpformer_experiments.reproduce.data_sets import fingerprint
from dpformer_experiments.reproduce.runs import append_line, read_lines

PROGRESS, ITERATES, METRICS = "progress.json", "iterates.jsonl", "metrics.json"
ITEMS = ("validation", "test")
_NOTE_SECONDS = 20.0

ShouldStop = Callable[[], bool]
OnStep = Callable[[int, int], None]  # step, steps
Done = dict[str, Any]


def do(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """Start or resume a cell and finish it; None if it was stopped, with everything saved."""
    from dpformer_experiments.reproduce.tuned import tuned_transitions

    work = {
        "recipe": train,
        "popularity": popularity,
        "tuned transitions": tuned_transitions,
    }[cell.work]
    folder.mkdir(parents=True, exist_ok=True)
    clock = Clock(folder)

    def note(step: int, steps: int) -> None:
        clock.note(step, steps)
        on_step(step, steps)

    figures = work(cell, data, folder, should_stop, note)
    if figures is None:
        clock.save()
        return None
    print_of_data = fingerprint(load(data))
    return {
        "key": cell.key(print_of_data),
        "dataset": cell.dataset,
        "method": cell.method,
        "epsilon": _plain(cell.epsilon),
        "delta": cell.delta,
        "seed": cell.seed,
        "settings": cell.settings(),
        "defaults": cell.defaults(),
        "dpformer": __version__,
        "data": print_of_data,
        "core_seconds": round(clock.core_seconds, 1),
        **figures,
    }


class Clock:
    """The time of a cell over all sessions, and its progress. Time is processor time, which does not depend on the load of the
    machine.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        progress = read_json(self._path) if self._path.exists() else {"core_seconds": 0.0, "step": 0, "steps": 0}
        self._before, self._started = progress["core_seconds"], time.process_time()
        self._noted, self._place = time.monotonic(), (progress["step"], progress["steps"])

    @property
    def core_seconds(self) -> float:
        """Processor seconds so far."""
        return self._before + time.process_time() - self._started

    def note(self, step: int, steps: int) -> None:
        """Record the progress; it is written every 20 seconds."""
        self._place = (step, steps)
        if time.monotonic() - self._noted > _NOTE_SECONDS:
            self._noted = time.monotonic()
            self.save()

    def save(self) -> None:
        """Write time and progress."""
        step, steps = self._place
        write_json(self._path, {"core_seconds": self.core_seconds, "step": step, "steps": steps})


def train(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """Start or resume a run, and evaluate its published model."""
    place = folder / "run"
    finish_written(place)
    if (place / MODEL).exists() and not _same(read_recipe(place), cell.recipe):
        shutil.rmtree(place)  # it has other settings
    if not (place / MODEL).exists():
        run = _opened(cell, data, place)
        iterates = Iterates(cell, run, folder / ITERATES)

        def on_progress(progress: Progress) -> None:
            if progress.report is not None:  # a step; after an interruption the other stages start again
                iterates.look(progress)
                on_step(progress.done, progress.total)

        try:
            if cell.optimiser is not None:
                run.begin_steps()
                exchange(run.trainer, cell.optimiser)
            if not run.train(on_progress, should_stop):
                return None
        finally:
            run.close()
    model, statement = load_artifact(place), read_statement(place)
    # An item that training has seen is not evaluated, nor the test item in a search.
    items = ITEMS if model.recipe["hold_out"] == "validation" else ("test",)
    items = ("validation",) if cell.search else items
    figures = figures_of(model, load(data), items, cell.sample)
    write_json(place / METRICS, {"not_private": True, **figures})
    steps = statement.steps
    privacy = {
        "epsilon": statement.epsilon,
        "delta": statement.delta,
        "epsilon_at_delta_1_over_users": statement.epsilon_at_delta_1_over_users,
        "noise_multiplier": None if steps is None else steps.noise_multiplier,
        "noise": statement.noise.mode,
        "neighbours": statement.neighbours,
        "releases": [release.model_dump() for release in statement.releases],
        "steps": 0 if steps is None else steps.charged,
    }
    record: Done = {**figures, "privacy": privacy, "statement": sha256(place / PRIVACY)}
    if (variances := item_variances(model.model)) is not None:
        record["item variances"] = variances
        record["attention shift"] = shift_of(model.model, load(data))
    if cell.alone and isinstance(model.model, Ensemble):
        record["transitions alone"] = figures_of(model.model.transitions, load(data), items, cell.sample)
    if cell.noisy:
        network = model.model.trained_network()
        assert isinstance(network, Transformer)
        how = noisy_attention.measure if math.isinf(cell.epsilon) else noisy_attention.measure_scales
        record["noisy"] = how(network, load(data))
    if cell.every is not None:
        record["iterates"] = read_lines(folder / ITERATES)
    return record


def _opened(cell: Cell, data: Path, place: Path) -> Run:
    """Resume an interrupted run; start again if it has no checkpoint or other settings."""
    make_curator = curator_by_place if cell.paired else Curator
    if place.exists() and any((place / PRIVATE).glob("checkpoint-*")):
        run = resume(place, data, make_curator=make_curator)
        if _same(run.recipe, cell.recipe):
            return run
        run.close()
    shutil.rmtree(place, ignore_errors=True)
    return start(place, data, cell.recipe, make_curator=make_curator)


def _same(one: Recipe, other: Recipe) -> bool:
    return one.model_dump(exclude=FREE) == other.model_dump(exclude=FREE)


class Iterates:
    """Figures of the model after every `every` epochs. They are not private, and choose nothing."""

    def __init__(self, cell: Cell, run: Run, path: Path) -> None:
        self._run, self._path, self._every = run, path, cell.every
        if cell.every is None:
            return
        kept = [line for line in read_lines(path) if line["step"] <= run.step]  # later steps are repeated
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._held = held_out(run.dataset.sequences, "test")

    def look(self, progress: Progress) -> None:
        """Evaluate if this step passed a multiple of `every` epochs, or is the last."""
        if self._every is None:
            return
        run, step, plan = self._run, progress.done, progress.plan
        epoch = step * plan.batch_size / plan.users
        before = (step - 1) * plan.batch_size / plan.users
        if math.floor(epoch / self._every) == math.floor(before / self._every) and step < plan.steps:
            return
        model = run.outputs.recommender(run.recipe).eval()
        evaluation = evaluate(model, self._held, len(run.dataset.catalogue))
        line = {"step": step, "epoch": round(epoch, 3), "not_private": True}
        line |= {name: evaluation.masked[name].value for name in ("ndcg@10", "hit@10")}
        append_line(self._path, line)


def figures_of(model: Scorer, dataset: Dataset, asked: tuple[str, ...] = ITEMS, sample: int | None = None) -> Done:
    """All figures of a model on the given held-out items. They are not private. sample: see `Cell`."""
    items, sequences = len(dataset.catalogue), dataset.sequences
    return {item: _plain(evaluate(model, held_out(sequences, item), items, sample=sample).figures()) for item in asked}


def item_variances(model: Recommender, points: int = 40) -> Done | None:
    """The error of item embeddings that Re-Attention uses, at some ranks of popularity; None without Re-Attention.

    Rows of a vocabulary are in the order of the released histogram, so this is a function of released numbers.
    """
    network = model.trained_network()
    if not isinstance(network, Transformer) or not network.tracks_errors() or network.chosen is None:
        return None
    ranks = np.unique(np.geomspace(1, len(network.chosen) - 1, points).round().astype(int)).tolist()
    return {"rank": ranks, "variance": [float(f"{network.var_items[rank]:.4g}") for rank in ranks]}


def shift_of(model: Recommender, dataset: Dataset, users: int = 256) -> float:
    """How far the correction moves attention, on some users' histories: not private."""
    network = model.trained_network()
    assert isinstance(network, Transformer)
    held = held_out(dataset.sequences, "test")
    batch = collate(held.histories, held.evaluated[:users], network.spec.max_length)
    return float(f"{attention_shift(network, batch.tokens):.4g}")


def popularity(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done:
    """Evaluate exact popularity, which is not private; it has no run."""
    dataset = load(data)
    train = dataset.train("validation")
    model = count_events(train, len(dataset.catalogue))
    return {**figures_of(model, dataset), "privacy": None}


def _plain(value: Any) -> Any:
    """Make a value ready for standard JSON: infinity as text, NaN (a slice without targets) as null."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
