"""The slack m 2^-21 on people who make it as large as they can: many who agree, and one whose leaving regroups them.

Identical short histories add up without cancelling, so that the rounding of a long float32 sum grows with its length; one long
history widens the padding of all others and changes how they are cut into micro-batches.
"""

import numpy as np
import polars as pl
import pytest
import torch

from dpformer.clipping import PhantomClipping, sums, tiles
from dpformer.clipping import algebra as forms
from dpformer.clipping import tied as stream
from dpformer.data import Sequences, batches, collate
from dpformer.fit.gradient_sum import GradientSum
from dpformer.fit.presets import make_recipe
from dpformer.fit.workers import Team, Worker
from dpformer.models import build
from dpformer.privacy import Sample
from dpformer.privacy.query import grid_step
from dpformer.training.groups import FLOAT32_SLACK, Groups

ITEMS, PEOPLE, FINE = 200, 600, 2.0**-40


def people(histories: list[np.ndarray]) -> Sequences:
    offsets = np.concatenate([[0], np.cumsum([len(h) for h in histories])]).astype(np.int64)
    items = np.concatenate([*histories, np.empty(0, dtype=np.int64)]).astype(np.int32)
    return Sequences(pl.Series("user_id", range(len(histories))), items, offsets)


def query(rule: str, wobble: float) -> GradientSum:
    torch.manual_seed(1)
    model = build(make_recipe("pure", d=16, max_length=20, vocabulary=ITEMS).network.spec(ITEMS))
    model.choose(torch.rand(ITEMS + 1) + 0.01, bias=True)
    for p in model.parameters():
        p.data += wobble * torch.randn_like(p)
    model.train()
    team = Team(Worker(model, PhantomClipping(model, 1.0, rule)), 1)
    return GradientSum(team, Groups(PEOPLE, PEOPLE), 20, 8192)


def total(asked: GradientSum, histories: list[np.ndarray], grid: float) -> np.ndarray:
    sums = asked.sum(people(histories), Sample(np.arange(len(histories)), b""), grid)
    return np.concatenate([value.ravel() for _, value in sorted(sums.items())]).astype(np.float64)


def leaving(asked: GradientSum) -> tuple[float, float, float]:
    """In units of C: how far the sum moves when the long person leaves, what of it is the others', and what is claimed."""
    short = np.random.default_rng(1).integers(1, ITEMS + 1, 6)
    long, nothing = np.tile(short, 4)[:21], short[:0]
    with_, without = [short] * (PEOPLE - 1) + [long], [short] * (PEOPLE - 1) + [nothing]
    own = [nothing] * (PEOPLE - 1) + [long]
    grid = grid_step(asked.bound, asked.numbers)
    moved = float(np.linalg.norm(total(asked, with_, grid) - total(asked, without, grid)))
    others = total(asked, with_, FINE) - total(asked, without, FINE) - total(asked, own, FINE)
    return moved * grid, float(np.linalg.norm(others)) * FINE, asked.sensitivity(grid) * grid


@pytest.mark.parametrize("rule", ["flat", "automatic"])
@pytest.mark.parametrize("wobble", [0.0, 0.3])
def test_people_who_agree_stay_within_the_slack(rule, wobble):
    moved, others, claimed = leaving(query(rule, wobble))
    assert moved <= claimed
    assert others <= PEOPLE * FLOAT32_SLACK


def groups_by_the_longest(lengths, most, d, route):
    """As it was: samples of a group are padded to the longest of them."""
    groups, start, k = [], 0, 0
    while k < len(lengths) and lengths[k] > 0:
        n = min(len(lengths) - k, max(1, most // lengths[k]))
        groups.append(tiles.Group(n, lengths[k], start, k, kept=False))
        start, k = start + n * lengths[k], k + n
    return groups


def test_one_long_sum_in_float32_would_not(monkeypatch):
    """The control: as it was, without blocks in float64, and with people of all lengths in one micro-batch."""
    monkeypatch.setattr(batches, "class_widths", lambda max_length, narrowest: np.full(max_length + 1, max_length))
    monkeypatch.setattr(tiles, "_groups", groups_by_the_longest)
    monkeypatch.setattr(batches, "collate", lambda people, users, max_length, width: collate(people, users, max_length))
    monkeypatch.setattr(sums, "BLOCK", 10**9)
    monkeypatch.setattr(stream, "BLOCK", 10**9)
    monkeypatch.setattr(forms, "add_to_rows", lambda out, rows, values: out.index_add_(0, rows, values))
    _, others, _ = leaving(query("flat", 0.3))
    assert others > PEOPLE * FLOAT32_SLACK
