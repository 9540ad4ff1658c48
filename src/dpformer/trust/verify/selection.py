"""A private catalogue: are items named that only one person has? On invented people, by Curators with the run's budget."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl
from scipy.stats import norm

from dpformer.data import Sequences
from dpformer.fit.recipe import ITEMS_SHARE, THRESHOLD_SHARE, Recipe
from dpformer.privacy import Answer, make_plan
from dpformer.statistics.item_selection import ITEMS, ItemCounts
from dpformer.trust.verify.checks import Outcome
from dpformer.trust.verify.watch import Curators

# How often the items are chosen, and how many standard deviations above the threshold the count of the common item is.
TRIES, ABOVE = 20, 8


def items_chosen(folder: Path, recipe: Recipe) -> Outcome:
    """Many people share an item, which is named each time; each of three has items of their own, which never are.

    Each of the three has 1, 2 and 5 such items. All are named together with probability TRIES x 3 x delta's part at the most.
    """
    delta = min(recipe.delta, 1e-6)
    rest = {} if ITEMS_SHARE == 1 else {"others": 1 - ITEMS_SHARE}
    plan = make_plan(
        2, recipe.epsilon, delta, shares={ITEMS: ITEMS_SHARE, **rest}, threshold_delta=THRESHOLD_SHARE * delta
    )
    sigma = plan.releases[0].noise_multiplier
    most = ItemCounts(["a"]).most
    least = _threshold(sigma, plan.threshold_delta, most)
    count = math.ceil(least + ABOVE * sigma)
    parts = [[1]] * count + [[2], [3, 4], [5, 6, 7, 8, 9]]
    people = Sequences(
        pl.Series("user_id", [str(k) for k in range(len(parts))]),
        np.concatenate(parts).astype(np.int32),
        np.concatenate([[0], np.cumsum([len(part) for part in parts])]),
    )
    curators = Curators(people, plan, folder, recipe.seed)
    query = ItemCounts([f"item {k}" for k in range(1, 10)])
    try:
        answers: list[Answer] = [curators.new().ask(query) for _ in range(TRIES)]
    finally:
        curators.close()
    common = sum("item 1" in answer.labels for answer in answers)
    rare = sum(len(set(answer.labels) - {"item 1"}) for answer in answers)
    low = min(
        (float(value.min()) for answer in answers for value in answer.values.values() if value.size), default=math.inf
    )
    return Outcome(
        common == TRIES and rare == 0 and low >= least,
        f"{TRIES} choices: an item of {count} users is named in {common} of them, items of one user {rare} times; the lowest "
        f"count named is {low:.1f}, the threshold {least:.1f}",
        {"common": common, "rare": rare, "lowest": low, "threshold": least},
    )


def _threshold(sigma: float, delta: float, most: int) -> float:
    """t with n Q((t - 1 / sqrt(n)) / sigma) <= delta for all n up to `most`, by its definition."""
    return max(1 / math.sqrt(n) + sigma * float(norm.isf(delta / n)) for n in range(1, most + 1))
