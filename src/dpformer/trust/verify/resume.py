"""Is a run that was interrupted the same run? Two small runs with one seed, one of them stopped, crashed and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import equal

from dpformer.errors import DPFormerError, PrivacyError
from dpformer.fit.folder import MODEL, reopen
from dpformer.fit.one_shot import OneShotRun
from dpformer.fit.recipe import STATISTICS, Recipe
from dpformer.fit.run import Run
from dpformer.fit.session import begin, go_on
from dpformer.privacy import Answer, Curator, Keys, Query, Sample, read_ledger
from dpformer.privacy.query import Asker
from dpformer.statistics.histogram import Histogram
from dpformer.trust.verify.checks import Found
from dpformer.trust.verify.watch import Delegate

# Steps until the checkpoint, and steps made after it that a crash forgets.
SAVED, FORGOTTEN = 3, 2
# By how much the sum of another query differs.
FACTOR = 1.5


class _Crash(Exception):  # noqa: N818
    """Where the power fails."""


class _CrashAfter:
    """Asks a Curator, and crashes after its answer."""

    def __init__(self, curator: Asker) -> None:
        self._curator = curator

    def ask(self, query: Query[Any]) -> Answer:
        self._curator.ask(query)
        raise _Crash


class _Larger(Delegate):
    """The same query with a sum 1.5 times as large."""

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        sums = self.query.sum(people, sample, grid)
        return {name: np.rint(FACTOR * value).astype(np.int64) for name, value in sums.items()}


class _AsksLarger:
    """Asks a Curator for larger sums."""

    def __init__(self, curator: Asker) -> None:
        self._curator = curator

    def ask(self, query: Query[Any]) -> Answer:
        return self._curator.ask(_Larger(query))


def check_resume(folder: Path, data: Path, recipe: Recipe) -> Found:
    """The released tensors must be equal bit for bit, nothing charged twice, and another sum at a charged place refused."""
    whole, cut, other = folder / "whole", folder / "cut", folder / "other"
    begin(whole, data, recipe).train()
    _crash(begin(cut, data, recipe))
    shutil.copytree(cut, other)
    go_on(cut).train()
    a, b = load_file(whole / MODEL), load_file(cut / MODEL)
    different = [name for name in a if name not in b or not equal(a[name], b[name])]
    charged = [len(read_ledger(run).entries) for run in (whole, cut)]
    refused = _refused(other, recipe)
    return Found(
        not different and charged[0] == charged[1] and refused,
        f"stopped, crashed and resumed: {len(a) - len(different)} of {len(a)} tensors equal bit for bit; charged {charged[1]} "
        f"answers, {charged[0]} without interruption (answers given again are free); sums {FACTOR} times as large were "
        + ("refused" if refused else "ACCEPTED as the same answer"),
        {
            "tensors": len(a),
            "different": different,
            "charged": charged[1],
            "charged_whole": charged[0],
            "refused": refused,
        },
    )


def _crash(run: Run | OneShotRun) -> None:
    """End a run after an answer that its checkpoint does not know of, and its ledger does."""
    if isinstance(run, OneShotRun):
        curator = run.curator
        run.curator = _CrashAfter(curator)
        try:
            run.train()
        except _Crash:
            run.curator = curator
            run.close()
            return
        raise DPFormerError("the run asked its Curator for nothing")
    if run.plan.steps:
        run.train(should_stop=lambda: run.step >= SAVED)
        for _ in range(FORGOTTEN):
            run.trainer.make_step(run.curator)
    # Without steps all was asked when the run began, after its first checkpoint.
    run.close()


def _refused(folder: Path, recipe: Recipe) -> bool:
    """Resume, and ask for larger sums where answers were charged."""
    charged = len(read_ledger(folder).entries)
    try:
        if recipe.model not in STATISTICS and recipe.epochs:
            run = go_on(folder)
            try:
                assert isinstance(run, Run)
                run.trainer.make_step(_AsksLarger(run.curator))
            finally:
                run.close()
        else:
            _ask_larger(folder, recipe)
    except PrivacyError:
        return len(read_ledger(folder).entries) == charged
    return False


def _ask_larger(folder: Path, recipe: Recipe) -> None:
    """The first statistic of a run, a histogram, from its checkpoint."""
    dataset, ledger, _, values = reopen(folder)
    assert ledger is not None
    try:
        keys = Keys.restored(values["keys"])
        curator = Curator(dataset.train(recipe.hold_out), ledger.plan, ledger, keys)
        _AsksLarger(curator).ask(Histogram(len(dataset.catalogue), name=ledger.plan.releases[0].name))
    finally:
        ledger.close()
