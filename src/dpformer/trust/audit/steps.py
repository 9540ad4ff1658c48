"""Single steps, white-box: answers with and without a canary, and the mu that they show.

The clipped sums are made by the query of the audited training on real users: with the canary, and with the canary's events
replaced by none. They do not change from trial to trial; the noise does. Each trial is an answer of a real Curator with keys of
its own; its ledger is kept in memory. See `step_audit` for the estimate and its interval.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from scipy.stats import norm

from dpformer.privacy import Charge, Curator, Keys, PrivacyPlan, Sample, epsilon
from dpformer.privacy.chain import Chain, Line, Position
from dpformer.privacy.curator import Noise
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.plan import GRADIENTS
from dpformer.privacy.query import grid_step
from dpformer.trust.audit.step_audit import StepAudit, audit_step

CONFIDENCE = 0.999
SMALLEST_EXCESS = 0.2
"""The audit is planned to see a contribution that is larger by this share."""

Sums = Mapping[str, np.ndarray]
"""int64 arrays by name, in steps of the grid."""

# The plan of a trial: one step over all users; their number does not matter.
_USERS, _DELTA = 10, 1e-5


@dataclass(frozen=True)
class FixedSum:
    """A query of a step whose sum is known already. steps: its sensitivity, in steps of the grid."""

    sums: Sums
    bound: float
    steps: float
    name: str = GRADIENTS

    @property
    def numbers(self) -> int:
        """How many numbers the answer has."""
        return sum(value.size for value in self.sums.values())

    def sensitivity(self, grid: float) -> float:
        """As it was given."""
        return self.steps

    def sum(self, people: Any, sample: Sample, grid: float) -> Sums:
        """The sum, whichever users were drawn."""
        return self.sums


class InMemory(Chain):
    """The chain of a ledger that is not written anywhere: nothing that it charges is released."""

    def __init__(self) -> None:
        self.position = Position(0, "")

    def append(self, fields: Line) -> None:
        """Count a line."""
        self.position = Position(self.position.entries + 1, "")

    def close(self) -> None:
        """There is nothing to close."""


def trials_for(sigma: float) -> int:
    """Trials that show an excess of a fifth: the standard error sqrt(2/n) of mu is a sixth of 0.2 / sigma."""
    return int(np.clip(2 * (6 * sigma / SMALLEST_EXCESS) ** 2, 500, 20_000))


def power(claimed: float, true: float, trials: int, confidence: float = CONFIDENCE) -> float:
    """How surely an interval from so many trials leaves the claim out when mu is `true` (normal approximation)."""
    error = math.sqrt(2 / trials + true**2 / (4 * trials))
    return float(norm.cdf(abs(true - claimed) / error - norm.isf((1 - confidence) / 2)))


@dataclass(frozen=True)
class Canary:
    """A step's sum without a canary, what the canary adds to it, the clipping norm C and the sensitivity of the query."""

    others: Sums
    own: Sums
    bound: float
    steps: float

    @classmethod
    def of_floats(cls, others: Mapping[str, torch.Tensor], own: Mapping[str, torch.Tensor], bound: float) -> Canary:
        """Sums in numbers, put on the grid; the sensitivity is `bound`."""
        grid = grid_step(bound, sum(value.numel() for value in own.values()))
        rounded = [
            {name: np.rint(v.double().numpy() / grid).astype(np.int64) for name, v in s.items()} for s in (others, own)
        ]
        return cls(rounded[0], rounded[1], bound, bound / grid)

    @property
    def grid(self) -> float:
        """The grid of the answers."""
        return grid_step(self.bound, sum(value.size for value in self.own.values()))

    @property
    def size(self) -> float:
        """The norm of what the canary adds, over C."""
        return (
            math.sqrt(sum(float(np.sum(v.astype(np.float64) ** 2)) for v in self.own.values())) * self.grid / self.bound
        )

    def flat(self) -> Canary:
        """All arrays in one: an answer is then one draw of noise, with the same law."""
        others, own = ({"all": np.concatenate([s[n].ravel() for n in sorted(s)])} for s in (self.others, self.own))
        return Canary(others, own, self.bound, self.steps)

    def times(self, factor: int) -> Canary:
        """The defect: the canary adds so many times as much."""
        own = {name: factor * value for name, value in self.own.items()}
        return Canary(self.others, own, self.bound, self.steps)


def measure(canary: Canary, sigma: float, trials: int, seed: int, noise: Noise = rounded_gaussian) -> StepAudit:
    """Audit the answers of a Curator, with the canary and without it, against the claim 1 / sigma."""
    canary = canary.flat()
    with_canary = {name: canary.others[name] + value for name, value in canary.own.items()}
    queries = [FixedSum(sums, canary.bound, canary.steps) for sums in (canary.others, with_canary)]
    spent = epsilon((Charge(GRADIENTS, sigma),), _DELTA).epsilon
    plan = PrivacyPlan(_USERS, _USERS, 1, spent, _DELTA, sigma)
    seeds = iter(range(seed * 10**9, (seed + 1) * 10**9))

    def answer(canary_in: bool) -> dict[str, torch.Tensor]:
        ledger = Ledger(InMemory(), "audit", plan, [])
        curator = Curator(range(_USERS), plan, ledger, Keys(next(seeds)), noise=noise)
        values = curator.ask(queries[canary_in]).values
        return {name: torch.from_numpy(value) for name, value in values.items()}

    own = {name: torch.from_numpy(value * canary.grid) for name, value in canary.own.items()}
    return audit_step(answer, own, sigma, trials, CONFIDENCE)
