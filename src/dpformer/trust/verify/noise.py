"""The random tests: noise of a given size, and items chosen by a threshold. Each says how often what is sound fails it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType

import numpy as np
from scipy.optimize import brentq
from scipy.stats import chi2, norm

from dpformer.fit.recipe import ITEMS_SHARE, THRESHOLD_SHARE, Recipe
from dpformer.privacy import Curator, make_plan
from dpformer.statistics.item_selection import ITEMS, ItemCounts
from dpformer.trust.verify.checks import NotChecked, Outcome
from dpformer.trust.verify.people import joined
from dpformer.trust.verify.recorder import keys_at, ledger_at

FALSE_ALARM = 2e-7
"""How often sound noise fails all tests of one call, together."""

DRAWS = 2000
"""Numbers of an answer that are wanted: 0.7 of the noise is then 19 standard errors away."""

WEAKEST = 0.7
"""A check that would not notice this much of the noise has no power, and says so."""

# Shorter arrays are compared with others as a part of all numbers only.
_SHORTEST = 64
# How often items are chosen, how many standard deviations the count of a common item is above the threshold, false alarms.
_TRIES, _ABOVE, _ITEMS_ALARM = 20, 8, 1e-7


def noise_outcome(
    drawn: Mapping[str, np.ndarray],
    where: str = "",
    signal: bool = False,
    along: Mapping[str, float] = MappingProxyType({}),
) -> Outcome:
    """Test draws, by label, in units of the standard deviation that was planned.

    Tested: the mean square of each array and of all (chi-square), their mean (Gaussian), the mean product of any two arrays
    (Chernoff). along: further numbers that are standard Gaussians if all is sound, by label. signal: an unknown sum is in the
    numbers, so only too small a mean square tells; a sum can only enlarge it.
    """
    if not drawn:
        raise NotChecked("there is no answer to test")
    parts = {**drawn, "all": np.concatenate(list(drawn.values()))}
    long = [value for value in drawn.values() if value.size >= _SHORTEST]
    pairs = [] if signal else [(a, b) for k, a in enumerate(long) for b in long[:k]]
    each = FALSE_ALARM / (len(parts) * (1 if signal else 2) + len(pairs) + len(along))
    everything = parts["all"]
    ratio = math.sqrt(float(np.mean(everything**2)))
    low, high = ratio_interval(everything.size, each)
    wrong = [name for name, value in parts.items() if not _size_fits(value, each, signal)]
    far = float(norm.isf(each / 2))
    wrong += [f"{name} ({value:.1f} standard deviations)" for name, value in along.items() if abs(value) > far]
    if not signal:
        wrong += [f"{name} (mean)" for name, v in parts.items() if abs(float(v.sum())) > far * math.sqrt(v.size)]
    again, repeated = 0.0, False
    for a, b in pairs:
        n = min(a.size, b.size)
        product = abs(float(np.dot(a[:n], b[:n]))) / n
        again, repeated = max(again, product), repeated or product > largest_mean_product(n, each)
    detail = f"{everything.size:,} numbers{where}: {ratio:.4f} of the planned noise; sound noise is "
    detail += f"above {low:.4f}" if signal else f"in [{low:.4f}, {high:.4f}]"
    detail += f"; wrong: {', '.join(wrong)}" if wrong else ""
    detail += f"; draws repeat (mean product {again:.2f})" if repeated else ""
    hidden = max(0.0, ratio**2 - 1) if signal else 0.0
    seen = WEAKEST**2 * (1 + float(norm.isf(1e-3)) * math.sqrt(2 / everything.size))  # but for one time in a thousand
    if not wrong and not repeated and seen + hidden >= low**2:
        raise NotChecked(f"{detail}. Too few numbers, or too large a sum: {WEAKEST} of the noise would not show")
    figures = {"ratio": ratio, "low": low, "high": high, "numbers": everything.size, "wrong": wrong, "product": again}
    return Outcome(not wrong and not repeated, detail, figures, FALSE_ALARM)


def _size_fits(value: np.ndarray, false_alarm: float, signal: bool) -> bool:
    low, high = ratio_interval(value.size, false_alarm)
    size = math.sqrt(float(np.mean(value**2)))
    return low <= size and (signal or size <= high)


def ratio_interval(n: int, false_alarm: float) -> tuple[float, float]:
    """Where the root mean square of n standard Gaussians lies but for `false_alarm`: chi-square with n degrees of freedom."""
    return float((chi2.ppf(false_alarm / 2, n) / n) ** 0.5), float((chi2.isf(false_alarm / 2, n) / n) ** 0.5)


def largest_mean_product(n: int, false_alarm: float) -> float:
    """What the mean of n products of two independent standard Gaussians exceeds, in absolute value, with `false_alarm` at most.

    By Chernoff: E exp(t Z Z') = (1 - t^2)^(-1/2), so Pr[mean >= x] <= exp(-n (t x + log(1 - t^2) / 2)) at x = t / (1 - t^2).
    """

    def exponent(t: float) -> float:
        return n * (t * t / (1 - t * t) + math.log1p(-t * t) / 2) - math.log(2 / false_alarm)

    t = float(brentq(exponent, 0.0, 1 - 1e-12))
    return t / (1 - t * t)


def items_chosen(recipe: Recipe) -> Outcome:
    """A private catalogue: an item that many share is named each time; items of one person (1, 2 or 5 items) never are.

    On invented people, by Curators with the run's budget.
    One of those is named with probability _TRIES x 3 x threshold_delta at the most, and the common one missed with _TRIES Q(8).
    """
    delta = min(recipe.delta, _ITEMS_ALARM / (3 * _TRIES))
    shares = {ITEMS: ITEMS_SHARE} | ({} if ITEMS_SHARE == 1 else {"others": 1 - ITEMS_SHARE})
    plan = make_plan(2, recipe.epsilon, delta, shares=shares, threshold_delta=THRESHOLD_SHARE * delta)
    sigma, most = plan.releases[0].noise_multiplier, ItemCounts(["a"]).most
    # t with n Q((t - 1 / sqrt(n)) / sigma) <= delta for all n up to `most`, by its definition.
    least = max(1 / math.sqrt(n) + sigma * float(norm.isf(plan.threshold_delta / n)) for n in range(1, most + 1))
    count = math.ceil(least + _ABOVE * sigma)
    parts = [[1]] * count + [[2], [3, 4], [5, 6, 7, 8, 9]]
    people = joined([np.array(part) for part in parts])
    query = ItemCounts([f"item {k}" for k in range(1, 10)])
    answers = [Curator(people, plan, ledger_at(plan, 0), keys_at(0)).ask(query) for _ in range(_TRIES)]
    common = sum("item 1" in answer.labels for answer in answers)
    rare = sum(len(set(answer.labels) - {"item 1"}) for answer in answers)
    low = min((float(v.min()) for answer in answers for v in answer.values.values() if v.size), default=math.inf)
    detail = (
        f"{_TRIES} choices: an item of {count} users is named in {common} of them, items of one user {rare} times; "
    )
    detail += f"the lowest count named is {low:.1f}, the threshold {least:.1f}"
    figures = {"common": common, "rare": rare, "lowest": low, "threshold": least}
    return Outcome(common == _TRIES and rare == 0 and low >= least, detail, figures, _ITEMS_ALARM)
