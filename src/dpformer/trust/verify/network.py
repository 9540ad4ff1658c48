"""The network that a run released: its clipping against a loop over users, and what float32 changes when one user leaves."""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn

from dpformer.artifact import Artifact
from dpformer.data import Dataset, Sequences
from dpformer.fit.dpsgd import Optimisation
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.recipe import Recipe
from dpformer.fit.workers import Team, Worker
from dpformer.models import Network
from dpformer.privacy import Keys, Sample
from dpformer.privacy.noise import poisson_draw
from dpformer.training.groups import Groups
from dpformer.trust.verify.checks import NotChecked, Outcome, Verification
from dpformer.trust.verify.clipping import Losses, Subject, check_clipping
from dpformer.trust.verify.people import absent, emptied, joined, without_data
from dpformer.trust.verify.recorder import flat

# How many people of a group leave in turn; the share of the room that may be used; a grid too fine for rounding to show.
LEAVING, SHARE_OF_ROOM, FINE_BITS = 8, 0.25, 40


def check_network(
    verification: Verification, artifact: Artifact, recipe: Recipe, few: Sequences, dataset: Dataset | None
) -> None:
    """The clipping of the released weights on a few people, and float32 on one group of the data's people."""
    network, how = artifact.model.trained_network(), Optimisation.of(recipe)
    assert network is not None
    losses = losses_of(Worker(copy.deepcopy(network), None))
    samples, scales = (tokens_of(few, how.max_length, network),), how.clipping(network).scales
    subject = Subject(network, losses, samples, definition, how.max_norm, how.rule, scales)
    if check_clipping(verification, subject, may_freeze=False):
        verification.check("float32 slack", _float32, artifact, network, recipe, dataset)
    else:
        verification.skip("the clipping refuses this model; see 'parameters recorded'", "float32 slack")


def losses_of(worker: Worker) -> Losses:
    """The losses that a worker trains with, of any copy of its model."""

    def losses(module: nn.Module, tokens: Tensor) -> Tensor:
        twin = copy.copy(worker)
        twin.model = module  # type: ignore[assignment]
        return twin.losses(tokens)

    return losses


def definition(module: nn.Module, tokens: Tensor) -> Tensor:
    """One user's loss from its definition, without padding: the mean of -log softmax over the items that follow, `[1]`."""
    tokens = tokens[:, : int((tokens > 0).sum())]
    if tokens.shape[1] < 2:
        return sum(p.sum() * 0.0 for p in module.parameters()).reshape(1)  # type: ignore[union-attr]
    states = module.states(tokens[:, :-1])  # type: ignore[operator]
    logits = states[0] @ module.table[1:].T + module.table_bias[1:]  # type: ignore[index]
    return nn.functional.cross_entropy(logits, tokens[0, 1:] - 1).reshape(1)


def tokens_of(people: Sequences, max_length: int, model: Network) -> Tensor:
    """All of a few people, `[N, L + 1]`: rows of the model's vocabulary, other items left out."""
    places = model.places().numpy()
    rows = [[int(places[i]) for i in one if places[i] > 0] for one in people]
    L = max_length + 1
    tokens = torch.zeros(len(rows), max(1, *(min(L, len(one)) for one in rows)), dtype=torch.int64)
    for k, one in enumerate(rows):
        last = one[-L:]
        tokens[k, : len(last)] = torch.tensor(last, dtype=torch.int64)
    return tokens


def _float32(artifact: Artifact, network: Network, recipe: Recipe, dataset: Dataset | None) -> Outcome:
    """The query of the run's steps with the released weights, on one group of people, drawn as the plan draws."""
    statement = artifact.statement
    if not statement.private or statement.steps is None:
        raise NotChecked("the run made no private steps: nothing is added up in float32")
    how, rate = Optimisation.of(recipe), statement.steps.sampling_rate
    groups = Groups.of(statement.users, rate, statement.users_declared)
    # Masks of dropout belong to places. Where people move up they get others, of the same law: nothing that rounding did.
    model = copy.deepcopy(network).float().train(groups.touched == 1)
    positions = statement.steps.expected_batch_size * (how.max_length + 1)
    team = Team(Worker(model, how.clipping(model)), positions)
    people, drawn = _group(dataset, recipe, groups, rate, len(artifact.catalogue))
    who = "invented people" if dataset is None else "people of the data"
    return float32_slack(GradientSum(team, groups, how.max_length, how.token_budget), people, drawn, who)


