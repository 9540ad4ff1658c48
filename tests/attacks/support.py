"""The floating-point attack: which sums can the released numbers come from, and which not?

A released number is a function of c + n: c what everybody but the target adds, and the target or not; n the noise. The attacker
knows c under both hypotheses. If no value that the noise can take leads from c to what was released, the hypothesis is refuted,
with certainty and by a single number. Noise that can be any step of a grid, with sums that are whole steps of the same grid,
refutes nothing.

Two released forms are attacked: scores that are the noisy histogram in float32 (`--preset popularity`), and the prior of the
default preset, float32 of .1 log (h / mean of h), in which the mean is one more unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dpformer.trust.audit import attacks

# Candidates for the mean that are tried at the most, and at one time.
_MOST, _AT_ONCE = 20_000_000, 1 << 18
# Other people's items by which the mean is found.
_OTHERS = 100


class Noise(Protocol):
    """All values that some noise can take."""

    def at_least(self, low: np.ndarray) -> np.ndarray:
        """The least value from `low` on."""
        ...

    def after(self, value: np.ndarray) -> np.ndarray:
        """The value that follows."""
        ...

    def between(self, low: float, high: float) -> np.ndarray | None:
        """All values from low to high; None if there are too many to hold."""
        ...


class Float32Noise(attacks.Float32Noise):
    """std times a float32."""

    def after(self, value: np.ndarray) -> np.ndarray:
        return self.std * np.nextafter((value / self.std).astype(np.float32), np.float32(np.inf)).astype(np.float64)

    def between(self, low: float, high: float) -> np.ndarray | None:
        first, last = (_rank(np.float32(end / self.std)) for end in (low, high))
        if last - first > _MOST:
            return None
        ranks = np.arange(first, last + 1)
        bits = np.where(ranks >= 0, ranks, -ranks | 0x80000000).astype(np.uint32)
        return self.std * bits.view(np.float32).astype(np.float64)


class GridNoise(attacks.GridNoise):
    """Whole steps of a grid."""

    def after(self, value: np.ndarray) -> np.ndarray:
        return value + self.grid

    def between(self, low: float, high: float) -> np.ndarray | None:
        first, last = np.ceil(low / self.grid), np.floor(high / self.grid)
        return None if last - first > _MOST else np.arange(first, last + 1) * self.grid


@dataclass(frozen=True)
class Target:
    """One person: the distinct items, and what the person adds to each if in. others: what all others add, [items + 1]."""

    own: np.ndarray
    value: float
    others: np.ndarray


def attack_scores(scores: np.ndarray, noise: Noise, target: Target) -> str:
    """ "in", "out", "?" (cannot tell) or "neither" for scores float32 [items + 1], the noisy histogram itself."""
    seen, others = scores[target.own], target.others[target.own]
    ulp = np.spacing(np.abs(seen)).astype(np.float64)

    def possible(c: np.ndarray) -> bool:
        # What rounds to the number that was seen lies within half a step of it. A few values around either end are tried.
        value = noise.at_least(seen.astype(np.float64) - 0.5 * ulp - c)
        fits = (c + value).astype(np.float32) == seen
        for _ in range(2):
            value = noise.after(value)
            fits |= (c + value).astype(np.float32) == seen
        return bool(fits.all())

    return _verdict(possible(others + target.value), possible(others))


class PriorAttack:
    """On head [P] and prior float32 [P]: .1 log (h / mean h) of noisy counts h, with a floor. std: of the noise."""

    def __init__(self, head: np.ndarray, prior: np.ndarray, weight: float, std: float, noise: Noise) -> None:
        self.head, self.std, self.noise = head, std, noise
        exact, ulp = prior.astype(np.float64), np.spacing(np.abs(prior)).astype(np.float64)
        self.ratio = np.exp(exact / weight)  # h / mean
        self.low = np.exp((exact - 0.5 * ulp) / weight) * (1 - 1e-14)
        self.high = np.exp((exact + 0.5 * ulp) / weight) * (1 + 1e-14)

    def verdict(self, target: Target, mean: float | None = None) -> str:
        """ "in", "out", "?" or "neither". mean: of the noisy counts, for an attacker who is even given it."""
        c = target.others[self.head]
        mine = np.isin(self.head, target.own)
        about, spread = self._about(c)
        # How telling an item is: gaps between the noise's values, in widths of what rounds to the number that was seen.
        z = about * self.ratio - c
        start = self.noise.at_least(z)
        telling = (self.noise.after(start) - start) / (about * (self.high - self.low))
        telling[about * self.ratio <= 1.2 * (0.3 * self.std + 0.5)] = 0  # the floor
        order = np.argsort(-telling)
        if mean is None:
            means = self._means(c, [i for i in order if not mine[i]][:_OTHERS], telling, about, spread)
            if means is None:
                return "?"
            low, high = means
        else:
            low, high = np.array([mean * (1 - 1e-12)]), np.array([mean * (1 + 1e-12)])
        if not len(low):
            return "neither"
        held = [i for i in order if mine[i] and telling[i] > (1.02 if mean is None else 0)]
        could_be = {}
        for name, added in (("in", target.value), ("out", 0.0)):
            alive = np.ones(len(low), dtype=bool)
            for i in held:
                alive &= self._fit(low, high, i, c[i] + added)[0]
            could_be[name] = bool(alive.any())
        return _verdict(could_be["in"], could_be["out"])

    def _about(self, c: np.ndarray) -> tuple[float, float]:
        """The mean by the large counts, and five standard deviations of that."""
        large = c >= np.sort(c)[-max(50, len(c) // 4)]
        total = self.ratio[large].sum()
        return float(c[large].sum() / total), float(5 * self.std * np.sqrt(large.sum()) / total)

    def _means(
        self, c: np.ndarray, others: list[int], telling: np.ndarray, about: float, spread: float
    ) -> tuple[np.ndarray, np.ndarray] | None:
        """Intervals of the mean that all these items allow, whatever the target did; None if there are too many."""

        def ends(i: int) -> tuple[float, float]:
            return float((about - spread) * self.ratio[i] - c[i]), float((about + spread) * self.ratio[i] - c[i])

        candidates = [
            (values, i) for i in others[:20] if telling[i] > 2 and (values := self._count(*ends(i))) is not None
        ]
        if not candidates:
            return None
        _, first = min(candidates)
        values = self.noise.between(*ends(first))
        if values is None:
            return None
        parts = [self._left(c, others, first, part) for part in np.array_split(values, 1 + len(values) // _AT_ONCE)]
        low, high = (np.concatenate(ends) for ends in zip(*parts, strict=True))
        return None if len(low) > 1000 else (low, high)

    def _left(self, c: np.ndarray, others: list[int], first: int, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What the other items leave of the means that some values of the first item's noise would give."""
        h = c[first] + values
        low, high = h / self.high[first], h / self.low[first]
        for i in others:
            if i != first and len(low):
                fits, low, high = self._fit(low, high, i, c[i])
                low, high = low[fits], high[fits]
        return low, high

    def _count(self, low: float, high: float) -> int | None:
        if isinstance(self.noise, Float32Noise):
            return _rank(np.float32(high / self.std)) - _rank(np.float32(low / self.std))
        return None

    def _fit(self, low: np.ndarray, high: np.ndarray, i: int, c: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Which of these means an item allows that all others give c, and what is left of them."""
        least, most = low * self.low[i] - c, high * self.high[i] - c
        value = self.noise.at_least(least)
        fits = value <= most
        single = fits & (self.noise.after(value) > most)
        h = c + value
        low = np.where(single, np.maximum(low, h / self.high[i]), low) * (1 - 1e-15)
        high = np.where(single, np.minimum(high, h / self.low[i]), high) * (1 + 1e-15)
        return fits & (low <= high), low, high


def _verdict(could_be_in: bool, could_be_out: bool) -> str:
    if could_be_in == could_be_out:
        return "?" if could_be_in else "neither"
    return "in" if could_be_in else "out"


def _rank(z: np.float32) -> int:
    """The place of a float32 among all of them; 0 has 0."""
    bits = int(z.view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)
