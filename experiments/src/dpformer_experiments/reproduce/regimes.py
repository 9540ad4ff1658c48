"""Re-Attention in paired runs: without, with the paper's error model, and with the noise that has accumulated, by regime.

Runs of a pair have the same seed and the same noise (`curators.KeysByPlace`): the same histogram, first weights, batches, and
noise at each step. A run of the library has other noise as soon as one bit of a sum differs, and then gains spread as the
difference of two independent runs does. Each regime changes one thing of the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import common
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page, new_figure
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, gain_of, mean_of, values_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SEEDS = 5
OFF, PAPER, ACCUMULATED = "off", "logits", "accumulated"
NAMES = {OFF: "off", PAPER: "the paper's errors", ACCUMULATED: "accumulated errors"}
WHOLE = {"ml-1m": 3416, "amazon-games": 23715}
# Pre-norm, learned positions, the whole catalogue with an output bias, 40 steps of half of all users.
BASE: dict[str, dict[str, Any]] = {
    name: {**common.RECIPE, "vocabulary": items, "learning_rate": 0.03, **common.HALF[name]}
    for name, items in WHOLE.items()
}
# Name: data set, epsilon, what it changes of `BASE`; None for the preset `dpformer` as it is. In the order of their value.
REGIMES: dict[str, tuple[str, float, dict[str, Any] | None]] = {
    "whole catalogue, pre-norm": ("ml-1m", 8.0, {}),
    "epsilon 2": ("ml-1m", 2.0, {}),
    "epsilon 1": ("ml-1m", 1.0, {}),
    "attention falls off with the lag (as in preset dpformer)": ("ml-1m", 8.0, {"recency": 1.2}),
    "post-norm": ("ml-1m", 8.0, {"norm": "post", "learning_rate": 0.05}),
    "vocabulary of 1,000": ("ml-1m", 8.0, {"vocabulary": 1000}),
    "longer training, 80 steps": ("ml-1m", 8.0, {"epochs": 40.0, "learning_rate": 0.021}),
    "d = 64": ("ml-1m", 8.0, {"d": 64}),
    "Games, preset dpformer as it is": ("amazon-games", 8.0, None),
    "preset dpformer as it is": ("ml-1m", 8.0, None),
    "epsilon 3": ("ml-1m", 3.0, {}),
    "Games, whole catalogue": ("amazon-games", 8.0, {}),
}
# Three pairs instead of five: the first five, since the correction moves next to nothing there; the last, since a run of it takes
# four times as long as one of the others.
THREE_PAIRS = {
    "attention falls off with the lag (as in preset dpformer)",
    "post-norm",
    "vocabulary of 1,000",
    "preset dpformer as it is",
    "Games, preset dpformer as it is",
    "Games, whole catalogue",
}


def cells(seeds: int = SEEDS) -> list[Cell]:
    """All cells, a seed at a time, and in it a regime at a time."""
    return [
        Cell(
            dataset,
            f"{name}: {NAMES[correction]}",
            epsilon,
            seed,
            preset="dpformer",
            options={**({} if change is None else {**BASE[dataset], **change}), "reattention": correction},
            paired=True,
        )
        for seed in range(1, seeds + 1)
        for name, (dataset, epsilon, change) in REGIMES.items()
        for correction in NAMES
        if seed <= 3 or name not in THREE_PAIRS
    ]


def run(*, how: Running, seeds: int = SEEDS, method: Sequence[str] = ()) -> dict[str, Any]:
    """Run all cells that are not finished. method: of these regimes alone."""
    if unknown := set(method) - set(REGIMES):
        raise DPFormerError(f"no regime is called {min(unknown)!r}; there are: {', '.join(REGIMES)}")

    def wanted(cell: Cell) -> bool:
        return not method or cell.method.rpartition(": ")[0] in method

    return measure(run_cells(cells(seeds), how.prepared(common.SETS), how, wanted))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each regime and error model: differences to the runs without a correction, seed by seed."""
    records = {(o.cell.method, o.cell.seed): o.record for o in outcomes if o.record is not None}
    rows: list[dict[str, Any]] = []
    errors: dict[str, dict[str, Any]] = {}
    for name, (dataset, epsilon, _) in REGIMES.items():
        for correction in (PAPER, ACCUMULATED):
            with_it = f"{name}: {NAMES[correction]}"
            own = [seed for method, seed in records if method == with_it and (f"{name}: {NAMES[OFF]}", seed) in records]
            row: dict[str, Any] = {"regime": name, "dataset": dataset, "epsilon": epsilon, "errors": NAMES[correction]}
            row["seeds"] = sorted(own)
            for item in ("test", "validation"):
                off, on = (
                    values_of([records[method, seed] for seed in row["seeds"]], item=item)
                    for method in (f"{name}: {NAMES[OFF]}", with_it)
                )
                gains = [round(b - a, 4) for a, b in zip(off, on, strict=True)]
                row[f"{item} off"], row[f"{item} gain"] = mean_of(off), mean_of(gains)
                row[f"{item} gains"] = gains
            row["attention shift"] = mean_of([records[with_it, s].get("attention shift", 0.0) for s in row["seeds"]], 8)
            rows.append(row)
            of_items = [records[with_it, seed].get("item variances") for seed in row["seeds"]]
            if of_items and of_items[0]:
                errors.setdefault(name, {})[NAMES[correction]] = of_items[0]
    return {"unit": "%", "delta": 1e-5, "rows": rows, "item variances": errors, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Mean gains with their standard errors, and how many pairs gained."""
    rows = []
    for row in figures["rows"]:
        gains = [gain_of(row[f"{item} gains"]) for item in ("test", "validation")]
        off = "queued" if row["test off"] is None else f"{row['test off']:.2f}"
        rows.append(
            (
                *(row["regime"], row["dataset"], f"{row['epsilon']:g}", row["errors"], off, *gains),
                "" if row["attention shift"] is None else f"{row['attention shift']:.1e}",
                str(len(row["seeds"])),
            )
        )
    note = (
        "NDCG@10 in %, seen items masked, full ranking, delta 1e-5; mean gain over runs of the same seed and noise "
        "without a correction, its standard error, and in brackets how many pairs gained. But for what a regime changes: "
        "one pre-norm block of width 32, histories of 50 items, learned positions, the whole catalogue with an "
        "output bias, 40 steps of half of all users at rate 0.03. Trained on all but the last two items."
    )
    headings = (
        *("regime", "data", "epsilon", "error model", "off, test", "gain, test", "gain, validation"),
        *("attention shift", "pairs"),
    )
    command = "dpformer reproduce reattention -o docs/results"
    return Page("Re-Attention in paired runs", command, headings, rows, [note])


def draw(figures: dict[str, Any]) -> Figure:
    """Draw both error models against the rank of an item, a panel for each regime that has both."""
    both = {name: own for name, own in figures["item variances"].items() if len(own) == 2}
    figure, axes = new_figure(1, max(1, min(3, len(both))), (4.4 * max(1, min(3, len(both))), 3.6))
    for axis, (name, own) in zip(axes[0], both.items(), strict=False):
        for label, values in own.items():
            axis.plot(values["rank"], values["variance"], marker=".", label=label)
        dataset, epsilon, _ = REGIMES[name]
        axis.set(xscale="log", yscale="log", title=f"{name}\n{dataset}, epsilon {epsilon:g}", xlabel="rank of the item")
        axis.legend(frameon=False, fontsize=8)
    axes[0, 0].set_ylabel("variance of an embedding's coordinate")
    return figure
