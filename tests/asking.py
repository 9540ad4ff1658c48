"""Answers without a ledger, for tests of what is made of answers; and charges without answers, for tests of ledgers."""

import hashlib
import math
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dpformer.data import Sequences
from dpformer.privacy import Answer, Sample
from dpformer.privacy.ledger import Ledger
from dpformer.privacy.query import grid_step


def tag(text: str) -> str:
    """What stands for the tag of a sum."""
    return hashlib.sha256(text.encode()).hexdigest()


def charge(ledger: Ledger, *places: int, salt: str = "") -> list[bool]:
    """Charge these answers of the plan. salt: another one stands for other sums."""
    return [ledger.charge(place, ledger.plan.planned(place).name, tag(f"{salt}{place}")) for place in places]


def watch_syncs(monkeypatch: pytest.MonkeyPatch, path: Path) -> Callable[[], bytes]:
    """A function that gives what a file held when it was last synced; empty before that."""
    synced, real = b"", os.fsync

    def watched(file: int) -> None:
        nonlocal synced
        real(file)
        if os.fstat(file).st_ino == path.stat().st_ino:
            synced = path.read_bytes()

    monkeypatch.setattr(os, "fsync", watched)
    return lambda: synced


class Asking:
    """Answers queries about a log with Gaussian noise of multiplier sigma / sqrt(share); keeps queries and answers."""

    def __init__(self, log: Sequences, sigma: float, shares: dict[str, float], seed: int | None = 0) -> None:
        """seed None: no noise, while the answers still say that there is."""
        self.log, self.sigma, self.shares = log, sigma, shares
        self.random = None if seed is None else np.random.default_rng(seed)
        self.queries, self.answers = [], []

    def ask(self, query) -> Answer:
        grid = grid_step(query.bound, query.numbers)
        sums = query.sum(self.log, Sample(np.arange(len(self.log)), bytes(32)), grid)
        std = self.sigma / math.sqrt(self.shares[query.name]) * query.sensitivity(grid)
        draw = np.zeros if self.random is None else self.random.standard_normal
        values = {name: (value + np.rint(std * draw(value.shape))) * grid for name, value in sums.items()}
        self.queries.append(query)
        self.answers.append(Answer(query.name, values, std * grid, grid))
        return self.answers[-1]


class Replay:
    """Gives recorded answers, in their order, and has no data at all."""

    def __init__(self, answers: list[Answer]) -> None:
        self.answers = list(answers)

    def ask(self, query) -> Answer:
        answer = self.answers.pop(0)
        assert answer.name == query.name
        return answer
