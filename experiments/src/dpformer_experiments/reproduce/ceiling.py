"""The ceiling: SASRec with full cross-entropy in this code, without privacy, under the same evaluation as the private models.

Pre-norm, small batches, dropout; the rate rises and falls to 0 over a number of epochs that is chosen on the validation item.
It shows whether the evaluation is right: published figures of SASRec with full cross-entropy are 18 to 19 NDCG@10 on
MovieLens-1M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import METRICS, ending, mean_and_spread, mean_of, values_of, with_spread

METHOD = "SASRec, not private"
SASREC: dict[str, Any] = {"norm": "pre", "reattention": "off", "d": 64, "blocks": 2, "batch_size": 128}
ON: dict[str, dict[str, Any]] = {
    "ml-1m": {"max_length": 200, "dropout": 0.2},
    "amazon-games": {"max_length": 50, "dropout": 0.5},
}
# Schedules to choose from on the validation item: epochs and the peak of the rate. The longer ones have the mean rate of the
# literature (0.001, for at most 100 epochs, stopped early on the validation item).
SCHEDULES = {"ml-1m": ((40.0, 2e-3), (100.0, 2e-3)), "amazon-games": ((20.0, 2e-3), (50.0, 2e-3))}
# NDCG@10 and HIT@10 to reach, from the literature under the same protocol.
GOALS = {"ml-1m": (17.5, 31.0), "amazon-games": (5.6, 10.5)}


def cells(seeds: int = 1) -> list[Cell]:
    """A cell for each schedule, data set and seed; the short schedules first."""
    return [
        Cell(
            *(dataset, METHOD if place == 0 else f"{METHOD}, {epochs:g} epochs", math.inf, seed),
            preset="paper",
            options={**SASREC, **own, "epochs": epochs, "learning_rate": rate},
        )
        for place in range(2)
        for seed in range(1, seeds + 1)
        for dataset, own in ON.items()
        for epochs, rate in [SCHEDULES[dataset][place]]
    ]


def run(*, how: Running, seeds: int = 1) -> dict[str, Any]:
    """Run all cells that are not finished."""
    return measure(run_cells(cells(seeds), how.prepared(tuple(ON)), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each data set, of the schedule that is best on the validation item; with the records for docs/results.json."""
    rows, records = [], []
    for dataset in ON:
        mine = [o for o in outcomes if o.cell.dataset == dataset]
        by_epochs: dict[str, list[CellResult]] = {}
        for outcome in mine:
            by_epochs.setdefault(f"{outcome.cell.options['epochs']:g}", []).append(outcome)
        tried = {
            epochs: mean_of(values_of([o.record for o in own if o.record is not None], item="validation"))
            for epochs, own in by_epochs.items()
        }
        best = max(tried, key=lambda epochs: tried[epochs] or 0.0)
        chosen = [o for o in by_epochs[best] if o.record is not None]
        found = [o.record for o in chosen if o.record is not None]
        row: dict[str, Any] = {
            "dataset": dataset,
            "seeds": [o.cell.seed for o in chosen],
            "validation by epochs": tried,
        }
        for label, item in (("", "test"), ("validation ", "validation")):
            for metric in METRICS:
                row |= mean_and_spread(label + metric, values_of(found, metric, item))
        row["command"] = by_epochs[best][0].cell.command("ceiling")
        rows.append(row)
        if found:
            figures = {metric: row[metric] for metric in METRICS}
            spreads = {metric: row[f"{metric} std"] for metric in METRICS}
            about = {"dataset": dataset, "method": METHOD, "epsilon": "inf", "delta": 1e-5, "masked": True}
            records.append(about | figures | {"std": spreads, "seeds": row["seeds"], "command": row["command"]})
    return {"unit": "%", "rows": rows, "records": records, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Ours beside the goal."""
    rows = [
        (
            row["dataset"],
            "{} / {}".format(*GOALS[row["dataset"]]),
            *(with_spread(row, metric) or "queued" for metric in METRICS),
            "; ".join(
                f"{epochs}: {'queued' if value is None else f'{value:.2f}'}"
                for epochs, value in row["validation by epochs"].items()
            ),
            f"`{row['command']}`",
        )
        for row in figures["rows"]
    ]
    headings = ("data", "goal", "NDCG@10", "HIT@10", "validation NDCG@10 by epochs", "command")
    note = (
        "In %, test item, seen items masked, full ranking; without privacy, trained on all but the last two items. "
        "Figures are of the number of epochs that is best on the validation item."
    )
    return Page(
        "A ceiling: SASRec without privacy", "dpformer reproduce ceiling -o docs/results", headings, rows, [note]
    )
