"""What one person's leaving changes in the float32 arithmetic of the others: the assumption of `fit.gradient_sum`, measured.

The noise has room for (1e-6 + m 2^-21) C, m people at the most in a group: 1e-6 for the person's own rounding, the rest for the
others. Measured on one group of people, with the released weights, are both together:

    |S(with) - S(without) - S(alone)| / C

S is the clipped sum of the group in float32, before it is rounded to the grid. With and without one person's events the group is
cut into other micro-batches, so all that others get of the person is in it.
"""

from __future__ import annotations

import copy
import math

import numpy as np
from torch import Tensor

from dpformer.clipping import PhantomClipping
from dpformer.data import Dataset, Sequences
from dpformer.fit.dpsgd import Optimisation
from dpformer.fit.gradient_sum import CLIP_SLACK, FLOAT32_SLACK, GradientSum, Groups
from dpformer.fit.recipe import Recipe
from dpformer.fit.workers import Team, Worker
from dpformer.models import Network
from dpformer.privacy import Keys, PrivacyStatement, Sample
from dpformer.privacy.noise import poisson_draw
from dpformer.trust.verify.answers import without
from dpformer.trust.verify.checks import NotChecked, Outcome
from dpformer.trust.verify.scratch import SEED, invented

PEOPLE = 8
"""How many people of the group leave in turn."""

MOST = 0.25
"""The share of the room that may be used."""

# Fine enough that rounding to it does not show: 2^-40 C.
FINE_BITS = 40


def query_of(network: Network, recipe: Recipe, statement: PrivacyStatement) -> GradientSum:
    """The query of a run's steps, with its released weights."""
    if not statement.private or statement.steps is None:
        raise NotChecked("the run made no private steps: nothing is added up in float32")
    model = copy.deepcopy(network).float().train()
    how = Optimisation.of(recipe)
    worker = Worker(model, PhantomClipping(model, how.max_norm, how.rule))
    positions = statement.steps.expected_batch_size * (how.max_length + 1)
    groups = Groups.of(statement.users, statement.steps.sampling_rate)
    return GradientSum(Team(worker, positions), groups, how.max_length, how.token_budget)


def a_group(
    dataset: Dataset | None, recipe: Recipe, statement: PrivacyStatement, items: int
) -> tuple[Sequences, np.ndarray]:
    """People, and the places of those drawn from one group as the plan draws. Without the data they are invented."""
    assert statement.steps is not None
    rate = statement.steps.sampling_rate
    groups = Groups.of(statement.users, rate)
    if dataset is None:
        count = max(1, round(min(groups.block, statement.users) * rate))
        people = invented(items, Optimisation.of(recipe).max_length + 1, count)
        return people, np.arange(min(len(people), groups.most))
    people = dataset.train(recipe.hold_out)
    drawn = groups.split(poisson_draw(Keys().sample(), len(people), rate))
    if not drawn:
        raise NotChecked("nobody was drawn; verify again")
    largest = max(drawn.values(), key=len)
    return _only(people, largest), np.arange(len(largest))


def float32_slack(query: GradientSum, people: Sequences, drawn: np.ndarray, invented_people: bool) -> Outcome:
    """Some people leave the group in turn, the longest and the shortest among them."""
    grid = math.ldexp(1.0, math.frexp(query.bound)[1] - 1 - FINE_BITS)
    key = Keys(SEED).dropout()

    def total(others: Sequences, places: np.ndarray) -> dict[str, Tensor | np.ndarray]:
        return {name: value * grid for name, value in query.sum(others, Sample(places, key), grid).items()}

    learning = drawn[query._rows(people).lengths[drawn] > 1]
    if not len(learning):
        raise NotChecked("nobody of the group has two items that the network knows")
    order = learning[np.argsort(people.lengths[learning], kind="stable")]
    leaving = np.unique(order[np.linspace(0, len(order) - 1, min(PEOPLE, len(order))).astype(np.int64)])
    all_users = total(people, drawn)
    worst = 0.0
    for person in leaving:
        rest, alone = total(without(people, int(person)), drawn), total(people, np.array([person]))
        off = sum(float(np.sum((all_users[n] - rest[n] - alone[n]) ** 2)) for n in all_users)
        worst = max(worst, math.sqrt(off) / query.bound)
    room = CLIP_SLACK + query.groups.most * FLOAT32_SLACK
    who = "invented people" if invented_people else "people of the data"
    return Outcome(
        worst <= MOST * room,
        f"{len(leaving)} of {len(drawn)} {who} in a group left in turn: the others' sum moved by {worst:.1e} C at the most; the "
        f"noise has room for {room:.1e} C ({room / max(worst, 1e-300):.0f} times that; at least {1 / MOST:g} is wanted)",
        {"people": len(leaving), "group": len(drawn), "moved": worst, "room": room, "invented": invented_people},
    )


def _only(people: Sequences, places: np.ndarray) -> Sequences:
    offsets = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(people.lengths[places])])
    items = np.concatenate([people[int(k)] for k in places])
    return Sequences(people.users.gather(places), items, offsets)
