"""The long tail drawn: how often each item occurs, by rank (the paper's figure of its data)."""

from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure


def draw_long_tail(users: int, counts: np.ndarray, path: Path) -> None:
    """Write the plot as PNG: events of an item (counts: int [M]) against its rank, both on logarithmic axes."""
    counts = np.sort(counts)[::-1]
    ranks = np.arange(1, len(counts) + 1)
    head = max(1, round(len(counts) / 10))
    share = counts[:head].sum() / counts.sum()
    # A figure of its own instead of pyplot's: no global state, no display needed.
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(ranks[:head], counts[:head], color="#d95f02", alpha=0.25, linewidth=0)
    axes.plot(ranks, counts, color="#1b4f72", linewidth=1.8)
    axes.set(xscale="log", yscale="log", xlabel="item, by rank of frequency", ylabel="events")
    axes.set_ylim(bottom=0.8)
    axes.set_title(
        f"{users:,} users, {len(counts):,} items, {counts.sum():,} events: a tenth of the items takes {share:.0%}",
        fontsize=9,
    )
    axes.grid(True, which="major", alpha=0.25)
    figure.savefig(path, format="png")
