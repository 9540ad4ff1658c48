"""Measure how fast noise is generated on one core: alone, and within an answer of a Curator.

    noise     `rounded_gaussian`: exact rounded Gaussians
    answer    `Curator.ask` of a precomputed sum: hash of the sum, charge in a synced ledger, noise, addition, conversion
    torch     float32 numbers of `torch.randn`, for comparison; they must not be used for privacy

They take turns, so that a busy machine slows all of them alike. Times are medians of processor time, so waiting for the disk (the
ledger) does not count.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from rich.table import Table

from dpformer.data import Sequences
from dpformer.privacy import Curator, PrivacyPlan, Sample
from dpformer.privacy.noise import rounded_gaussian
from dpformer_experiments.bench.workloads import uniform
from dpformer_experiments.curators import seeded_curator

# Numbers of an answer: a recommender with 3,416 items of width 64 and two blocks; 1,500 x 1,500 transitions.
SIZES = (316_928, 2_250_000)
# Largest milliseconds on one core, for the noise and for an answer.
GOALS = {316_928: {"noise": 5.0, "answer": 10.0}, 2_250_000: {"noise": 37.0, "answer": 57.0}}
STD = 1.3e9  # grid steps: 20 C on a grid of 2^-26 C
GRADIENTS = "gradients"


class Ready:
    """A query whose sum is precomputed."""

    name, bound = GRADIENTS, 1.0

    def __init__(self, numbers: int) -> None:
        self.numbers = numbers
        self._sum = np.arange(numbers, dtype=np.int64)

    def sensitivity(self, grid: float) -> float:
        """In grid steps."""
        return self.bound / grid

    def sum(self, people: Sequences, sample: Sample, grid: float) -> Mapping[str, np.ndarray]:
        """Return the same sum for any sample."""
        return {"sum": self._sum}


def run(quick: bool) -> dict[str, Any]:
    """Milliseconds of each contender, for each size, and the goals."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {str(size): _measure(size, 6 if quick else 51) for size in SIZES}
    finally:
        torch.set_num_threads(threads)


def _measure(numbers: int, repetitions: int) -> dict[str, Any]:
    people = uniform(10, 3, 5, 8).sequences
    plan = PrivacyPlan(len(people), len(people), repetitions, 1e6, 1e-6, 20.0)
    with seeded_curator(people, plan, 0) as curator:
        medians = _medians(_contenders(numbers, curator), repetitions)
    return {
        name: {
            "milliseconds": 1e3 * median,
            "million_per_second": numbers / median / 1e6,
            "time_relative_to_torch": median / medians["torch"],
            "goal": GOALS[numbers].get(name),
        }
        for name, median in medians.items()
    }


def _contenders(numbers: int, curator: Curator[Sequences]) -> dict[str, Callable[[], object]]:
    generator, query = torch.Generator().manual_seed(0), Ready(numbers)
    return {
        "torch": lambda: torch.randn(numbers, generator=generator),
        "noise": lambda: rounded_gaussian(bytes(32), (numbers,), STD),
        "answer": lambda: curator.ask(query),
    }


def _medians(contenders: dict[str, Callable[[], object]], repetitions: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, draw in contenders.items():
            start = time.process_time()
            draw()
            if repetition:  # the first fills caches
                times[name].append(time.process_time() - start)
    return {name: statistics.median(seen) for name, seen in times.items()}


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(title="noise, one thread")
    for column in ("numbers", "", "ms", "goal", "million numbers/s", "time / torch"):
        table.add_column(column, justify="right" if column else "left")
    for size, rows in figures.items():
        for name, row in rows.items():
            table.add_row(
                f"{int(size):,}",
                name,
                f"{row['milliseconds']:.1f}",
                "" if row["goal"] is None else f"{row['goal']:g}",
                f"{row['million_per_second']:.1f}",
                f"{row['time_relative_to_torch']:.2f}",
            )
    return table
