"""Small runs with the run's own recipe: every query on people who leave, the noise, the draws, neighbours, and a crash."""

from __future__ import annotations

import math
import shutil
from collections.abc import Mapping
from contextlib import suppress
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpformer.artifact.layout import MODEL
from dpformer.data import load
from dpformer.errors import PrivacyError
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import resume, start
from dpformer.privacy import Answer, PrivacyPlan, Query, Sample, read_ledger
from dpformer.privacy.plan import GRADIENTS
from dpformer.training.groups import Groups
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.noise import DRAWS, noise_outcome
from dpformer.trust.verify.own import rebuilt
from dpformer.trust.verify.people import emptied, write_data
from dpformer.trust.verify.recorder import Asked, Delegate, MakeCurator, Recorder, Repeating, Watched, described

AFTER = ("sensitivity", "noise", "sampler", "same queries for neighbours", "model from answers")
# What one person's leaving may change for others in a step: this share of the room for float32 that the noise has.
SHARE_OF_ROOM = 0.25
# Steps until the checkpoint, and steps made after it that a crash forgets. By how much the sum of another query differs.
SAVED, FORGOTTEN, FACTOR = 3, 2, 1.5


def check_answers(verification: Verification, make: MakeCurator, recipe: Recipe, data: Path, place: Path) -> None:
    """Record a run on small data; then look at each query and each answer."""
    recorders, folder = list[Recorder](), place / "recorded"

    def recorded() -> Outcome:
        def recorder(*arguments: Any) -> Recorder:
            recorders.append(Recorder(make, *arguments))
            return recorders[-1]

        start(folder, data, recipe, make_curator=recorder).train()
        return _planned(recorders[0])

    if not verification.check("queries planned", recorded) and (not recorders or not recorders[0].asked):
        verification.skip("no answer was given; see 'queries planned'", *AFTER)
        return
    asked, plan = recorders[0].asked, recorders[0].plan
    verification.check("sensitivity", _sensitivity, asked, plan)
    verification.check("noise", _noise, recorders[0])
    verification.check("sampler", _sampler, asked, plan)
    verification.check("same queries for neighbours", _neighbours, asked, make, recipe, data, place)
    verification.check("model from answers", rebuilt, folder)


def _planned(recorder: Recorder) -> Outcome:
    """Names and order against the plan and the ledger; the noise that each answer states against a second count."""
    names = [asked.name for asked in recorder.asked]
    plan = recorder.plan
    planned = [release.name for release in plan.releases] + [GRADIENTS] * plan.steps
    charged = [entry.name for entry in recorder.ledger.account().entries]
    wrong = sorted({asked.name for asked in recorder.asked if not _as_planned(asked, plan)})
    detail = f"{len(names)} answers asked, planned and charged: {', '.join(dict.fromkeys(names))}"
    if not names == planned == charged:
        detail = f"asked {_short(names)}; planned {_short(planned)}; charged {_short(charged)}"
    detail += f"; an answer states other noise than planned: {', '.join(wrong)}" if wrong else ""
    return Outcome(names == planned == charged and not wrong, detail, {"asked": names, "misstated": wrong})


def _short(names: list[str]) -> str:
    return ", ".join(f"{name} ({names.count(name)})" for name in dict.fromkeys(names)) or "nothing"


def _as_planned(asked: Asked, plan: PrivacyPlan) -> bool:
    """sigma D, rounded up by the last bit; D = C / g, for a step C / g (1 + 1e-6 + t m 2^-21) + t sqrt(d)."""
    D = asked.query.bound / asked.answer.grid
    if asked.name == GRADIENTS:
        groups = Groups.of(plan.users, plan.rate, plan.declared)
        touched = math.ceil(plan.users / groups.block) if plan.declared else 1
        D = D * (1 + 1e-6 + touched * groups.most * 2.0**-21) + touched * math.sqrt(asked.numbers)
    std = asked.answer.noise_std / asked.answer.grid
    return math.isclose(asked.D, D, rel_tol=1e-12) and asked.std <= std <= asked.std * (1 + 1e-12)


def _sensitivity(asked: list[Asked], plan: PrivacyPlan) -> Outcome:
    wrong, figures = [], {}
    for name in dict.fromkeys(one.name for one in asked):
        own = [one for one in asked if one.name == name]
        moved = max(one.moved / one.D for one in own)
        if not moved <= 1:
            wrong.append(f"{name}: one person moves the answer by {moved:.4f} of its sensitivity")
        if not all(one.beyond <= _room(one, plan) for one in own):
            wrong.append(f"{name}: one person's leaving changes what others add")
        if any(one.nobody for one in own):
            wrong.append(f"{name}: a sum over nobody is not 0")
        figures[name] = {"moved": moved, "left": sum(one.left for one in own)}
    shown = ", ".join(f"{name} {one['moved']:.4f}" for name, one in figures.items())
    left = sum(one.left for one in asked)
    detail = f"{left} times one person left; the answer moved by this share of its sensitivity: {shown}"
    return Outcome(not wrong, "; ".join(wrong) or detail, figures)


