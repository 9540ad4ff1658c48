"""Curators with a known defect: the controls of the attacks. Each is handed to a run where `Curator` stands."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpformer.privacy import Answer, Curator, Query
from dpformer.privacy.noise import rounded_gaussian
from dpformer.privacy.query import Statistic
from dpformer.trust.verify.recorder import keys_at, ledger_at, no_noise


class Scaled:
    """A share of the noise."""

    def __init__(self, share: float) -> None:
        self.share = share

    def __call__(self, key: bytes, shape: tuple[int, ...], std: float) -> np.ndarray:
        return np.rint(self.share * rounded_gaussian(key, shape, std)).astype(np.int64)


class Exact(Curator[Any]):
    """Charges and keeps a noisy answer, and hands the exact sum to the stage: the published tensors have no noise."""

    def ask(self, query: Query[Any]) -> Answer:
        place = self.keys.place
        exact = Curator(
            self._people, self.plan, ledger_at(self.plan, place), keys_at(place), noise=no_noise, draw=self._draw
        )
        sums = exact.ask(query)
        super().ask(query)
        return sums


class OldNoise(Curator[Any]):
    """Exact sums in float64, to which float32 Gaussians times the standard deviation are added. No grid.

    That is how noise was made before there was a Curator. Plan, ledger, multipliers and bounds are those of the product. It
    cannot keep its answers as whole steps, so it keeps them in `heard`.
    """

    def __init__(self, *arguments: Any, seed: int) -> None:
        super().__init__(*arguments)
        self._generator = np.random.Generator(np.random.SFC64(seed))
        self.heard: list[Answer] = []

    def ask(self, query: Query[Any]) -> Answer:
        if not isinstance(query, Statistic):
            self.heard.append(super().ask(query))
            return self.heard[-1]
        planned = self.plan.planned(self.keys.place)
        exact = np.zeros(query.numbers)
        for _, cell, value in query.vectors(self._people):
            exact += np.bincount(cell, weights=value, minlength=query.numbers)
        std = planned.noise_multiplier * query.bound
        assert self.ledger is not None
        self.ledger.charge(self.keys.place, query.name, self.keys.tag(query.name, b""))
        noise = std * self._generator.standard_normal(query.numbers, dtype=np.float32).astype(np.float64)
        self.keys.ratchet()
        self.heard.append(Answer(query.name, {query.name: (exact + noise).reshape(query.shape)}, std, 0.0))
        return self.heard[-1]
