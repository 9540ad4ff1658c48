"""The ceiling: SASRec with full cross-entropy in this code, without privacy, under the same evaluation as the private models.

The preset `ceiling`, with other dropout and length on Amazon Games. The number of epochs, over which the rate rises and falls to
0, is chosen on the validation item; then a model is trained on all but the test item, as the private presets and the literature
are. It shows whether the evaluation is right: published figures of SASRec with full cross-entropy are 18 to 19 NDCG@10 on
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
ON: dict[str, dict[str, Any]] = {"ml-1m": {}, "amazon-games": {"max_length": 50, "dropout": 0.5}}
# Epochs to choose from on the validation item, and the choice among the finished ones.
EPOCHS = {"ml-1m": (40.0, 60.0), "amazon-games": (20.0, 40.0)}
CHOSEN = {"ml-1m": 40.0, "amazon-games": 20.0}
# NDCG@10 and HIT@10 to reach, from the literature under the same protocol.
GOALS = {"ml-1m": (17.5, 31.0), "amazon-games": (5.6, 10.5)}
# What training does not see, in words.
TRAINED = {"validation": "all but the last two items", "test": "all but the test item"}


def cells(seeds: int = 1) -> list[Cell]:
    """All cells: of each data set the chosen epochs first, then all but the test item, then other epochs."""
    chosen = [_cell(dataset, CHOSEN[dataset], "validation", seed) for seed in range(1, seeds + 1) for dataset in ON]
    finals = [final(dataset, seed) for seed in range(1, seeds + 1) for dataset in ON]
    others = [
        _cell(dataset, epochs, "validation", seed)
        for seed in range(1, seeds + 1)
        for dataset in ON
        for epochs in EPOCHS[dataset]
        if epochs != CHOSEN[dataset]
    ]
    return chosen + finals + others


def final(dataset: str, seed: int = 1) -> Cell:
    """The model that has seen all but the test item."""
    return _cell(dataset, CHOSEN[dataset], "test", seed)


def _cell(dataset: str, epochs: float, hold_out: str, seed: int) -> Cell:
    options = {**ON[dataset], "epochs": epochs, "hold_out": hold_out}
    # Only the chosen epochs are looked at on the test item.
    search = hold_out == "validation" and epochs != CHOSEN[dataset]
    return Cell(dataset, METHOD, math.inf, seed, preset="ceiling", options=options, search=search)


def run(*, how: Running, seeds: int = 1) -> dict[str, Any]:
    """Run all cells that are not finished."""
    return measure(run_cells(cells(seeds), how.prepared(tuple(ON)), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each data set and each part of the data to train on; with the records for docs/results.json."""
    rows, records = [], []
    for dataset in ON:
        mine = [o for o in outcomes if o.cell.dataset == dataset]
        tried = {
            f"{epochs:g}": mean_of(values_of(_found(mine, epochs, "validation"), item="validation"))
            for epochs in EPOCHS[dataset]
        }
        for hold_out, trained_on in TRAINED.items():
            found = _found(mine, CHOSEN[dataset], hold_out)
            command = _cell(dataset, CHOSEN[dataset], hold_out, 1).command("ceiling")
            row: dict[str, Any] = {"dataset": dataset, "trained on": trained_on, "epochs": CHOSEN[dataset]}
            for label, item in (("", "test"), ("validation ", "validation")):
                for metric in METRICS:
                    row |= mean_and_spread(label + metric, values_of(found, metric, item))
            rows.append(row | {"seeds": len(found), "validation by epochs": tried, "command": command})
            if found:
                records.append(
                    {
                        "dataset": dataset,
                        "method": METHOD + (f", {trained_on}" if hold_out == "test" else ""),
                        "epsilon": "inf",
                        "delta": 1e-5,
                        "masked": True,
                        **{metric: row[metric] for metric in METRICS},
                        "std": {metric: row[f"{metric} std"] for metric in METRICS},
                        "seeds": list(range(1, len(found) + 1)),
                        "command": command,
                    }
                )
    return {"unit": "%", "rows": rows, "records": records, **ending(outcomes)}


def _found(outcomes: Sequence[CellResult], epochs: float, hold_out: str) -> list[dict[str, Any]]:
    """The records of the finished cells with so many epochs."""
    wanted = {"epochs": epochs, "hold_out": hold_out}
    mine = [o for o in outcomes if all(o.cell.options[name] == value for name, value in wanted.items())]
    return [o.record for o in mine if o.record is not None]


def page(figures: dict[str, Any]) -> Page:
    """Ours beside the goal."""
    rows = [
        (
            row["dataset"],
            row["trained on"],
            "{} / {}".format(*GOALS[row["dataset"]]),
            *(with_spread(row, metric) or "queued" for metric in METRICS),
            f"{row['epochs']:g}",
            "; ".join(
                f"{epochs}: {'queued' if value is None else f'{value:.2f}'}"
                for epochs, value in row["validation by epochs"].items()
            ),
            f"`{row['command']}`",
        )
        for row in figures["rows"]
    ]
    headings = ("data", "trained on", "goal", "NDCG@10", "HIT@10", "epochs", "validation NDCG@10 by epochs", "command")
    note = (
        "In %, test item, seen items masked, full ranking; without privacy. The number of epochs is the best of the finished "
        "ones on the validation item."
    )
    return Page(
        "A ceiling: SASRec without privacy", "dpformer reproduce ceiling -o docs/results", headings, rows, [note]
    )
