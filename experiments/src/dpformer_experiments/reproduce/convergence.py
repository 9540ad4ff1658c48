"""Accuracy every five epochs, the vanilla Transformer against DPFormer, with bands over seeds.

The paper's shape, repaired (`methods.REPAIR`), with one block of width 32 and histories of 20 items (13 on Amazon Games). All
of its 100 epochs are made.
The figures of iterates come from people's data without noise: they are not private, choose nothing, and are marked so.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import REPAIR, SMALL
from dpformer_experiments.reproduce.page import Page, new_figure
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import METRICS, ending, mean_and_spread, with_spread

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SETS = ("ml-1m", "amazon-games")
EPSILONS = (5.0, 10.0)
MODELS: dict[str, dict[str, Any]] = {"Transformer": {"reattention": "off"}, "DPFormer": {}}
EVERY = 5.0
BANDS = (100, 80, 60)  # % of the seeds in a band
CLAIM = "DPFormer converges faster and more smoothly; the Transformer fluctuates, above all on Amazon"


def declare(
    sets: Sequence[str],
    seeds: int,
    preset: str = "paper",
    options: Mapping[str, Any] | None = None,
    every: float = EVERY,
) -> list[Cell]:
    """All cells, with one seed of each before the next seed."""
    return [
        Cell(
            dataset,
            model,
            epsilon,
            seed,
            "recipe",
            preset,
            {**REPAIR, **SMALL.get(dataset, {}), **(options or {}), **own},
            every,
        )
        for seed in range(1, seeds + 1)
        for dataset in sets
        for epsilon in EPSILONS
        for model, own in MODELS.items()
    ]


def run(*, how: Running, seeds: int = paper.SEEDS_OF_CONVERGENCE) -> dict[str, Any]:
    """Run all cells that are not finished."""
    return measure(run_cells(declare(SETS, seeds), how.prepared(SETS), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each curve and epoch: mean, spread, and every seed's value."""
    rows = []
    for dataset, epsilon, model in dict.fromkeys((o.cell.dataset, o.cell.epsilon, o.cell.method) for o in outcomes):
        mine = [o for o in outcomes if (o.cell.dataset, o.cell.epsilon, o.cell.method) == (dataset, epsilon, model)]
        about = {"dataset": dataset, "epsilon": epsilon, "model": model, "not_private": True}
        curves = [outcome.record["iterates"] for outcome in mine if outcome.record is not None]
        missing = next((outcome.why for outcome in mine if outcome.record is None), "")
        if not curves:
            rows.append({**about, "epoch": None, "seeds": 0, "missing": missing})
        for points in zip(*curves, strict=True):
            row: dict[str, Any] = {**about, "epoch": points[0]["epoch"], "seeds": len(points), "missing": missing}
            for metric in METRICS:
                values = [100 * point[metric] for point in points]
                row |= mean_and_spread(metric, values)
                row[f"{metric} of seeds"] = [round(value, 4) for value in values]
            rows.append(row)
    return {"unit": "%", "not_private": True, "rows": rows, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Every point of the curves."""
    rows = []
    for row in figures["rows"]:
        point: tuple[str, ...] = ("", "", "")
        if row["epoch"] is not None:
            point = (f"{row['epoch']:g}", *(with_spread(row, metric) for metric in METRICS))
        rows.append((row["dataset"], f"{row['epsilon']:g}", row["model"], *point, str(row["seeds"]), row["missing"]))
    note = (
        "In %, test item, seen masked, full ranking; mean and standard deviation over seeds. Figures of iterates come from "
        "people's data without noise: **they are not private**, and nothing is chosen by them. The paper shows curves, no "
        f"numbers, and concludes: {CLAIM}."
    )
    headings = ("data", "epsilon", "model", "epoch", "NDCG@10", "HIT@10", "seeds", "missing")
    return Page("Convergence (not private)", "dpformer reproduce convergence -o docs/results", headings, rows, [note])


def draw(figures: dict[str, Any]) -> Figure:
    """Draw a panel for each data set, epsilon and metric; bands contain 60 to 100 % of the seeds."""
    import numpy as np

    pairs = list(dict.fromkeys((row["dataset"], row["epsilon"]) for row in figures["rows"]))
    figure, axes = new_figure(2, max(1, len(pairs)), (3.2 * max(1, len(pairs)), 5.2))
    for column, (dataset, epsilon) in enumerate(pairs):
        for line, metric in enumerate(METRICS):
            axis = axes[line, column]
            for place, model in enumerate(MODELS):
                rows = [
                    r for r in figures["rows"] if (r["dataset"], r["epsilon"], r["model"]) == (dataset, epsilon, model)
                ]
                rows = [row for row in rows if row["epoch"] is not None]
                if not rows:
                    continue
                epochs, values = [row["epoch"] for row in rows], np.array([row[f"{metric} of seeds"] for row in rows])
                axis.plot(epochs, values.mean(1), color=f"C{place}", label=model)
                for band in BANDS:
                    low, high = np.percentile(values, [50 - band / 2, 50 + band / 2], axis=1)
                    axis.fill_between(epochs, low, high, color=f"C{place}", alpha=0.12, linewidth=0)
            axis.set(
                title=f"{dataset}, epsilon {epsilon:g}", xlabel="epoch", ylabel=f"{metric.upper()} (%), not private"
            )
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.suptitle(f"the paper: {CLAIM}", fontsize=9)
    return figure
