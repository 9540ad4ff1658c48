"""People who are alike round alike: what one person's leaving changes for each of them adds up."""

import math

import numpy as np
import polars as pl
import pytest
import torch

from dpformer.clipping import PhantomClipping
from dpformer.data import Sequences
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.presets import make_recipe
from dpformer.fit.workers import Team, Worker
from dpformer.models import build
from dpformer.privacy import Sample
from dpformer.training.groups import CLIP_SLACK, FLOAT32_SLACK, Groups
from dpformer.trust.verify.people import emptied

ITEMS = 300
# Fine enough that rounding to it does not show.
GRID = 2.0**-40


def people(lists: list[np.ndarray]) -> Sequences:
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])]).astype(np.int64)
    return Sequences(pl.Series("user_id", range(len(lists))), np.concatenate(lists).astype(np.int32), offsets)


def moved(network: torch.nn.Module, everybody: Sequences, leaving: int) -> float:
    """|S(all) - S(without one) - S(that one)| / C: what the leaving changes in the sum of the others."""
    count = len(everybody)
    worker = Worker(network, PhantomClipping(network))
    query = GradientSum(Team(worker, 1), Groups(count, count), network.spec.max_length, 16384)

    def total(who: Sequences, drawn: np.ndarray) -> dict[str, np.ndarray]:
        return {name: value * GRID for name, value in query.sum(who, Sample(drawn, bytes(32)), GRID).items()}

    places = np.arange(count)
    both, rest = total(everybody, places), total(emptied(everybody, [leaving]), places)
    alone = total(everybody, np.array([leaving]))
    return math.sqrt(sum(float(((both[name] - rest[name] - alone[name]) ** 2).sum()) for name in both))


@pytest.mark.parametrize("model", ["transformer", "gru"])
@pytest.mark.parametrize("longer", [0, 1, 2])
def test_alike_people_stay_within_a_quarter_of_the_slack(model, longer):
    """Initial weights, as in the first step; the one who leaves is as long as the others, or longer."""
    recipe = make_recipe("paper", model=model, reattention="off", dropout=0.0, d=32, blocks=1, max_length=50)
    torch.manual_seed(1)
    network = build(recipe.network.spec(ITEMS)).train()
    random = np.random.default_rng(5)
    count, worst = 600, 0.0
    for repeated in (False, True):
        length = int(random.integers(3, 9))
        alike = np.full(length, 1) if repeated else np.arange(1, length + 1)
        lists = [alike] * (count - 1) + [random.integers(1, ITEMS + 1, length + longer)]
        worst = max(worst, moved(network, people(lists), count - 1))
    assert worst <= (CLIP_SLACK + count * FLOAT32_SLACK) / 4
