"""The ceiling: a Transformer of SASRec's size without privacy, under the same evaluation as the private models.

The preset `ceiling`, with another width on MovieLens-1M, and other dropout and length on Amazon Games: cross-entropy over all
items, and a fixed decay of attention with the lag in place of learned positions, chosen by short runs on the validation item. So
is the number of epochs, over which the rate rises and falls to 0; then a model is trained on all but the test item, as the
private presets are. It shows whether the evaluation is right: published figures of SASRec with full cross-entropy are 18 to 19
NDCG@10 on MovieLens-1M.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import METRICS, ending, mean_and_spread, mean_of, values_of, with_spread

METHOD = "ceiling, not private"
# On Amazon Games a step updates 23,715 rows, so small batches take much longer.
ON: dict[str, dict[str, Any]] = {
    "ml-1m": {"d": 128},
    "amazon-games": {"max_length": 50, "dropout": 0.5, "recency": 0.5, "batch_size": 128},
}
# Epochs to choose from on the validation item, and the choice: the best of the finished ones.
EPOCHS = {"ml-1m": (20.0,), "amazon-games": (10.0, 20.0)}
CHOSEN = {"ml-1m": 20.0, "amazon-games": 20.0}
# Short runs on the validation item of MovieLens-1M, by what differs from the preset beside `BRIEF`.
BRIEF: dict[str, Any] = {"max_length": 50, "epochs": 6.0}
SHORT: dict[str, dict[str, Any]] = {
    "learned positions, batches of 128 users": {"recency": None, "batch_size": 128},
    "decay of power 0.5, batches of 128 users": {"recency": 0.5, "batch_size": 128},
    "decay of power 1.2, batches of 128 users": {"recency": 1.2, "batch_size": 128},
    "decay of power 0.5, batches of 32 users, rate 0.003": {"recency": 0.5, "learning_rate": 3e-3, "batch_size": 32},
    "decay of power 1.2, batches of 16 users": {},
    "the same, width 128": {"d": 128},
    "the same, width 128, dropout 0.3": {"d": 128, "dropout": 0.3},
}
# Earlier recipes: width 64 and large batches, on all but the test item; learned positions, on all but the last two items.
NARROW: dict[str, Any] = {"epochs": 30.0, "hold_out": "test"}
LARGE: dict[str, Any] = {"recency": 0.5, "batch_size": 128, "epochs": 80.0, "hold_out": "test"}
LEARNED: dict[str, Any] = {"d": 64, "blocks": 2, "norm": "pre", "max_length": 200, "dropout": 0.2, "reattention": "off"}
# NDCG@10 and HIT@10 to reach, from the literature under the same protocol.
GOALS = {"ml-1m": (17.5, 31.0), "amazon-games": (5.6, 10.5)}


def cells(seeds: int = 1) -> list[Cell]:
    """All cells: runs with each number of epochs, the models that are tested, the short runs, the earlier recipes."""
    finals = [final(dataset, seed) for dataset in ON for seed in range(1, seeds + 1)]
    tried = [_cell(dataset, epochs) for dataset in ON for epochs in sorted(EPOCHS[dataset], reverse=True)]
    return [*short(), *earlier(), *tried, *finals]


def short() -> list[Cell]:
    """The short runs."""
    return [
        Cell(
            *("ml-1m", f"{METHOD}, 6 epochs, {name}", math.inf, 1),
            preset="ceiling",
            options={**BRIEF, **options, "hold_out": "validation"},
            search=True,
        )
        for name, options in SHORT.items()
    ]


def final(dataset: str, seed: int = 1) -> Cell:
    """The model that is tested: it has seen all but the test item."""
    options = {**ON[dataset], "epochs": CHOSEN[dataset], "hold_out": "test"}
    return Cell(dataset, METHOD, math.inf, seed, preset="ceiling", options=options)


def earlier() -> tuple[Cell, ...]:
    """The earlier recipes on MovieLens-1M."""
    learned = {**LEARNED, "batch_size": 128, "epochs": 40.0, "learning_rate": 2e-3}
    return (
        Cell("ml-1m", f"{METHOD}, width 64, 30 epochs", math.inf, 1, preset="ceiling", options=NARROW),
        Cell("ml-1m", f"{METHOD}, batches of 128 users, 80 epochs", math.inf, 1, preset="ceiling", options=LARGE),
        Cell("ml-1m", "SASRec, not private", math.inf, 1, preset="paper", options=learned),
    )


def _cell(dataset: str, epochs: float) -> Cell:
    """So many epochs on the validation item."""
    options = {**ON[dataset], "epochs": epochs}
    return Cell(dataset, f"{METHOD}, {epochs:g} epochs", math.inf, 1, preset="ceiling", options=options, search=True)


def run(*, how: Running, seeds: int = 1) -> dict[str, Any]:
    """Run all cells that are not finished."""
    return measure(run_cells(cells(seeds), how.prepared(tuple(ON)), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each data set; with the records for docs/results.json."""
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for outcome in outcomes:
        if outcome.record is not None:
            found.setdefault((outcome.cell.dataset, outcome.cell.method), []).append(outcome.record)

    def validated(cell: Cell) -> float | None:
        return mean_of(values_of(found.get((cell.dataset, cell.method), []), item="validation"))

    rows, records = [], []
    for dataset in ON:
        command, mine = final(dataset).command("ceiling"), found.get((dataset, METHOD), [])
        row: dict[str, Any] = {"dataset": dataset, "epochs": CHOSEN[dataset], "seeds": list(range(1, len(mine) + 1))}
        for metric in METRICS:
            row |= mean_and_spread(metric, values_of(mine, metric))
        row["validation by epochs"] = {f"{epochs:g}": validated(_cell(dataset, epochs)) for epochs in EPOCHS[dataset]}
        rows.append(row | {"command": command})
        if mine:
            figures = {metric: row[metric] for metric in METRICS}
            spreads = {metric: row[f"{metric} std"] for metric in METRICS}
            about = {"dataset": dataset, "method": METHOD, "epsilon": "inf", "delta": 1e-5, "masked": True}
            records.append(about | figures | {"std": spreads, "seeds": row["seeds"], "command": command})
    brief = {name: validated(cell) for name, cell in zip(SHORT, short(), strict=True)}
    before = [found.get((cell.dataset, cell.method), []) for cell in earlier()]
    return {
        "unit": "%",
        "short": brief,
        "earlier": [{metric: mean_of(values_of(one, metric)) for metric in METRICS} for one in before],
        "rows": rows,
        "records": records,
        **ending(outcomes),
    }


def page(figures: dict[str, Any]) -> Page:
    """Ours beside the goal."""
    rows = [
        (
            row["dataset"],
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
    headings = ("data", "goal", "NDCG@10", "HIT@10", "epochs", "validation NDCG@10 by epochs", "command")
    note = (
        "In %, test item, seen items masked, full ranking; without privacy, trained on all but the test item, with a number of "
        "epochs that was chosen on the validation item, of the finished ones."
    )
    values = "; ".join(
        f"{name} {'queued' if value is None else f'{value:.2f}'}" for name, value in figures["short"].items()
    )
    tried = f"Why these settings: 6 epochs on the last 50 items of ml-1m, validation NDCG@10: {values}."
    narrow, large, learned = (
        " / ".join("queued" if value is None else f"{value:.2f}" for value in one.values())
        for one in figures["earlier"]
    )
    before = (
        f"Earlier recipes on ml-1m (one seed), test item: width 64 and 30 epochs {narrow}; batches of 128 users, decay of power "
        f"0.5 and 80 epochs {large}; with learned positions, 40 epochs, trained on all but the last two items {learned}."
    )
    command = "dpformer reproduce ceiling -o docs/results"
    return Page("A ceiling: training without privacy", command, headings, rows, [note, tried, before])
