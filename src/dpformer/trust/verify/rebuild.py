"""Make a run's model again from its recorded answers, with no data at hand."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from pathlib import Path
from typing import cast

import torch

from dpformer.artifact import load
from dpformer.artifact.layout import ANSWERS
from dpformer.fit.dpsgd import Optimisation, Trainer, network_for_steps
from dpformer.fit.folder import read_recipe
from dpformer.fit.prior import read_prior
from dpformer.fit.stage import Outputs, Progress, Setup, run_stages
from dpformer.fit.statistics_stages import stages_before_steps
from dpformer.models import Recommender
from dpformer.privacy import PrivacyPlan, read_ledger
from dpformer.privacy.query import Asker
from dpformer.privacy.replay import Replay, read_answers
from dpformer.statistics.item_selection import ITEMS
from dpformer.trust.verify.checks import NotChecked, Outcome


def make_model(setup: Setup, asker: Asker) -> Recommender:
    """The model that the stages of a recipe make of the answers of `asker`. The items are chosen already."""
    outputs = _result(run_stages(stages_before_steps(setup), asker))
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


def rebuilt(folder: Path, replay: Callable[[Replay, PrivacyPlan, int], Replay] | None = None) -> Outcome:
    """The released tensors against those made again: the same bits, with the run's number of threads.

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
    setup = setup_of(folder, int(about["seed"]))
    before = torch.get_num_threads()
    torch.set_num_threads(int(about["threads"]))
    try:
        made = make_model(setup, asker).state_dict()
    finally:
        torch.set_num_threads(before)
    released = artifact.model.state_dict()
    different = sorted(
        name
        for name in released.keys() | made.keys()
        if name not in made or name not in released or not same_bits(released[name], made[name])
    )
    unused = len(asker.answers) - asker.place
    detail = (
        f"{len(released) - len(different)} of {len(released)} tensors have the same bits, from {len(answers)} answers"
    )
    detail += f"; different: {', '.join(different)}" if different else ""
    detail += f"; {unused} answers were not used" if unused else ""
    return Outcome(not different and not unused, detail, {"different": different, "unused": unused})


def setup_of(folder: Path, seed: int) -> Setup:
    """What the stages of a finished run knew beside answers."""
    return Setup(read_recipe(folder), read_ledger(folder).plan, len(load(folder).catalogue), seed, read_prior(folder))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal types, shapes and bytes: -0 is not 0."""
    if (a.dtype, a.shape) != (b.dtype, b.shape):
        return False
    return bool(a.contiguous().numpy().tobytes() == b.contiguous().numpy().tobytes())
