"""What is done for a cell, in whatever process: train or go on, evaluate, return its record (a line of `runs.Runs`).

FOLDER/run/             the run folder of the product, for cells that have one
FOLDER/progress.json    seconds used so far and steps made, for estimates
FOLDER/iterates.jsonl   figures of iterates, where the cell asks for them; not private
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpformer import __version__
from dpformer.artifact import load as load_artifact
from dpformer.artifact import read_statement
from dpformer.artifact.layout import MODEL, PRIVACY, PRIVATE
from dpformer.data import Dataset, load
from dpformer.evaluation import evaluate, held_out
from dpformer.evaluation.ranking import Scorer
from dpformer.files import read_json, sha256, write_json
from dpformer.fit.folder import finish_written, read_recipe
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import Run, resume, start
from dpformer.fit.scorers import count_events
from dpformer.fit.stage import Progress
from dpformer_experiments.reproduce.cells import FREE, Cell
from dpformer_experiments.reproduce.data_sets import fingerprint
from dpformer_experiments.reproduce.runs import append_line, read_lines

PROGRESS, ITERATES, METRICS = "progress.json", "iterates.jsonl", "metrics.json"
ITEMS = ("validation", "test")
_NOTE_SECONDS = 20.0

ShouldStop = Callable[[], bool]
OnStep = Callable[[int, int], None]  # steps made, of how many
Done = dict[str, Any]


def do(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """Finish a cell, from where it stands; None if told to stop, with everything saved."""
    from dpformer_experiments.reproduce.public import public_transitions
    from dpformer_experiments.reproduce.tuned import tuned_transitions

    work = {
        "recipe": train,
        "popularity": popularity,
        "tuned transitions": tuned_transitions,
        "public transitions": public_transitions,
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
    """How long a cell took, over all sessions, and how far it came. Work is counted in seconds of one core: that is what a cell
    needs, whatever else the machine does.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / PROGRESS
        progress = read_json(self._path) if self._path.exists() else {"core_seconds": 0.0, "step": 0, "steps": 0}
        self._before, self._started = progress["core_seconds"], time.process_time()
        self._noted, self._place = time.monotonic(), (progress["step"], progress["steps"])

    @property
    def core_seconds(self) -> float:
        """So far."""
        return self._before + time.process_time() - self._started

    def note(self, step: int, steps: int) -> None:
        """Where the cell stands; written now and then."""
        self._place = (step, steps)
        if time.monotonic() - self._noted > _NOTE_SECONDS:
            self._noted = time.monotonic()
            self.save()

    def save(self) -> None:
        """Write it."""
        step, steps = self._place
        write_json(self._path, {"core_seconds": self.core_seconds, "step": step, "steps": steps})


def train(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done | None:
    """A run of the product, begun or gone on with; evaluated when its model is released."""
    place = folder / "run"
    finish_written(place)
    if (place / MODEL).exists() and not _same(read_recipe(place), cell.recipe):
        shutil.rmtree(place)  # made with other defaults
    if not (place / MODEL).exists():
        run = _opened(cell, data, place)
        iterates = Iterates(cell, run, folder / ITERATES)

        def on_progress(progress: Progress) -> None:
            if progress.report is not None:  # a step; the other stages begin again after an interruption
                iterates.look(progress)
                on_step(progress.done, progress.total)

        try:
            if not run.train(on_progress, should_stop):
                return None
        finally:
            run.close()
    model, statement = load_artifact(place), read_statement(place)
    # What training has seen is not asked for.
    items = ITEMS if model.recipe["hold_out"] == "validation" else ("test",)
    figures = figures_of(model, load(data), model.model.spec.window, items)
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
    if cell.every is not None:
        record["iterates"] = read_lines(folder / ITERATES)
    return record


def _opened(cell: Cell, data: Path, place: Path) -> Run:
    """An interrupted run goes on; one that never came to its first checkpoint, or has other defaults, begins anew."""
    if place.exists() and any((place / PRIVATE).glob("checkpoint-*")):
        run = resume(place, data)
        if _same(run.recipe, cell.recipe):
            return run
        run.close()
    shutil.rmtree(place, ignore_errors=True)
    return start(place, data, cell.recipe)


def _same(one: Recipe, other: Recipe) -> bool:
    return one.model_dump(exclude=FREE) == other.model_dump(exclude=FREE)


class Iterates:
    """Figures of the model every so many epochs. A side output that is not private, and chooses nothing."""

    def __init__(self, cell: Cell, run: Run, path: Path) -> None:
        self._run, self._path, self._every = run, path, cell.every
        if cell.every is None:
            return
        kept = [line for line in read_lines(path) if line["step"] <= run.step]  # later steps are made again
        path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._held = held_out(run.dataset.sequences, "test")

    def look(self, progress: Progress) -> None:
        """Evaluate, if a multiple of `every` epochs has just been passed, or all steps are made."""
        if self._every is None:
            return
        run, step, plan = self._run, progress.done, progress.plan
        epoch = step * plan.batch_size / plan.users
        before = (step - 1) * plan.batch_size / plan.users
        if math.floor(epoch / self._every) == math.floor(before / self._every) and step < plan.steps:
            return
        model = run.outputs.recommender(run.recipe).eval()
        evaluation = evaluate(model, self._held, len(run.dataset.catalogue), max_length=model.spec.window)
        line = {"step": step, "epoch": round(epoch, 3), "not_private": True}
        line |= {name: evaluation.masked[name].value for name in ("ndcg@10", "hit@10")}
        append_line(self._path, line)


def figures_of(model: Scorer, dataset: Dataset, window: int | None, asked: tuple[str, ...] = ITEMS) -> Done:
    """All figures of a model on the validation and on the test item, or one of them. Not private."""
    items = len(dataset.catalogue)
    return {
        item: _plain(evaluate(model, held_out(dataset.sequences, item), items, max_length=window).figures())
        for item in asked
    }


def popularity(cell: Cell, data: Path, folder: Path, should_stop: ShouldStop, on_step: OnStep) -> Done:
    """Exact popularity: not private, and no model of its own among the runs."""
    dataset = load(data)
    train = dataset.train("validation")
    model = count_events(train, len(dataset.catalogue))
    return {**figures_of(model, dataset, None), "privacy": None}


def _plain(value: Any) -> Any:
    """Ready for JSON that everybody reads: no infinities, and null for what is not a number (a class without targets)."""
    if isinstance(value, dict):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value
