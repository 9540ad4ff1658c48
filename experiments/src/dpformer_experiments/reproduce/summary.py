"""Functions of all results that train: means and spreads over seeds, and the log of all trainings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.reproduce.runner import CellResult

METRICS = ("ndcg@10", "hit@10")


def values_of(
    records: Sequence[dict[str, Any]], metric: str = "ndcg@10", item: str = "test", kind: str = "masked"
) -> list[float]:
    """A metric in % of each record that has the held-out item."""
    return [100 * float(record[item][kind][metric]["value"]) for record in records if item in record]


def mean_of(values: Sequence[float], digits: int = 4) -> float | None:
    """The mean; None without values."""
    return round(statistics.fmean(values), digits) if values else None


def spread_of(values: Sequence[float]) -> float | None:
    """The standard deviation; None with fewer than two values."""
    return round(statistics.stdev(values), 4) if len(values) > 1 else None


def mean_and_spread(label: str, values: Sequence[float]) -> dict[str, float | None]:
    """Both, as entries `label` and `label std` of a row."""
    return {label: mean_of(values), f"{label} std": spread_of(values)}


def with_spread(row: dict[str, Any], metric: str) -> str:
    """`11.87 ± 0.23`."""
    if row[metric] is None:
        return ""
    spread = row[f"{metric} std"]
    return f"{row[metric]:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")


def gain_of(gains: Sequence[float]) -> str:
    """`+0.120 ± 0.030 (4 of 5)`: the mean gain of pairs, its standard error, and how many gained."""
    if not gains:
        return "queued"
    error = f" ± {statistics.stdev(gains) / len(gains) ** 0.5:.3f}" if len(gains) > 1 else ""
    return f"{statistics.fmean(gains):+.3f}{error} ({sum(gain > 0 for gain in gains)} of {len(gains)})"


def tried(outcome: CellResult) -> dict[str, Any]:
    """A line of the log of all trainings."""
    cell, record = outcome.cell, outcome.record
    assert record is not None
    figures: dict[str, Any] = {
        item: {metric: round(values_of([record], metric, item)[0], 4) for metric in METRICS}
        for item in ("validation", "test")
        if item in record
    }
    return {
        "dataset": cell.dataset,
        "method": cell.method,
        "seed": cell.seed,
        "settings": record["settings"],
        **figures,
        "minutes": round(record["core_seconds"] / 60, 2),
        "dpformer": record["dpformer"],
    }


def ending(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """The last entries of every result: how many cells failed, and the log of the finished ones."""
    done = [outcome for outcome in outcomes if outcome.record is not None]
    return {"failed": sum(outcome.failed for outcome in outcomes), "tried": [tried(outcome) for outcome in done]}


def protocols(outcomes: Sequence[CellResult]) -> dict[str, str]:
    """The evaluation protocol of each held-out item, by the first finished cell; empty if there is none."""
    first = next((outcome.record for outcome in outcomes if outcome.record is not None), {})
    return {item: first[item]["protocol"] for item in ("test", "validation") if item in first}
