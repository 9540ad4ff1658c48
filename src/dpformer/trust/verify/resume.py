"""Is a run that was interrupted the same run? Two small runs with one seed, one of them stopped, crashed and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file
from torch import equal

from dpformer.artifact.layout import MODEL
from dpformer.data import Sequences
from dpformer.errors import PrivacyError
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Answer, Curator, Query, Sample, read_ledger
from dpformer.trust.verify.checks import Outcome
from dpformer.trust.verify.watch import Delegate

# Steps until the checkpoint, and steps made after it that a crash forgets.
SAVED, FORGOTTEN = 3, 2
# By how much the sum of another query differs.
FACTOR = 1.5


class _Crash(Exception):  # noqa: N818
    """Where the power fails."""


class _CrashAfter(Curator[Sequences]):
    """A Curator after whose answer the process crashes."""

    def ask(self, query: Query[Sequences]) -> Answer:
        super().ask(query)
        raise _Crash


class _Larger(Delegate):
    """The same query with a sum 1.5 times as large."""

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        sums = self.query.sum(people, sample, grid)
        return {name: np.rint(FACTOR * value).astype(np.int64) for name, value in sums.items()}


class _AsksLarger(Curator[Sequences]):
    """A Curator that is asked for larger sums."""

    def ask(self, query: Query[Sequences]) -> Answer:
        return super().ask(_Larger(query))


def check_resume(folder: Path, data: Path, recipe: Recipe) -> Outcome:
    """The released tensors must be equal bit for bit, nothing charged twice, and another sum at a charged place refused."""
    whole, cut, other = folder / "whole", folder / "cut", folder / "other"
    start(whole, data, recipe).train()
    _crash(cut, data, recipe)
    shutil.copytree(cut, other)
    resume(cut).train()
    a, b = load_file(whole / MODEL), load_file(cut / MODEL)
    different = [name for name in a if name not in b or not equal(a[name], b[name])]
    charged = [len(read_ledger(run).entries) for run in (whole, cut)]
    refused = _refused(other)
    return Outcome(
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


def _crash(folder: Path, data: Path, recipe: Recipe) -> None:
    """End a run after an answer that its checkpoint does not know of, and its ledger does."""
    if recipe.steps_on_data:
        run = start(folder, data, recipe)
        run.train(should_stop=lambda: run.step >= SAVED)
        for _ in range(FORGOTTEN):
            run.trainer.make_step(run.curator)
    else:
        run = start(folder, data, recipe, make_curator=_CrashAfter)
        with suppress(_Crash):
            run.train()
    run.close()


def _refused(folder: Path) -> bool:
    """Resume, and ask for larger sums where answers were charged."""
    charged = len(read_ledger(folder).entries)
    run = resume(folder, make_curator=_AsksLarger)
    try:
        run.train()
    except PrivacyError:
        return len(read_ledger(folder).entries) == charged
    finally:
        run.close()
    return False
