"""A small run with the run's own recipe, recorded: every query on people who leave, the noise, the draws, and neighbours."""

from __future__ import annotations

import math
from fractions import Fraction
from functools import partial
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

from dpformer.artifact.layout import MODEL
from dpformer.data import Dataset, load
from dpformer.fit.recipe import Recipe
from dpformer.fit.run import start
from dpformer.privacy.plan import GRADIENTS, PrivacyPlan
from dpformer.training.groups import Groups
from dpformer.trust.verify.checks import Outcome, Verification
from dpformer.trust.verify.noise import DRAWS, noise_outcome
from dpformer.trust.verify.people import emptied, write_data
from dpformer.trust.verify.rebuild import rebuilt
from dpformer.trust.verify.recorder import Asked, MakeCurator, Recorder, Repeating

ANSWER_CHECKS = (
    "queries planned",
    "sensitivity",
    "noise",
    "sampler",
    "same queries for neighbours",
    "model from answers",
)
# What one person's leaving may change for others in a step: this share of the room for float32 that the noise has.
SHARE_OF_ROOM = 0.25


def check_answers(verification: Verification, make: MakeCurator, recipe: Recipe, data: Path, place: Path) -> None:
    """Record a run on small data; then look at each query and each answer."""
    recorders: list[Recorder] = []
    folder = place / "recorded"

    def recorder(*arguments: object) -> Recorder:
        recorders.append(Recorder(make, *arguments))  # type: ignore[arg-type]
        return recorders[-1]

    def recorded() -> Outcome:
        start(folder, data, recipe, make_curator=recorder).train()
        return _planned(recorders[0])

    if not verification.check("queries planned", recorded) and (not recorders or not recorders[0].asked):
        for name in ANSWER_CHECKS[1:]:
            verification.skip(name, "no answer was given; see 'queries planned'")
        return
    asked, plan = recorders[0].asked, recorders[0].plan
    verification.check("sensitivity", lambda: _sensitivity(asked, plan))
    verification.check("noise", lambda: _noise(recorders[0]))
    verification.check("sampler", lambda: _sampler(asked, plan))
    others = partial(_neighbours, asked, make, recipe, load(data), place)
    verification.check("same queries for neighbours", lambda: others((folder / MODEL).read_bytes()))
    verification.check("model from answers", lambda: rebuilt(folder))


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
    D = asked.bound / asked.answer.grid
    if asked.name == GRADIENTS:
        numbers = sum(value.size for value in asked.sums.values())
        groups = Groups.of(plan.users, plan.rate, plan.declared)
        touched = math.ceil(plan.users / groups.block) if plan.declared else 1
        D = D * (1 + 1e-6 + touched * groups.most * 2.0**-21) + touched * math.sqrt(numbers)
    std = asked.answer.noise_std / asked.answer.grid
    return math.isclose(asked.D, D, rel_tol=1e-12) and asked.std <= std <= asked.std * (1 + 1e-12)


def _sensitivity(asked: list[Asked], plan: PrivacyPlan) -> Outcome:
    wrong, shown, figures = [], [], {}
    for name in dict.fromkeys(one.name for one in asked):
        own = [one for one in asked if one.name == name]
        moved = max(one.moved / one.D for one in own)
        beyond = max(one.beyond - _room(one, plan) for one in own)
        if moved > 1:
            wrong.append(f"{name}: one person moves the answer by {moved:.4f} of its sensitivity")
        if beyond > 0:
            wrong.append(f"{name}: one person's leaving changes what others add")
        if any(one.nobody for one in own):
            wrong.append(f"{name}: a sum over nobody is not 0")
        shown.append(f"{name} {moved:.4f}")
        figures[name] = {"moved": moved, "left": sum(one.left for one in own)}
    left = sum(one.left for one in asked)
    detail = f"{left} times one person left; the answer moved by this share of its sensitivity: {', '.join(shown)}"
    return Outcome(not wrong, "; ".join(wrong) or detail, figures)


def _room(asked: Asked, plan: PrivacyPlan) -> float:
    """What may be beyond a person's own part, in steps: 0 for a statistic. Three sums of a step are rounded, each by half."""
    if asked.name != GRADIENTS:
        return 0.0
    groups = Groups.of(plan.users, plan.rate, plan.declared)
    numbers = sum(value.size for value in asked.sums.values())
    return 1.5 * groups.touched * math.sqrt(numbers) + SHARE_OF_ROOM * groups.slack * asked.bound / asked.answer.grid


def _noise(recorder: Recorder) -> Outcome:
    drawn = {name: value for one in recorder.draws(DRAWS) for name, value in one.items()}
    outcome = noise_outcome(drawn)
    off = sorted({asked.name for asked in recorder.asked if not on_grid(asked)})
    detail = outcome.detail + (f"; not on the grid: {', '.join(off)}" if off else "; all on the grid")
    return Outcome(outcome.good and not off, detail, {**outcome.figures, "off_grid": off}, outcome.false_alarm)


def on_grid(asked: Asked) -> bool:
    """Is every number of the answer a whole multiple of the grid? Exact: the grid is a power of 2."""
    steps = [value / asked.answer.grid for value in asked.answer.values.values()]
    return all(bool((value == value.round()).all()) for value in steps)


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


def _neighbours(
    asked: list[Asked], make: MakeCurator, recipe: Recipe, dataset: Dataset, place: Path, model: bytes
) -> Outcome:
    """The same run on neighbouring data, given the same answers: it must ask the same and make the same model."""
    people, wrong = dataset.sequences, []
    for person in (int(people.lengths.argmax()), len(people) - 1):
        data = write_data(place / f"data-{person}", emptied(people, [person]), dataset.catalogue)
        made: list[Repeating] = []

        def repeating(*arguments: object, made: list[Repeating] = made) -> Repeating:
            made.append(Repeating(asked, make, *arguments))
            return made[-1]

        folder = place / f"neighbour-{person}"
        start(folder, data, recipe, make_curator=repeating).train()
        if [one.described for one in made[0].asked] != [one.described for one in asked]:
            wrong.append(f"without person {person} other queries are asked, with the same answers")
        elif (folder / MODEL).read_bytes() != model:
            wrong.append(f"without person {person} another model is made of the same answers")
    detail = f"two runs on neighbouring data, given the same {len(asked)} answers: same queries, same order, same model"
    return Outcome(not wrong, "; ".join(wrong) or detail, {"differences": wrong})
