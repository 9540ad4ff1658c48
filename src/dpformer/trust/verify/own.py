"""The answers of the run itself: against the exact sums of its data, its ledger and its plan; and the model made again."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from dpformer.artifact import load
from dpformer.artifact.layout import ANSWERS, LOCAL, PRIOR
from dpformer.data import Dataset, Sequences
from dpformer.files import read_json
from dpformer.fit.dpsgd import Optimisation, Trainer, network_for_steps
from dpformer.fit.folder import read_recipe
from dpformer.fit.prior import prior_from, read_prior, to_bytes
from dpformer.fit.stage import Outputs, Progress, Setup, item_features
from dpformer.fit.statistics_stages import run_stages
from dpformer.models import Recommender
from dpformer.privacy import Answer, PrivacyPlan, Query, Sample, Statistic, read_ledger
from dpformer.privacy.query import Asker, grid_step
from dpformer.privacy.replay import Replay, read_answers
from dpformer.statistics.item_selection import ITEMS
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.noise import noise_outcome
from dpformer.trust.verify.recorder import residual


def make_model(setup: Setup, asker: Asker) -> Recommender:
    """The model that the stages of a recipe make of the answers of `asker`. The items are chosen already."""
    outputs = _result(run_stages(setup, asker))
    if setup.recipe.steps_on_data:
        trainer = Trainer(network_for_steps(setup, outputs), setup.plan, Optimisation.of(setup.recipe))
        for _ in trainer.run(asker):
            pass
        outputs = replace(outputs, network=trainer.model)
    return outputs.recommender(setup.recipe)


def _result(stages: Generator[Progress, None, Outputs]) -> Outputs:
    while True:
        try:
            next(stages)
        except StopIteration as end:
            return cast(Outputs, end.value)


def setup_of(folder: Path, seed: int) -> Setup:
    """What the stages of a finished run knew beside answers."""
    artifact, plan, prior = load(folder), read_ledger(folder).plan, read_prior(folder)
    features = item_features(artifact.log.get("preparing", {}).get("features", ""), artifact.catalogue)
    return Setup(read_recipe(folder), plan, len(artifact.catalogue), seed, prior, features)


def rebuilt(folder: Path, replay: Callable[[Replay, PrivacyPlan, int], Replay] | None = None) -> Outcome:
    """The released tensors against those made again from answers alone: the same bits, with the run's number of threads.

    replay: given the recording, the plan and the place of its first answer, returns what is asked in its place.
    """
    artifact = load(folder)
    if not artifact.statement.private:
        raise NotChecked("the run is not private and says so: its answers are exact, and are not kept")
    if not (folder / ANSWERS).is_dir():
        raise NotChecked("the folder has no answers/; verify the run folder itself, or copy its answers too")
    about, answers = read_answers(folder / ANSWERS)
    plan = read_ledger(folder).plan
    if len(answers) == len(plan.releases) < len(plan.releases) + plan.steps:
        raise NotChecked(f"the answers of {plan.steps:,} steps take too much room and were not kept")
    chosen = [answer for answer in answers if answer.name == ITEMS]
    if chosen and set(chosen[0].labels) != set(artifact.catalogue["item_id"].to_list()):
        return Outcome(False, "the catalogue has other items than the answer that chose them")
    asker = Replay(answers[len(chosen) :])
    if replay is not None:
        asker = replay(asker, plan, len(chosen))
    before = torch.get_num_threads()
    torch.set_num_threads(int(about["threads"]))
    try:
        made = make_model(setup_of(folder, int(about["seed"])), asker).state_dict()
    finally:
        torch.set_num_threads(before)
    released = artifact.model.state_dict()
    different = sorted(
        name
        for name in released.keys() | made.keys()
        if name not in made or name not in released or not same_bits(released[name], made[name])
    )
    unused = len(asker.answers) - asker.place
    same = len(released) - len(different)
    detail = f"{same} of {len(released)} tensors have the same bits, from {len(answers)} answers"
    detail += f"; different: {', '.join(different)}" if different else ""
    detail += f"; {unused} answers were not used" if unused else ""
    return Outcome(not different and not unused, detail, {"different": different, "unused": unused})


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal types, shapes and bytes: -0 is not 0."""
    same_kind = (a.dtype, a.shape) == (b.dtype, b.shape)
    return same_kind and bool(a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes())


def prior_again(folder: Path, dataset: Dataset | None, missing: str) -> Outcome:
    """The prior of a refit against one made again from the answers of the earlier run, charged to the same account before."""
    if dataset is None:
        raise NotChecked(missing)
    local = read_json(folder / LOCAL) if (folder / LOCAL).exists() else {}
    earlier = Path(local.get("earlier", "nowhere"))
    if not earlier.is_dir():
        raise NotChecked(
            "the run that the prior was made of is not where it was; its answers are needed to make it again"
        )
    made = prior_from(earlier, dataset)
    same = made is not None and to_bytes(made) == (folder / PRIOR).read_bytes()
    before, own = read_ledger(earlier).receipt, read_ledger(folder).receipt
    charged = before is not None and own is not None and before.account == own.account and before.entries < own.entries
    detail = f"made again from {earlier}: {'the same bits' if same else 'OTHER numbers'}; "
    detail += f"{'charged' if charged else 'NOT charged'} to the account of this run before it. Verify that run too"
    return Outcome(same and charged, detail, {"same": same, "charged": charged})


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
                if length := float(np.linalg.norm(total.astype(np.float64))):
                    self.along[f"{label} along its sum"] = float(left @ total.ravel()) / length
        return answer


def check_own(verification: Verification, folder: Path, people: Sequences | None, missing: str) -> None:
    """Compare the recorded answers with ledger, plan and data, and make the model again."""
    compared: list[Compared] = []

    def asker(recording: Replay, plan: PrivacyPlan, first: int) -> Replay:
        compared.append(Compared(recording, plan, first, people))
        return compared[0]

    model, statistics, steps, grid = (f"this run: {n}" for n in ("model from answers", "statistics", "steps", "grid"))
    verification.check("this run: charges", _charges, folder)
    verification.check(model, rebuilt, folder, asker)
    if not compared:
        verification.skip(f"the answers cannot be read; see {model!r}", statistics, steps, grid)
        return
    verification.check(grid, _grids, compared[0])
    if compared[0].noise or people is None:
        verification.check(statistics, _statistics, compared[0], missing)
    if compared[0].steps:
        verification.check(steps, noise_outcome, compared[0].steps, ", sums included", True)


def _statistics(compared: Compared, missing: str) -> Outcome:
    if not compared.noise:
        raise NotChecked(missing)
    where = ", after the exact sums of the data are taken away"
    return noise_outcome(compared.noise, where, along=compared.along)


def _grids(compared: Compared) -> Outcome:
    """The grid of every answer is the public one: a finer grid would let the last bits of sums through."""
    wrong = compared.other_grids
    detail = f"not on the public grid: {', '.join(wrong)}" if wrong else f"{len(compared.answers)} answers on it"
    return Outcome(not wrong, detail)


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
