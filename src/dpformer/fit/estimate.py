"""Estimate the time and memory of a private training step by running one real micro-batch on this machine.

A micro-batch of random items, as large as the trainer would cut it, goes through the clipping pass and the workers of a training.
The seconds of a step are those of the micro-batch, times the expected tokens of a step over the tokens of the micro-batch; noise
and the update of the weights come on top. Memory is the peak of this process, plus what it does not hold here: Adam's moments.
"""

from __future__ import annotations

import resource
import sys
import time
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch

from dpformer.clipping import PhantomClipping
from dpformer.clipping.tiles import row_budget
from dpformer.data import MicroBatch
from dpformer.errors import DPFormerError
from dpformer.fit.dpsgd import TOKEN_BUDGET
from dpformer.fit.recipe import NetworkSettings
from dpformer.fit.workers import Team, Worker
from dpformer.models import Network, build

# Numbers in the largest item table that is timed: a larger one is timed with fewer items, and the time multiplied.
TABLE = 2**23
# Parameters of the largest network that is timed.
PARAMETERS = 2**27
# Seconds that a micro-batch may take; if it would take longer, one of about `FEW` tokens is timed in its place.
SECONDS, FEW = 0.5, 256
BYTES = 4  # of a number in float32
GRID = 2.0**-26


@dataclass(frozen=True)
class Estimate:
    """The cost of a step. timed_tokens, timed_items: of the micro-batch that was timed. whole: was it a whole micro-batch?"""

    parameters: int
    tokens_per_step: int
    seconds: float
    memory_bytes: int
    timed_tokens: int
    timed_items: int
    whole: bool


def estimate(settings: NetworkSettings, items: int, users: int, length: int) -> Estimate:
    """The cost of a step of a network on a catalogue of so many items, with `users` in a batch and `length` predictions each."""
    with torch.device("meta"):  # shapes without memory
        parameters = sum(p.numel() for p in build(settings.spec(items)).parameters())
    timed_items = min(items, max(1, TABLE // settings.d))
    missing = (items - timed_items) * settings.d * (1 if settings.tied else 2)
    if parameters - missing > PARAMETERS:
        raise DPFormerError(
            f"a network of {parameters:,} parameters is too large to time here; lower network.d or network.blocks"
        )
    with torch.random.fork_rng([]):
        model = cast(Network, build(settings.spec(timed_items)))
    team = Team(Worker(model, PhantomClipping(model)), users * length)
    rows, workers = row_budget(items, TOKEN_BUDGET), team.size
    largest = min(TOKEN_BUDGET // (length + 1), rows // min(length + 1, settings.d), users) // workers
    timed, most = max(1, min(largest, FEW // length)), max(1, largest)
    seconds = _seconds(team, timed, length, timed_items)
    if seconds * most / timed <= SECONDS:
        timed, seconds = most, _seconds(team, most, length, timed_items)
    return Estimate(
        parameters,
        users * length,
        seconds * users / (timed * workers) * items / timed_items,
        # Two moments; of items that were not timed also weights and gradient, their sum in float64, and a user's gradient.
        peak_bytes() + BYTES * (2 * parameters + 6 * missing),
        timed * workers * length,
        timed_items,
        timed == most,
    )


def _seconds(team: Team, users: int, length: int, items: int) -> float:
    """The faster of two passes after a first one, which also checks that samples are apart."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(1, items + 1, (users, length + 1), generator=generator)
    batch = MicroBatch(np.arange(users), tokens, torch.full((users,), length + 1))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        team.sum([[[batch]]] * team.size, GRID, None)
        taken.append(time.perf_counter() - start)
    return min(taken[1:])


def peak_bytes() -> int:
    """The most memory that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