def float32_slack(query: GradientSum, people: Sequences, drawn: np.ndarray, who: str) -> Outcome:
    """|S(with) - S(without) - S(alone)| / C in float32, before rounding to the grid, for some people in turn.

    people: of one group, or of all groups where a person's leaving touches all of them (a declared population). The noise has
    room for (1e-6 + t m 2^-21) C, m people at the most in each of t groups: see `training.groups`. One person has a loss that is
    not a number: the clipping must set it aside, so that this person's leaving changes nothing.
    """
    grid, key = math.ldexp(1.0, math.frexp(query.bound)[1] - 1 - FINE_BITS), bytes(32)

    def total(others: Sequences, drawn: np.ndarray = drawn) -> np.ndarray:
        return flat(query.sum(others, Sample(drawn, key), grid)) * (grid / query.bound)

    def without(person: int) -> np.ndarray:
        return total(*absent(people, drawn, person)) if query.groups.touched > 1 else total(emptied(people, [person]))

    rows = query._rows(people)
    learning = drawn[rows.lengths[drawn] > 1]
    if not len(learning):
        raise NotChecked("nobody of the group has two items that the network knows")
    order = learning[np.argsort(people.lengths[learning], kind="stable")]
    leaving = np.unique(order[np.linspace(0, len(order) - 1, min(LEAVING, len(order))).astype(np.int64)])
    everybody, moved, with_all = np.arange(len(people)), [], total(people)
    for person in leaving:
        rest, alone = without(int(person)), total(emptied(people, np.delete(everybody, person)))
        moved.append(np.linalg.norm(with_all - rest - alone))
    worst = float(np.max(moved))
    where = "a group" if query.groups.touched == 1 else "all groups"
    # The longest who has a neighbour in the same micro-batch: alone, a batch that is left out would not show; and long people
    # are unlike each other, while of two with the same items both would be spoiled.
    lengths, counts = np.unique(rows.lengths[learning], return_counts=True)
    shared = lengths[counts == counts.max()] if counts.max() == 1 else lengths[counts > 1]
    spoiled = int(learning[rows.lengths[learning] == shared[-1]][0])
    _spoil(query.team.first, torch.from_numpy(rows[spoiled].astype(np.int64)))
    nan = float(np.linalg.norm(total(people) - without(spoiled)))
    room = query.groups.slack
    return Outcome(
        worst <= SHARE_OF_ROOM * room and nan <= SHARE_OF_ROOM * room,
        f"{len(leaving)} of {len(drawn)} {who} in {where} left in turn: the others' sum moved by {worst:.1e} C at the most, by "
        f"{nan:.1e} C when one with a loss of NaN left; {SHARE_OF_ROOM * room:.1e} C may be used of the room in the noise",
        {"people": len(leaving), "group": len(drawn), "moved": worst, "nan": nan, "room": room},
    )


def _group(
    dataset: Dataset | None, recipe: Recipe, groups: Groups, rate: float, items: int
) -> tuple[Sequences, np.ndarray]:
    """People, and the places of those drawn as the plan draws: of one group, or of all if leaving touches all.

    Without the data they are invented.
    """
    if dataset is None:
        people = without_data(items, Optimisation.of(recipe).max_length + 1)
        return people, np.arange(min(len(people), groups.most))
    people = dataset.train(recipe.hold_out)
    drawn = groups.split(poisson_draw(Keys().sample(), len(people), rate))
    if not drawn:
        raise NotChecked("nobody was drawn; verify again")
    if groups.touched > 1:
        return people, np.concatenate(list(drawn.values()))
    largest = max(drawn.values(), key=len)
    first = int(largest[0]) // groups.block * groups.block
    inside = np.arange(first, min(first + groups.block, len(people)))
    return joined([people[int(k)] for k in inside]), largest - first


def _spoil(worker: Worker, items: Tensor) -> None:
    """Give everybody whose last items are these a loss of NaN."""
    plain = worker.losses

    def losses(tokens: Tensor) -> Tensor:
        alike = torch.tensor([bool(torch.equal(row[row > 0], items[-tokens.shape[1] :])) for row in tokens])
        return plain(tokens) * torch.where(alike, torch.nan, 1.0)

    worker.losses = losses  # type: ignore[method-assign]
