"""The ceiling: SASRec with full cross-entropy in this code, without privacy, under the same evaluation as the private models.

Pre-norm, small batches, dropout; the rate falls to 0 over a number of epochs that was chosen on the validation item. It shows
whether the evaluation is right: published figures of SASRec with full cross-entropy are 18 to 19 NDCG@10 on MovieLens-1M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import METRICS, check_seeds, ending, mean_and_spread, with_spread

SASREC: dict[str, Any] = {"norm": "pre", "reattention": "off", "d": 64, "blocks": 2, "batch_size": 128}
ON: dict[str, dict[str, Any]] = {
    "ml-1m": {"max_length": 200, "dropout": 0.2, "epochs": 40.0, "learning_rate": 2e-3},
    "amazon-games": {"max_length": 50, "dropout": 0.5, "epochs": 20.0, "learning_rate": 2e-3},
}
# NDCG@10 and HIT@10 to reach, from the literature under the same protocol.
GOALS = {"ml-1m": (17.5, 31.0), "amazon-games": (5.6, 10.5)}


def cells(seeds: int = 1) -> list[Cell]:
    """A cell for each data set and seed."""
    return [
        Cell(dataset, "SASRec, not private", math.inf, seed, preset="paper", options={**SASREC, **own})
        for seed in range(1, seeds + 1)
        for dataset, own in ON.items()
    ]


def run(*, how: Running, seeds: int = 1) -> dict[str, Any]:
    """Run all cells that are not finished."""
    check_seeds(seeds)
    return measure(run_cells(cells(seeds), how.prepared(tuple(ON)), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each data set, with the records that docs/results.json takes over."""
    rows, records = [], []
    for dataset in ON:
        mine = [o for o in outcomes if o.cell.dataset == dataset]
        found = [o.record for o in mine if o.record is not None]
        row: dict[str, Any] = {"dataset": dataset, "seeds": [o.cell.seed for o in mine if o.record is not None]}
        for label, item in (("", "test"), ("validation ", "validation")):
            for metric in METRICS:
                row |= mean_and_spread(label + metric, [100 * r[item]["masked"][metric]["value"] for r in found])
        row["command"] = mine[0].cell.command("ceiling")
        rows.append(row)
        if found:
            figures = {metric: row[metric] for metric in METRICS}
            spreads = {metric: row[f"{metric} std"] for metric in METRICS}
            about = {"dataset": dataset, "method": mine[0].cell.method, "epsilon": "inf", "delta": 1e-5, "masked": True}
            records.append(about | figures | {"std": spreads, "seeds": row["seeds"], "command": row["command"]})
    return {"unit": "%", "rows": rows, "records": records, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Ours beside the goal."""
    rows = [
        (
            row["dataset"],
            "{} / {}".format(*GOALS[row["dataset"]]),
            *(with_spread(row, metric) or "queued" for metric in METRICS),
            with_spread(row, "validation ndcg@10"),
            f"`{row['command']}`",
        )
        for row in figures["rows"]
    ]
    headings = ("data", "goal", "NDCG@10", "HIT@10", "validation NDCG@10", "command")
    note = "In %, test item, seen items masked, full ranking; without privacy, trained on all but the last two items."
    return Page(
        "A ceiling: SASRec without privacy", "dpformer reproduce ceiling -o docs/results", headings, rows, [note]
    )