def _room(asked: Asked, plan: PrivacyPlan) -> float:
    """What may be beyond a person's own part, in steps: 0 for a statistic. Three sums of a step are rounded, each by half."""
    if asked.name != GRADIENTS:
        return 0.0
    groups = Groups.of(plan.users, plan.rate, plan.declared)
    rounded = 1.5 * groups.touched * math.sqrt(asked.numbers)
    return rounded + SHARE_OF_ROOM * groups.slack * asked.query.bound / asked.answer.grid


def _noise(recorder: Recorder) -> Outcome:
    drawn = {name: value for one in recorder.draws(DRAWS) for name, value in one.items()}
    outcome = noise_outcome(drawn)
    off = sorted({asked.name for asked in recorder.asked if not _on_grid(asked.answer)})
    detail = outcome.detail + (f"; not on the grid: {', '.join(off)}" if off else "; all on the grid")
    return Outcome(outcome.good and not off, detail, {**outcome.figures, "off_grid": off}, outcome.false_alarm)


def _on_grid(answer: Answer) -> bool:
    """Is every number of the answer a whole multiple of the grid? Exact: the grid is a power of 2."""
    return all(bool((value / answer.grid % 1 == 0).all()) for value in answer.values.values())


def _sampler(asked: list[Asked], plan: PrivacyPlan) -> Outcome:
    """Who was drawn against the definition: person i if the i-th 64-bit word of ChaCha20 is below floor(rate 2^64)."""
    wrong = [one for one in asked if one.drawn.tolist() != _drawn(one.key, plan.users, plan.planned(one.place).rate)]
    keys = len({one.key for one in asked})
    sizes = [len(one.drawn) for one in asked]
    detail = f"{len(asked)} draws of {plan.users} users: sizes {min(sizes)} to {max(sizes)}, {keys} keys"
    detail += f"; others than the cipher draws for {wrong[0].name} {wrong[0].place}" if wrong else ""
    return Outcome(not wrong and keys == len(asked), detail, {"wrong": len(wrong), "keys": keys})


def _drawn(key: bytes, users: int, rate: float) -> list[int]:
    if rate == 1:
        return list(range(users))
    nonce = bytes(4) + (2).to_bytes(12, "little")  # stream 2 of a key: draws of users
    stream = Cipher(algorithms.ChaCha20(key, nonce), mode=None).encryptor().update(bytes(8 * users))
    bound = math.floor(Fraction(rate) * 2**64)
    return [i for i in range(users) if int.from_bytes(stream[8 * i : 8 * i + 8], "little") < bound]


def _neighbours(asked: list[Asked], make: MakeCurator, recipe: Recipe, data: Path, place: Path) -> Outcome:
    """The same run on neighbouring data, given the same answers: it must ask the same and make the same model."""
    dataset, wrong, made = load(data), [], list[Repeating]()
    people, model = dataset.sequences, (place / "recorded" / MODEL).read_bytes()

    def repeating(*arguments: Any) -> Repeating:
        made.append(Repeating(asked, make, *arguments))
        return made[-1]

    for person in (int(people.lengths.argmax()), len(people) - 1):
        without = write_data(place / f"data-{person}", emptied(people, [person]), dataset.catalogue)
        folder = place / f"neighbour-{person}"
        start(folder, without, recipe, make_curator=repeating).train()
        if made[-1].described != [described(one.query, one.answer) for one in asked]:
            wrong.append(f"without person {person} other queries are asked, with the same answers")
        elif (folder / MODEL).read_bytes() != model:
            wrong.append(f"without person {person} another model is made of the same answers")
    detail = f"two runs on neighbouring data, given the same {len(asked)} answers: same queries, same order, same model"
    return Outcome(not wrong, "; ".join(wrong) or detail, {"differences": wrong})


class _Crash(Exception):  # noqa: N818
    """Where the power fails."""


class _Crashing(Watched):
    """Crashes after the first answer."""

    def ask(self, query: Query[Any]) -> Answer:
        super().ask(query)
        raise _Crash


class _Larger(Delegate):
    """The same query with a sum 1.5 times as large."""

    def sum(self, people: Any, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        sums = self.query.sum(people, sample, grid)
        return {name: np.rint(FACTOR * value).astype(np.int64) for name, value in sums.items()}


class _AskingMore(Watched):
    """Asks for larger sums."""

    def ask(self, query: Query[Any]) -> Answer:
        return super().ask(_Larger(query))


def check_resume(whole: Path, folder: Path, data: Path, recipe: Recipe, make: MakeCurator) -> Outcome:
    """Two runs with one seed: `whole`, which nothing disturbed, and one in `folder` that is stopped, crashed and resumed.

    The model must be equal bit for bit, nothing charged twice, and another sum at a charged place refused.
    """
    if not (whole / MODEL).exists():
        raise NotChecked("the recorded run did not end, so there is nothing to compare with")
    cut, other = folder / "cut", folder / "other"
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
