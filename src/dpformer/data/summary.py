"""Statistics of a data set: sizes, lengths, and the long tail."""

from pathlib import Path
from typing import Any

import numpy as np

from dpformer.data.sequences import Dataset
from dpformer.data.split import places
from dpformer.svg import Axis, Series, alone, lines

QUANTILES = {0: "shortest", 10: "p10", 25: "p25", 50: "median", 75: "p75", 90: "p90", 99: "p99", 100: "longest"}
# A private model learns little about items with so few events: the noise is the same for all items.
RARE = 10


def item_counts(dataset: Dataset) -> np.ndarray:
    """Count events of items 1..M, int64 [M]; the most frequent item first."""
    return np.sort(np.bincount(dataset.sequences.items, minlength=len(dataset.catalogue) + 1)[1:])[::-1]


def statistics(dataset: Dataset) -> dict[str, Any]:
    """Return sizes, density, quantiles of lengths, and measures of the long tail.

    density: events / (users * items). tail: share of events in the most frequent 10 % of items; share of items that make up
    the last 20 % of events; share of items with at most 10 events; Gini coefficient of events per item.
    """
    lengths, counts = dataset.sequences.lengths, item_counts(dataset)
    users, items, events = len(lengths), len(counts), int(counts.sum())
    quantiles = np.percentile(lengths, list(QUANTILES)).tolist()
    short = int((~places(lengths, dataset.sequences.split, "test")[1]).sum())
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


def draw_long_tail(dataset: Dataset, path: Path) -> None:
    """Plot events per item against rank, on logarithmic axes, as an SVG file."""
    counts = item_counts(dataset)
    sizes = f"{len(dataset.sequences):,} users, {len(counts):,} items, {counts.sum():,} events"
    points = [(float(rank), float(count)) for rank, count in enumerate(counts, 1) if count > 0]
    plot = lines(
        f"events by rank of the item; {sizes}",
        [Series(sizes, points)],
        Axis("item, by rank of its events", log=True, low=1.0, tick="{:,.0f}".format),
        Axis("events", log=True, low=1.0, tick="{:,.0f}".format),
    )
    path.write_text(alone(plot), encoding="utf-8")
