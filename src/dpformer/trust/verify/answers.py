"""The statistics of a run: how far one person moves each sum, and how much noise each answer gets."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from dpformer.data import Sequences
from dpformer.fit.stage import Setup, run_stages
from dpformer.fit.statistics_stages import stages_before_steps
from dpformer.privacy import Query, Sample
from dpformer.privacy.query import Asker
from dpformer.trust.verify.checks import Outcome, Verification
from dpformer.trust.verify.noise import noise_outcome
from dpformer.trust.verify.watch import Asked, Curators, Watched

ANSWER_CHECKS = ("answers planned", "answer sensitivity", "answer noise")
# Draws of each answer that are looked at, at the least: 0.7 of the noise is then 12 standard errors away.
DRAWS = 1000

AskAll = Callable[[Asker], object]


def statistics_of(setup: Setup) -> AskAll:
    """What a run of this recipe asks before its steps, by the run's own stages."""

    def ask(asker: Asker) -> None:
        for _ in run_stages([stage for stage in stages_before_steps(setup) if stage.name != "distil"], asker):
            pass

    return ask


def check_answers(verification: Verification, ask_all: AskAll, curators: Curators) -> None:
    """Ask all of a real Curator, watched; then look at each query and each answer."""
    watched = Watched(curators.new())
    planned = [release.name for release in curators.plan.releases]
    verification.check("answers planned", lambda: _planned(ask_all, watched, planned))
    if not watched.asked:
        for name in ANSWER_CHECKS[1:]:
            verification.skip(name, "no answer was given; see 'answers planned'")
        return
    queries = [asked.query for asked in watched.asked]
    verification.check("answer sensitivity", lambda: _sensitivity(queries, watched, curators.people))
    verification.check("answer noise", lambda: _noise(watched.asked, curators))


def _planned(ask_all: AskAll, watched: Watched, planned: list[str]) -> Outcome:
    ask_all(watched)
    names, charged = [asked.answer.name for asked in watched.asked], watched.charged
    detail = f"asked {names}"
    if names != planned:
        detail += f", planned {planned}"
    if charged != names:
        detail += f", charged {charged}"
    return Outcome(names == planned == charged, detail, {"asked": names, "planned": planned, "charged": charged})


def _sensitivity(queries: list[Query[Any]], watched: Watched, people: Sequences) -> Outcome:
    """Each person's events replaced by none in turn; the number of people stays."""
    moved, allowed, good = {}, {}, True
    for query, asked in zip(queries, watched.asked, strict=True):
        grid = asked.answer.grid
        sample = Sample(np.arange(len(people)), asked.sample.key)
        all_users = query.sum(people, sample, grid)
        largest = 0.0
        for person in range(len(people)):
            rest = query.sum(without(people, person), sample, grid)
            largest = max(largest, _norm({name: all_users[name] - rest[name] for name in all_users}))
        moved[query.name], allowed[query.name] = largest * grid, query.sensitivity(grid) * grid
        good &= largest <= query.sensitivity(grid) and math.isclose(allowed[query.name], query.bound, rel_tol=1e-12)
        good &= all(np.array_equal(all_users[name], value) for name, value in asked.sums.items())
    shown = ", ".join(f"{name} {value:.6f} of {allowed[name]:g}" for name, value in moved.items())
    return Outcome(
        good, f"{len(people)} people, each without events in turn: {shown}", {"moved": moved, "allowed": allowed}
    )


def _noise(asked: list[Asked], curators: Curators) -> Outcome:
    """The same queries again, by Curators with other keys: as many draws of each as it takes to see its scale."""
    again = [asked]
    few = min(one.query.numbers for one in asked)
    for _ in range(min(max(3, math.ceil(DRAWS / few)), 64)):
        watched = Watched(curators.new())
        for one in asked:
            watched.ask(one.query)
        again.append(watched.asked)
    drawn = [{name: value for one in answers for name, value in one.noise.items()} for answers in again]
    scale = noise_outcome(drawn)
    off = sorted({one.query.name for answers in again for one in answers if not one.on_grid})
    wrong = sorted({one.query.name for one in asked if not _as_planned(one)})
    detail = scale.detail + "; all on the grid" * (not off)
    detail += f"; not on the grid: {', '.join(off)}" if off else ""
    detail += f"; an answer states other noise than planned: {', '.join(wrong)}" if wrong else ""
    return Outcome(scale.good and not off and not wrong, detail, {**scale.figures, "off_grid": off, "misstated": wrong})


def _as_planned(asked: Asked) -> bool:
    """Does the answer state the noise of its plan? Rounded up by the last bit."""
    return asked.std <= asked.answer.noise_std / asked.answer.grid <= asked.std * (1 + 1e-12)


def without(people: Sequences, person: int) -> Sequences:
    """The same people, one of them without events."""
    first, end = people.offsets[person], people.offsets[person + 1]
    offsets = people.offsets.copy()
    offsets[person + 1 :] -= end - first
    return Sequences(people.users, np.delete(people.items, np.arange(first, end)), offsets)


def _norm(steps: dict[str, np.ndarray]) -> float:
    return math.sqrt(sum(float(np.sum(value.astype(np.float64) ** 2)) for value in steps.values()))
