"""The runner of all results that train: it caches and resumes cells, on all cores, within a budget of time.

Cells run in their order. A cell whose estimate does not fit the time left is skipped, with its estimate as the reason; the next
one may fit. When the budget ends, running cells are stopped and saved.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dpformer.data import load
from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.data_sets import fingerprint, prepare_sets
from dpformer_experiments.reproduce.estimate import Estimates
from dpformer_experiments.reproduce.runs import FILE, Runs
from dpformer_experiments.reproduce.work import Done, do

_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


@dataclass
class CellResult:
    """A cell, its folder, and its record, or the reason (`why`) that there is none. earlier: the line of an earlier version."""

    cell: Cell
    folder: Path
    record: Done | None = None
    why: str = ""
    failed: bool = False
    earlier: Done | None = None


class Watch:
    """Receives the progress of the cells; this base class ignores it."""

    def begin(self, cells: int, cached: int) -> None:
        """Called before the first cell: all cells, and those that are finished."""

    def started(self, cell: Cell) -> None:
        """A cell has started."""

    def step(self, cell: Cell, step: int, steps: int) -> None:
        """A cell has made `step` of `steps` steps."""

    def stopping(self) -> None:
        """Running cells are being saved."""

    def ended(self, outcome: CellResult, left: float) -> None:
        """A cell is finished, stopped, or failed. left: estimated seconds of work left."""


def _never() -> bool:
    return False


@dataclass(frozen=True)
class Running:
    """How cells are run.

    cells: the folder of run folders. runs: the file of finished cells, `cells`/runs.jsonl by default. data: paths of the data
    sets, see `find_set`. workers: processes of one thread, one per core by default; 1 works in this process. stopped: called from
    time to time; when it returns true, running cells are saved and stopped.
    """

    cells: Path
    runs: Path | None = None
    data: Mapping[str, Path] = field(default_factory=dict)
    budget_minutes: float | None = None
    workers: int | None = None
    watch: Watch = field(default_factory=Watch)
    stopped: Callable[[], bool] = _never

    def prepared(self, names: Sequence[str]) -> dict[str, Path]:
        """Folders of prepared data by name, for runs to train on."""
        return prepare_sets(names, self.data, self.cells)


def run_cells(
    cells: Sequence[Cell],
    folders: Mapping[str, Path],
    how: Running,
    wanted: Callable[[Cell], bool] = lambda cell: True,
) -> list[CellResult]:
    """Run cells that are not finished, and return the result of each, in their order.

    folders: prepared data by name. Cells that are not `wanted` are not run.
    """
    prints = {name: fingerprint(load(folder)) for name, folder in folders.items()}
    outcomes = [CellResult(cell, cell.folder(how.cells, prints[cell.dataset])) for cell in cells]
    finished, estimates = Runs(how.runs or how.cells / FILE), Estimates(folders)
    for outcome in outcomes:
        outcome.record = finished.find(outcome.cell.key(prints[outcome.cell.dataset]), outcome.cell.defaults())
        if outcome.record is not None:
            estimates.learn(outcome.cell, outcome.record["core_seconds"])
            continue
        cell = outcome.cell
        outcome.earlier = finished.earlier(cell.dataset, cell.method, cell.epsilon, cell.seed)
        if not wanted(cell):
            outcome.why = "queued"
    waiting = [outcome for outcome in outcomes if outcome.record is None and not outcome.why]
    cached = sum(outcome.record is not None for outcome in outcomes)
    how.watch.begin(cached + len(waiting), cached)
    _Session(how, folders, finished, estimates).run(waiting)
    for outcome in waiting:
        if outcome.record is None and not outcome.why:
            outcome.why = _reason(estimates.finished(outcome.cell, outcome.folder))
    return outcomes


class _Session:
    """Runs cells until none is left that fits the budget of time."""

    def __init__(self, how: Running, folders: Mapping[str, Path], finished: Runs, estimates: Estimates) -> None:
        self._how, self._folders, self._finished, self._estimates = how, folders, finished, estimates
        self._deadline = None if how.budget_minutes is None else time.time() + 60 * how.budget_minutes
        self._count = how.workers or os.cpu_count() or 1

    def run(self, waiting: Sequence[CellResult]) -> None:
        """Run the waiting cells, in their order."""
        with self._pool(len(waiting)) as pool:
            self._work(list(waiting), pool)

    def _pool(self, cells: int) -> _Here | _Pool:
        if self._count == 1:
            return _Here(self._how.stopped, self._deadline, self._how.watch)
        return _Pool(min(self._count, max(1, cells)), self._deadline)

    def _work(self, left: list[CellResult], pool: _Here | _Pool) -> None:
        running, stopping = dict[Future[Done | None], CellResult](), False
        watch, stopped = self._how.watch, self._how.stopped
        while True:
            while len(running) < self._count and not stopped() and (chosen := self._choose(left)):
                left.remove(chosen)
                watch.started(chosen.cell)
                running[pool.submit(chosen.cell, self._folders[chosen.cell.dataset], chosen.folder)] = chosen
            if not running:
                return
            done, _ = wait(running, timeout=0.2, return_when=FIRST_COMPLETED)
            places = {str(outcome.folder): outcome.cell for outcome in running.values()}
            for place, step, steps in pool.steps():
                if place in places:  # else the cell has ended meanwhile
                    watch.step(places[place], step, steps)
            for future in done:
                outcome = running.pop(future)
                self._settle(outcome, future)
                estimated = [self._estimates.finished(o.cell, o.folder) or 0.0 for o in [*left, *running.values()]]
                watch.ended(outcome, sum(estimated) / self._count)
            if stopped() and not stopping:
                stopping = True
                watch.stopping()
                pool.stop()

    def _choose(self, left: list[CellResult]) -> CellResult | None:
        """The first cell that fits the time left. A cell without an estimate fits while there is any time."""
        if self._deadline is None:
            return left[0] if left else None
        remaining = self._deadline - time.time()
        if remaining <= 0:
            return None
        return next((o for o in left if (self._estimates.seconds(o.cell, o.folder) or 0.0) <= remaining), None)

    def _settle(self, outcome: CellResult, future: Future[Done | None]) -> None:
        error = future.exception()
        if error is not None:
            if not isinstance(error, Exception):
                raise error
            kind = "" if isinstance(error, DPFormerError) else f"{type(error).__name__}: "
            outcome.why, outcome.failed = f"failed: {kind}{' '.join(str(error).split())[:200]}", True
            return
        outcome.record = future.result()
        if outcome.record is not None:
            self._finished.add(outcome.record)
            self._estimates.learn(outcome.cell, outcome.record["core_seconds"])


def _reason(seconds: float | None) -> str:
    return "queued" if seconds is None else f"queued: about {max(1, round(seconds / 60)):,} min"


class _Here:
    """This process as the only worker. It reports steps to the watch directly."""

    def __init__(self, stopped: Callable[[], bool], deadline: float | None, watch: Watch) -> None:
        self._stopped, self._deadline, self._watch = stopped, deadline, watch

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def submit(self, cell: Cell, data: Path, folder: Path) -> Future[Done | None]:
        """Run the cell now."""
        future: Future[Done | None] = Future()
        try:
            late = lambda: self._stopped() or (self._deadline is not None and time.time() > self._deadline)  # noqa: E731
            future.set_result(do(cell, data, folder, late, lambda step, steps: self._watch.step(cell, step, steps)))
        except Exception as error:  # noqa: BLE001  - kept in the future, as in a pool
            future.set_exception(error)
        return future

    def steps(self) -> list[tuple[str, int, int]]:
        """None: they were reported directly."""
        return []

    def stop(self) -> None:
        """Do nothing: the work itself calls `stopped`."""


class _Pool:
    """Processes of one thread each. They send their steps through a queue, and save and stop at an event."""

    def __init__(self, count: int, deadline: float | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._deadline = deadline
        self._stop, self._steps = context.Event(), context.Queue()
        # Libraries read these when they are loaded, so a worker must have them from its start.
        self._before = {name: os.environ.get(name) for name in _THREADS}
        os.environ.update(dict.fromkeys(_THREADS, "1"))
        self._pool: Executor = ProcessPoolExecutor(count, context, _begin_worker, (self._stop, self._steps))

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._pool.shutdown(cancel_futures=True)
        for name, value in self._before.items():
            os.environ.pop(name, None) if value is None else os.environ.__setitem__(name, value)

    def submit(self, cell: Cell, data: Path, folder: Path) -> Future[Done | None]:
        """Give the cell to a worker."""
        return self._pool.submit(_in_worker, cell, data, folder, self._deadline)

    def steps(self) -> list[tuple[str, int, int]]:
        """The latest step of each cell since the last call: folder, step, steps."""
        latest: dict[str, tuple[int, int]] = {}
        try:
            while True:
                place, step, steps = self._steps.get_nowait()
                latest[place] = (step, steps)
        except queue.Empty:
            return [(place, *pair) for place, pair in latest.items()]

    def stop(self) -> None:
        """Make the workers save and stop."""
        self._stop.set()


_worker: dict[str, Any] = {}


def _begin_worker(stop: Any, steps: Any) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent sets the event
    torch.set_num_threads(1)
    _worker.update(stop=stop, steps=steps, sent=0.0)


def _in_worker(cell: Cell, data: Path, folder: Path, deadline: float | None) -> Done | None:
    def late() -> bool:
        return _worker["stop"].is_set() or (deadline is not None and time.time() > deadline)

    def on_step(step: int, steps: int) -> None:
        if time.monotonic() - _worker["sent"] > 0.2:
            _worker["sent"] = time.monotonic()
            _worker["steps"].put((str(folder), step, steps))

    return do(cell, data, folder, late, on_step)
