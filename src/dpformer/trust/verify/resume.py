"""Is a run that was interrupted the same run? Two small runs with one seed, one of them stopped, crashed and resumed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.artifact.layout import MODEL
from dpformer.errors import PrivacyError
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Answer, Query, Sample, read_ledger
from dpformer.trust.verify.checks import Outcome
from dpformer.trust.verify.recorder import Delegate, MakeCurator, Recorder

# Steps until the checkpoint, and steps made after it that a crash forgets. By how much the sum of another query differs.
SAVED, FORGOTTEN, FACTOR = 3, 2, 1.5


class _Crash(Exception):  # noqa: N818
    """Where the power fails."""


class _Larger(Delegate):
    """The same query with a sum 1.5 times as large."""

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        sums = self.query.sum(people, sample, grid)
        return {name: np.rint(FACTOR * value).astype(np.int64) for name, value in sums.items()}


class _Through(Recorder):
    """Passes queries on to the Curator. crash: after the first answer. larger: asks for larger sums."""

    crash = larger = False

    def ask(self, query: Query[Any]) -> Answer:
        answer = self.curator.ask(_Larger(query) if self.larger else query)
        if self.crash:
            raise _Crash
        return answer


class _Crashing(_Through):
    crash = True


class _AskingMore(_Through):
    larger = True


def check_resume(folder: Path, data: Path, recipe: Recipe, make: MakeCurator) -> Outcome:
    """The released model must be equal bit for bit, nothing charged twice, and another sum at a charged place refused."""
    whole, cut, other = folder / "whole", folder / "cut", folder / "other"
    start(whole, data, recipe, make_curator=make).train()
    _crash(cut, data, recipe, make)
    shutil.copytree(cut, other)
    resume(cut, make_curator=make).train()
    same = (whole / MODEL).read_bytes() == (cut / MODEL).read_bytes()
    charged = [len(read_ledger(run).entries) for run in (whole, cut)]
    refused = _refused(other, make)
    return Outcome(
        same and charged[0] == charged[1] and refused,
        f"stopped, crashed and resumed: {'the same model, bit for bit' if same else 'ANOTHER model'}; charged {charged[1]} "
        f"answers, {charged[0]} without interruption (answers given again are free); sums {FACTOR} times as large were "
        + ("refused" if refused else "ACCEPTED as the same answer"),
        {"same": same, "charged": charged[1], "charged_whole": charged[0], "refused": refused},
    )


def _crash(folder: Path, data: Path, recipe: Recipe, make: MakeCurator) -> None:
    """End a run after an answer that its checkpoint does not know of, and its ledger does."""
    if recipe.steps_on_data:
        run = start(folder, data, recipe, make_curator=make)
        run.train(should_stop=lambda: run.step >= SAVED)
        for _ in range(FORGOTTEN):
            run.trainer.make_step(run.curator)
    else:
        run = start(folder, data, recipe, make_curator=partial(_Crashing, make))
        with suppress(_Crash):
            run.train()
    run.close()


def _refused(folder: Path, make: MakeCurator) -> bool:
    """Resume, and ask for larger sums where answers were charged."""
    charged = len(read_ledger(folder).entries)
    run = resume(folder, make_curator=partial(_AskingMore, make))
    try:
        run.train()
    except PrivacyError:
        return len(read_ledger(folder).entries) == charged
    finally:
        run.close()
    return False
