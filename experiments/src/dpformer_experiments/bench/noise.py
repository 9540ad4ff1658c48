"""How fast each source draws noise for a model's gradients, against torch's own generator.

The contenders take turns, so that a busy machine slows all of them alike; each is judged by its median. torch gets
one thread: our sources draw on one, and on a busy machine a second thread measures the waiting.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table

from dpformer.privacy.noise import noise_source

# The parameters of a small recommender: item table of 3,416 x 64, two blocks.
SHAPES = {"items": (3416, 64), **{f"block{i}.{j}": (64, 256) for i in range(2) for j in range(3)}}


def run(quick: bool) -> dict[str, Any]:
    """Million values a second and milliseconds a step for each mode, and the ratio to torch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(6 if quick else 51)
    finally:
        torch.set_num_threads(threads)


def _measure(repetitions: int) -> dict[str, Any]:
    gradients = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    values = sum(gradient.numel() for gradient in gradients.values())
    generator = torch.Generator().manual_seed(0)

    def by_torch() -> None:
        for gradient in gradients.values():
            gradient.add_(torch.randn(gradient.shape, generator=generator), alpha=1.0)

    def by_source(mode: str, seed: int | None = None) -> Callable[[], None]:
        source = noise_source(mode, seed)
        return lambda: source.add_noise_(gradients.items(), 1.0)

    contenders = {
        "torch (not used)": by_torch,
        "system": by_source("system"),
        "crypto": by_source("crypto"),
        "seeded": by_source("seeded", 0),
    }
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for repetition in range(repetitions):
        for name, draw in contenders.items():
            start = time.perf_counter()
            draw()
            if repetition:  # the first warms up
                times[name].append(time.perf_counter() - start)
    medians = {name: statistics.median(seen) for name, seen in times.items()}
    return {
        "values": values,
        "modes": {
            name: {
                "milliseconds": 1e3 * median,
                "million_per_second": values / median / 1e6,
                "time_relative_to_torch": median / medians["torch (not used)"],
            }
            for name, median in medians.items()
        },
    }


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table(title=f"noise for {figures['values']:,} parameters, one thread")
    for column in ("mode", "ms a step", "million values/s", "time / torch"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for name, row in figures["modes"].items():
        table.add_row(
            name,
            f"{row['milliseconds']:.2f}",
            f"{row['million_per_second']:.1f}",
            f"{row['time_relative_to_torch']:.2f}",
        )
    return table
