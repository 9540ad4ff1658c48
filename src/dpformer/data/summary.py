"""Statistics of a data set: sizes, lengths, and the long tail."""

from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.sequences import Dataset, TimeSplit
from dpformer.data.split import places

QUANTILES = {0: "shortest", 10: "p10", 25: "p25", 50: "median", 75: "p75", 90: "p90", 99: "p99", 100: "longest"}
# A private model learns little about items with so few events: the noise is the same for all items.
RARE = 10


def item_counts(dataset: Dataset) -> np.ndarray:
    """Count events of items 1..M, int64 [M]."""
    return np.bincount(dataset.sequences.items, minlength=len(dataset.catalogue) + 1)[1:]


def statistics(dataset: Dataset) -> dict[str, Any]:
    """Return sizes, density, quantiles of lengths, and measures of the long tail; see `figures`."""
    return figures(dataset.sequences.lengths, item_counts(dataset), dataset.sequences.split)


def figures(lengths: np.ndarray, counts: np.ndarray, split: TimeSplit | None = None) -> dict[str, Any]:
    """Compute statistics from lengths of sequences, int [N], and events per item, int [M].

    density: events / (users * items). tail: share of events in the most frequent 10 % of items; share of items that make up
    the last 20 % of events; share of items with at most 10 events; Gini coefficient of events per item.
    """
    counts = np.sort(counts)[::-1]
    users, items, events = len(lengths), len(counts), int(counts.sum())
    quantiles = np.percentile(lengths, list(QUANTILES)).tolist()
    short = int((~places(lengths, split, "test")[1]).sum())
    running = np.cumsum(counts) / events
    head = max(1, round(items / 10))
    gini = float(2 * (np.arange(items, 0, -1) * counts).sum() / (items * events) - (items + 1) / items)
    return {
        **{"users": users, "items": items, "events": events, "density": events / (users * items)},
        **{"evaluated_users": users - short, "short_users": short},
        "length": {"mean": float(lengths.mean()), **dict(zip(QUANTILES.values(), quantiles, strict=True))},
        "tail": {
            "events_of_top_tenth": float(running[head - 1]),
            "items_of_last_fifth_of_events": float((running > 0.8).mean()),
            f"items_with_at_most_{RARE}_events": float((counts <= RARE).mean()),
            "gini": gini,
        },
    }


def draw_long_tail(users: int, counts: np.ndarray, path: Path) -> None:
    """Plot events per item (counts: int [M]) against rank, on logarithmic axes, as a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    counts = np.sort(counts)[::-1]
    ranks = np.arange(1, len(counts) + 1)
    head = max(1, round(len(counts) / 10))
    share = counts[:head].sum() / counts.sum()
    # Without pyplot: no global state, no display.
    figure = Figure(figsize=(6.4, 4.0), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.fill_between(ranks[:head], counts[:head], color="#d95f02", alpha=0.25, linewidth=0)
    axes.plot(ranks, counts, color="#1b4f72", linewidth=1.8)
    axes.set(xscale="log", yscale="log", xlabel="item, by rank of frequency", ylabel="events")
    axes.set_ylim(bottom=0.8)
    sizes = f"{users:,} users, {len(counts):,} items, {counts.sum():,} events"
    axes.set_title(f"{sizes}: 10 % of the items have {share:.0%}", fontsize=9)
    axes.grid(True, which="major", alpha=0.25)
    figure.savefig(path, format="png")
