"""Is a run that was interrupted the same run? Two small runs with one seed, one of them stopped, crashed and resumed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.torch import load_file
from torch import equal

from dpformer.errors import DPFormerError
from dpformer.privacy import read_ledger
from dpformer.training.folder import MODEL
from dpformer.training.one_shot import OneShotRun
from dpformer.training.recipe import STATISTICS, Recipe
from dpformer.training.run import Run
from dpformer.training.session import begin, go_on
from dpformer.trust.verify.checks import Found

# Steps until the checkpoint, and steps made after it that a crash forgets.
SAVED, FORGOTTEN = 3, 2


class _Crash(Exception):  # noqa: N818
    """Where the power fails."""


def check_resume(folder: Path, data: Path, recipe: Recipe) -> Found:
    """The released tensors must be equal bit for bit, and no step or release charged twice."""
    whole, cut = folder / "whole", folder / "cut"
    begin(whole, data, recipe).train()
    first = begin(cut, data, recipe)
    if isinstance(first, OneShotRun):
        _crash_after_a_release(first)
    else:
        _crash_after_steps(first)
    go_on(cut).train()
    a, b = load_file(whole / MODEL), load_file(cut / MODEL)
    different = [name for name in a if name not in b or not equal(a[name], b[name])]
    charged = [len(read_ledger(run).entries) for run in (whole, cut)]
    what = "releases" if recipe.model in STATISTICS else "steps"
    return Found(
        not different and charged[0] == charged[1],
        f"stopped, crashed and resumed: {len(a) - len(different)} of {len(a)} tensors equal bit for bit; charged {charged[1]} "
        f"entries, {charged[0]} without interruption ({what} made again are free)",
        {"tensors": len(a), "different": different, "charged": charged[1], "charged_whole": charged[0]},
    )


def _crash_after_steps(run: Run) -> None:
    """Stop with a checkpoint, make steps that it does not know of, and die: the ledger knows of them."""
    run.train(should_stop=lambda: run.step >= SAVED)
    for _ in range(FORGOTTEN):
        run.trainer.make_step()
    run.close()


def _crash_after_a_release(run: OneShotRun) -> None:
    """Die when the first noise has been drawn and its release charged."""
    draw = run.noise.gaussian

    def once(shape: tuple[int, ...], std: float) -> np.ndarray:
        draw(shape, std)
        raise _Crash

    run.noise.gaussian = once
    try:
        run.train()
    except _Crash:
        run.close()
        return
    raise DPFormerError("no noise was drawn from the run's source")
