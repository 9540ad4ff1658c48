"""The common recipe: one recipe that trains well, in which only the architecture is exchanged.

One block of width 32, histories of 50 items, a vocabulary of 1,000 items by the histogram with an output bias, no dropout, 40
steps of half of all users. The learning rate of each architecture is chosen on the validation item, from the same five rates, at
epsilon 8 with one seed; the paper's grid ends too early for recurrent networks. Re-Attention takes the rate of the Transformer
that it corrects. `dpformer reproduce rates` shows all of them.
"""

from __future__ import annotations

from typing import Any

from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, mean_of, values_of

SETS = ("ml-1m", "amazon-games")
# As many as in the paper's grid, which goes from 0.001 to 0.009.
RATES = (0.009, 0.021, 0.05, 0.12, 0.28)
EPSILON, SEED = 8.0, 0
RECIPE: dict[str, Any] = {"recency": None, "max_length": 50, "vocabulary": 1000, "epochs": 20.0}
# Half of all users, in numbers: below 15,000 users the preset takes a quarter.
HALF = {"ml-1m": {"batch_size": 3020}, "amazon-games": {"batch_size": 15506}}
HALVED = "Transformer without sharing, half the width"
ARCHITECTURES: dict[str, dict[str, Any]] = {
    paper.GRU: {"model": "gru"},
    paper.LSTM: {"model": "lstm"},
    paper.UNSHARED: {"norm": "post", "tied": False},
    HALVED: {"norm": "post", "tied": False, "d": 16},
    paper.VANILLA: {"norm": "post"},
}
# The best rate on the validation item; a test compares them with the finished runs.
CHOSEN: dict[str, dict[str, float]] = {
    "ml-1m": {paper.GRU: 0.12, paper.LSTM: 0.12, paper.UNSHARED: 0.021, HALVED: 0.05, paper.VANILLA: 0.021},
    "amazon-games": {paper.GRU: 0.12, paper.LSTM: 0.12, paper.UNSHARED: 0.05, HALVED: 0.05, paper.VANILLA: 0.05},
}


def options_on(architecture: str) -> dict[str, dict[str, Any]]:
    """Settings of an architecture that differ between data sets: the batch and the chosen rate."""
    return {name: {**HALF[name], "learning_rate": CHOSEN[name][architecture]} for name in SETS}


def cells() -> list[Cell]:
    """The search: every architecture with every rate, the middle ones first."""
    by_rate = sorted(RATES, key=lambda rate: abs(RATES.index(rate) - 2.4))
    return [
        Cell(
            dataset,
            f"{architecture}, common recipe, rate {rate:g}",
            EPSILON,
            SEED,
            preset="pure",
            options={**RECIPE, **own, **HALF[dataset], "learning_rate": rate},
            search=True,
        )
        for rate in by_rate
        for dataset in reversed(SETS)
        for architecture, own in ARCHITECTURES.items()
    ]


def run(*, how: Running) -> dict[str, Any]:
    """Run all cells of the search that are not finished."""
    return measure(run_cells(cells(), how.prepared(SETS), how))


def measure(outcomes: list[CellResult]) -> dict[str, Any]:
    """A row for each data set and architecture: figures on the validation item by rate, and the best rate."""
    rows = []
    for dataset in SETS:
        for architecture in ARCHITECTURES:
            figures: dict[float, float | None] = dict.fromkeys(RATES)
            for outcome in outcomes:
                rate = outcome.cell.options["learning_rate"]
                mine = f"{architecture}, common recipe, rate {rate:g}"
                if (outcome.cell.dataset, outcome.cell.method) == (dataset, mine) and outcome.record is not None:
                    figures[rate] = mean_of(values_of([outcome.record], item="validation"))
            finished = {rate: value for rate, value in figures.items() if value is not None}
            best = max(finished, key=lambda rate: finished[rate]) if finished else None
            by_rate = {f"{rate:g}": value for rate, value in figures.items()}
            rows.append({"dataset": dataset, "method": architecture, "validation ndcg@10": by_rate, "best rate": best})
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
        "NDCG@10 in % on the validation item, epsilon 8, delta 1e-5, seed 0, seen items masked, full ranking, by rate."
    )
    headings = ("data", "method", *(f"{rate:g}" for rate in RATES), "best")
    command = "dpformer reproduce rates -o docs/results"
    return Page("Learning rates of the common recipe", command, headings, rows, [note])
