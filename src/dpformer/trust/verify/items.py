"""A private catalogue: are items named that only one person has? On invented people, by Curators with the run's budget."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import norm

from dpformer.fit.recipe import ITEMS_SHARE, THRESHOLD_SHARE, Recipe
from dpformer.privacy import Curator, make_plan
from dpformer.statistics.item_selection import ITEMS, ItemCounts
from dpformer.trust.verify.checks import Outcome
from dpformer.trust.verify.people import joined
from dpformer.trust.verify.recorder import keys_at, ledger_at

# How often the items are chosen, and how many standard deviations above the threshold the count of the common item is.
TRIES, ABOVE = 20, 8
FALSE_ALARM = 1e-7


def items_chosen(recipe: Recipe) -> Outcome:
    """Many people share an item, which is named each time; each of three has 1, 2 or 5 items of their own, which never are.

    One of those is named with probability TRIES x 3 x threshold_delta at the most, and the common one missed with TRIES Q(8).
    """
    delta = min(recipe.delta, FALSE_ALARM / (3 * TRIES))
    shares = {ITEMS: ITEMS_SHARE} | ({} if ITEMS_SHARE == 1 else {"others": 1 - ITEMS_SHARE})
    plan = make_plan(2, recipe.epsilon, delta, shares=shares, threshold_delta=THRESHOLD_SHARE * delta)
    sigma, most = plan.releases[0].noise_multiplier, ItemCounts(["a"]).most
    # t with n Q((t - 1 / sqrt(n)) / sigma) <= delta for all n up to `most`, by its definition.
    least = max(1 / math.sqrt(n) + sigma * float(norm.isf(plan.threshold_delta / n)) for n in range(1, most + 1))
    count = math.ceil(least + ABOVE * sigma)
    parts = [[1]] * count + [[2], [3, 4], [5, 6, 7, 8, 9]]
    people = joined([np.array(part) for part in parts])
    query = ItemCounts([f"item {k}" for k in range(1, 10)])
    answers = [Curator(people, plan, ledger_at(plan, 0), keys_at(0)).ask(query) for _ in range(TRIES)]
    common = sum("item 1" in answer.labels for answer in answers)
    rare = sum(len(set(answer.labels) - {"item 1"}) for answer in answers)
    low = min((float(v.min()) for answer in answers for v in answer.values.values() if v.size), default=math.inf)
    return Outcome(
        common == TRIES and rare == 0 and low >= least,
        f"{TRIES} choices: an item of {count} users is named in {common} of them, items of one user {rare} times; the lowest "
        f"count named is {low:.1f}, the threshold {least:.1f}",
        {"common": common, "rare": rare, "lowest": low, "threshold": least},
        FALSE_ALARM,
    )
