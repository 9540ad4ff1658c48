"""What a data set looks like: sizes, lengths, and how long its tail is."""

from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.sequences import SHORTEST_SPLIT, Dataset

QUANTILES = {0: "shortest", 10: "p10", 25: "p25", 50: "median", 75: "p75", 90: "p90", 99: "p99", 100: "longest"}
# An item that few people touched is one that a private model hardly learns: noise does not shrink with the count.
RARE = 10


def item_counts(dataset: Dataset) -> np.ndarray:
    """Events of each item 1..M, int64 [M]."""
    return np.bincount(dataset.sequences.items, minlength=len(dataset.catalogue) + 1)[1:]


def statistics(dataset: Dataset) -> dict[str, Any]:
    """Figures for people and machines of a data set in memory."""
    return figures(dataset.sequences.lengths, item_counts(dataset))


def figures(lengths: np.ndarray, counts: np.ndarray) -> dict[str, Any]:
    """The figures from the lengths of the sequences, int [N], and the events of each item, int [M].

    density: events / (users * items). tail: the share of events that the most frequent tenth of the items takes, the
    share of items that the least frequent fifth of the events is spread over, the share of items with at most
    ten events, and the Gini coefficient of the items' counts.
    """
    counts = np.sort(counts)[::-1]
    users, items, events = len(lengths), len(counts), int(counts.sum())
    quantiles = np.percentile(lengths, list(QUANTILES)).tolist()
    short = int((lengths < SHORTEST_SPLIT).sum())
    running = np.cumsum(counts) / events
    head = max(1, round(items / 10))
    ascending = counts[::-1]
    gini = float(2 * (np.arange(1, items + 1) * ascending).sum() / (items * events) - (items + 1) / items)
    return {
        "users": users,
        "items": items,
        "events": events,
        "density": events / (users * items),
        "evaluated_users": users - short,
        "short_users": short,
        "length": {"mean": float(lengths.mean()), **dict(zip(QUANTILES.values(), quantiles, strict=True))},
        "tail": {
            "events_of_top_tenth": float(running[head - 1]),
            "items_of_last_fifth_of_events": float((running > 0.8).mean()),
            f"items_with_at_most_{RARE}_events": float((counts <= RARE).mean()),
            "gini": gini,
        },
    }


def draw_long_tail(users: int, counts: np.ndarray, path: Path) -> None:
    """Write the plot as PNG: events of an item (counts: int [M]) against its rank, both on logarithmic axes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

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
