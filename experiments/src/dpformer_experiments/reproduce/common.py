"""The common recipe: one recipe that trains well, in which only the architecture is exchanged.

One block of width 32, histories of 50 items, a vocabulary of 1,000 items by the histogram with an output bias, no dropout, 40
steps of half of all users. The learning rate of each architecture is chosen on the validation item, from the same rates, at
epsilon 8 with one seed; the paper's grid ends too early for recurrent networks. `rates` shows all of them.
"""

from __future__ import annotations

from typing import Any

from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending

SETS = ("ml-1m", "amazon-games")
RATES = (0.009, 0.0175, 0.035, 0.07, 0.14, 0.28)
EPSILON, SEED = 8.0, 1
RECIPE: dict[str, Any] = {"recency": None, "max_length": 50, "epochs": 20.0}
# Half of all users, in numbers: below 15,000 users the preset takes a quarter.
HALF = {"ml-1m": {"batch_size": 3020}, "amazon-games": {"batch_size": 15506}}
HALVED, PRE = "Transformer without sharing, half the width", "Transformer, pre-norm"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    paper.GRU: {"model": "gru"},
    paper.LSTM: {"model": "lstm"},
    paper.UNSHARED: {"norm": "post", "tied": False},
    HALVED: {"norm": "post", "tied": False, "d": 16},
    paper.VANILLA: {"norm": "post"},
    PRE: {},
}
# The best rate on the validation item; tests compare them with the finished runs.
CHOSEN: dict[str, dict[str, float]] = {
    "ml-1m": {
        paper.GRU: 0.14,
        paper.LSTM: 0.14,
        paper.UNSHARED: 0.035,
        HALVED: 0.035,
        paper.VANILLA: 0.035,
        PRE: 0.035,
    },
    "amazon-games": {
        paper.GRU: 0.14,
        paper.LSTM: 0.14,
        paper.UNSHARED: 0.035,
        HALVED: 0.035,
        paper.VANILLA: 0.035,
        PRE: 0.035,
    },
}


def options_on(architecture: str) -> dict[str, dict[str, Any]]:
    """Settings of an architecture that differ between data sets: the batch and the chosen rate."""
    return {name: {**HALF[name], "learning_rate": CHOSEN[name][architecture]} for name in SETS}


def method_of(architecture: str) -> str:
    """The name of its row in the tables."""
    return f"{architecture.removesuffix(' (vanilla)')}, common recipe"


def cells() -> list[Cell]:
    """The search: every architecture with every rate, the middle ones first."""
    by_rate = sorted(RATES, key=lambda rate: abs(RATES.index(rate) - 2.4))
    return [
        Cell(
            dataset,
            method_of(architecture),
            EPSILON,
            SEED,
            preset="pure",
            options={**RECIPE, **own, **HALF[dataset], "learning_rate": rate},
        )
        for rate in by_rate
        for dataset in SETS
        for architecture, own in ARCHITECTURES.items()
    ]


def run(*, how: Running) -> dict[str, Any]:
    """Run all cells of the search that are not finished."""
    return measure(run_cells(cells(), how.prepared(SETS), how))


def measure(outcomes: list[CellResult]) -> dict[str, Any]:
    """A row for each data set and architecture: figures on the validation item by rate, and the best rate."""
    rows = []
    for dataset, method in dict.fromkeys((o.cell.dataset, o.cell.method) for o in outcomes):
        figures: dict[float, float | None] = dict.fromkeys(RATES)
        for outcome in outcomes:
            if (outcome.cell.dataset, outcome.cell.method) == (dataset, method) and outcome.record is not None:
                value = outcome.record["validation"]["masked"]["ndcg@10"]["value"]
                figures[outcome.cell.options["learning_rate"]] = round(100 * value, 4)
        finished = {rate: value for rate, value in figures.items() if value is not None}
        best = max(finished, key=lambda rate: finished[rate]) if finished else None
        by_rate = {f"{rate:g}": value for rate, value in figures.items()}
        rows.append({"dataset": dataset, "method": method, "validation ndcg@10": by_rate, "best rate": best})
    return {"unit": "%", "item": "validation", "epsilon": EPSILON, "rows": rows, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Validation NDCG@10 by rate."""
    rows = []
    for row in figures["rows"]:
        values = row["validation ndcg@10"]
        shown = ("queued" if values[f"{rate:g}"] is None else f"{values[f'{rate:g}']:.2f}" for rate in RATES)
        rows.append(
            (row["dataset"], row["method"], *shown, "" if row["best rate"] is None else f"{row['best rate']:g}")
        )
    note = (
        "NDCG@10 in % on the validation item, epsilon 8, delta 1e-5, seed 1, seen items masked, full ranking, by rate."
    )
    headings = ("data", "method", *(f"{rate:g}" for rate in RATES), "best")
    command = "dpformer reproduce rates -o docs/results"
    return Page("Learning rates of the common recipe", command, headings, rows, [note])
