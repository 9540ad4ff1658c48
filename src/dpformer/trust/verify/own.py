"""The answers of the run itself: against the exact sums of its data, its ledger and its plan; and the model made again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from dpformer.artifact.layout import ANSWERS
from dpformer.data import Sequences
from dpformer.privacy import Answer, PrivacyPlan, Query, Sample, Statistic, read_ledger
from dpformer.privacy.query import grid_step
from dpformer.privacy.replay import Replay, read_answers
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.noise import noise_outcome
from dpformer.trust.verify.rebuild import rebuilt
from dpformer.trust.verify.recorder import residual

OWN_CHECKS = (
    "this run: charges",
    "this run: model from answers",
    "this run: statistics",
    "this run: steps",
    "this run: grid",
)


class Compared(Replay):
    """Gives recorded answers, and keeps what is left of each after the exact sum of the data is taken away.

    Who was drawn into a step is not recorded, so the answer of a step is kept as it is, in `steps`.
    """

    def __init__(self, recording: Replay, plan: PrivacyPlan, first: int, people: Sequences | None) -> None:
        super().__init__(recording.answers)
        self._plan, self._people, self._first = plan, people, first
        self.noise: dict[str, np.ndarray] = {}
        self.steps: dict[str, np.ndarray] = {}
        self.along: dict[str, float] = {}
        self.other_grids: list[str] = []

    def ask(self, query: Query[Any]) -> Answer:
        """The recorded answer."""
        place = self._first + self.place
        answer = super().ask(query)
        if answer.grid != grid_step(query.bound, query.numbers):
            self.other_grids.append(f"{answer.name} {place}")
        std = self._plan.planned(place).noise_multiplier * query.sensitivity(answer.grid)
        if not isinstance(query, Statistic):
            whole = np.concatenate([value.ravel() for value in answer.values.values()])
            self.steps[f"{answer.name} {place}"] = whole / answer.grid / std
        elif self._people is not None:
            sums = query.sum(self._people, Sample(np.arange(len(self._people)), b""), answer.grid)
            noise = residual(answer, sums, std, place)
            self.noise |= noise
            for (label, left), total in zip(noise.items(), sums.values(), strict=True):
                # Along the sum itself a wrong scale shows first: norms of 1.3 leave 0.3 of the sum.
                length = math.sqrt(float(np.sum(np.square(total.astype(np.float64)))))
                if length:
                    self.along[f"{label} along its sum"] = float(left @ total.ravel()) / length
        return answer


def check_own(verification: Verification, folder: Path, people: Sequences | None, missing: str) -> None:
    """Compare the recorded answers with ledger, plan and data, and make the model again."""
    compared: list[Compared] = []

    def asker(recording: Replay, plan: PrivacyPlan, first: int) -> Replay:
        compared.append(Compared(recording, plan, first, people))
        return compared[0]

    charges, model, statistics, steps, grid = OWN_CHECKS
    verification.check(charges, lambda: _charges(folder))
    verification.check(model, lambda: rebuilt(folder, asker))
    if not compared:
        for name in (statistics, steps, grid):
            verification.skip(name, f"the answers cannot be read; see {model!r}")
        return
    verification.check(grid, lambda: _grids(compared[0]))
    if compared[0].noise or people is None:
        verification.check(statistics, lambda: _statistics(compared[0], missing))
    if compared[0].steps:
        verification.check(steps, lambda: noise_outcome(compared[0].steps, ", sums included", signal=True))


def _statistics(compared: Compared, missing: str) -> Outcome:
    if not compared.noise:
        raise NotChecked(missing)
    return noise_outcome(compared.noise, ", after the exact sums of the data are taken away", along=compared.along)


def _grids(compared: Compared) -> Outcome:
    """The grid of every answer is the public one: a finer grid would let the last bits of sums through."""
    wrong, answers = compared.other_grids, len(compared.answers)
    return Outcome(
        not wrong, f"not on the public grid: {', '.join(wrong)}" if wrong else f"{answers} answers on the public grid"
    )


def _charges(folder: Path) -> Outcome:
    """One entry of the ledger for each recorded answer, of the same name and in its order."""
    if not (folder / ANSWERS).is_dir():
        raise NotChecked("the folder has no answers/")
    _, answers = read_answers(folder / ANSWERS)
    account = read_ledger(folder)
    names, charged = [answer.name for answer in answers], [entry.name for entry in account.entries]
    if len(answers) == len(account.plan.releases):  # steps that take too much room are not kept
        charged = charged[: len(answers)]
    detail = f"{len(names)} answers are kept, {len(charged)} were charged"
    return Outcome(names == charged, detail, {"kept": names, "charged": charged})
