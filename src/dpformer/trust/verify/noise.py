"""Do some numbers look like noise of a given size? Each test says how often sound noise fails it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom, chi2

from dpformer.trust.verify.checks import Outcome

FALSE_ALARM = 1e-6
"""How often sound noise fails each of these tests."""


def noise_outcome(drawn: Sequence[Mapping[str, np.ndarray]], where: str = "") -> Outcome:
    """Whether draws, in units of the standard deviation that was planned, have that size, and are new every time.

    drawn: one mapping for each answer, with the same names and shapes in each. Looked at: the root mean square of all numbers,
    and of each array over all draws (chi-square); and the mean product of any two draws.
    """
    if not drawn:
        return Outcome(False, "no answer was given")
    flat = np.stack([np.concatenate([value.ravel() for _, value in sorted(one.items())]) for one in drawn])
    ratio = math.sqrt(float(np.mean(flat**2)))
    low, high = ratio_interval(flat.size, FALSE_ALARM)
    odd = []
    for name in drawn[0]:
        values = np.stack([one[name] for one in drawn])
        bounds = ratio_interval(values.size, FALSE_ALARM / len(drawn[0]))
        if not bounds[0] <= math.sqrt(float(np.mean(values**2))) <= bounds[1]:
            odd.append(name)
    pairs = [(a, b) for k, a in enumerate(flat) for b in flat[:k]]
    again = max((abs(float(np.mean(a * b))) for a, b in pairs), default=0.0)
    repeats = bool(pairs) and again > largest_mean_product(flat.shape[1], FALSE_ALARM / len(pairs))
    detail = f"{flat.size:,} draws{where}: {ratio:.4f} of the planned noise; sound noise is in [{low:.4f}, {high:.4f}]"
    if odd and low <= ratio <= high:
        detail += f"; wrong on {', '.join(odd)}"
    if repeats:
        detail += f"; draws repeat (mean product {again:.2f})"
    figures = {"ratio": ratio, "low": low, "high": high, "draws": flat.size, "wrong": odd, "mean_product": again}
    return Outcome(low <= ratio <= high and not odd and not repeats, detail, figures)


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


def most_zeros(numbers: int, std: float) -> int:
    """How many of so many noises may be exactly 0. std: in grid steps; one is 0 with probability 1 / (std sqrt(2 pi)) at most."""
    return int(binom.isf(FALSE_ALARM, numbers, min(1.0, 1 / (std * math.sqrt(2 * math.pi)))))
