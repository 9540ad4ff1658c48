"""Heat maps over batch size and learning rate: sharing the embedding (MovieLens-1M, epsilon 5), both models (Games, epsilon 8).

The paper shows both as pictures, without numbers to compare with. All of its 100 epochs are made: with fewer, large batches would
have too few steps to compare. What is cut: one block of width 32, a vocabulary of 1,000 items, histories of 20 items (13
on Games), no dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import REPAIR, SMALL
from dpformer_experiments.reproduce.page import Page, new_figure
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import (
    METRICS,
    ending,
    mean_and_spread,
    mean_of,
    protocols,
    values_of,
    with_spread,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Maps:
    """One map for each of `settings`: options that change the paper's preset. claim: the paper's conclusion."""

    title: str
    claim: str
    dataset: str
    epsilon: float
    settings: dict[str, dict[str, Any]]
    batch_sizes: tuple[int, ...] = paper.BATCH_SIZES
    learning_rates: tuple[float, ...] = paper.LEARNING_RATES

    def cells(self, seeds: int, preset: str = "paper") -> list[Cell]:
        """All cells, large batches and rates first: the paper has its best figures there, and they cost the same."""
        return [
            Cell(
                self.dataset,
                f"{setting}, batch {batch}, rate {rate:g}",
                self.epsilon,
                seed,
                preset=preset,
                options={
                    **REPAIR,
                    **SMALL.get(self.dataset, {}),
                    **options,
                    "batch_size": batch,
                    "learning_rate": rate,
                },
            )
            for seed in range(1, seeds + 1)
            for batch in sorted(self.batch_sizes, reverse=True)
            for rate in sorted(self.learning_rates, reverse=True)
            for setting, options in self.settings.items()
        ]


MAPS = {
    "embedding-sharing": Maps(
        "Sharing the embedding between input and output",
        "sharing improves accuracy consistently; large batches with large rates are best",
        "ml-1m",
        5.0,
        {
            "shared": {"reattention": "off"},
            "not shared": {"reattention": "off", "tied": False},
            "not shared, half the width": {"reattention": "off", "tied": False, "d": 16},
        },
    ),
    "grid": Maps(
        "Both models over batch size and learning rate",
        "DPFormer is better in most cells, above all on the diagonal of large batches with large rates",
        "amazon-games",
        8.0,
        {"DPFormer": {}, "Transformer": {"reattention": "off"}},
    ),
}


def run(name: str, *, how: Running, seeds: int = 1) -> dict[str, Any]:
    """Run all cells of the maps that are not finished."""
    maps = MAPS[name]
    return measure(name, maps, run_cells(maps.cells(seeds), how.prepared([maps.dataset]), how))


def measure(name: str, maps: Maps, outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """The figures of the maps, from the results of their cells."""
    rows = []
    for setting in maps.settings:
        for batch in maps.batch_sizes:
            for rate in maps.learning_rates:
                label = f"{setting}, batch {batch}, rate {rate:g}"
                mine = [outcome for outcome in outcomes if outcome.cell.method == label]
                records = [outcome.record for outcome in mine if outcome.record is not None]
                row: dict[str, Any] = {"setting": setting, "batch_size": batch, "learning_rate": rate}
                for metric in METRICS:
                    row |= mean_and_spread(metric, values_of(records, metric))
                row["validation ndcg@10"] = mean_of(values_of(records, item="validation"))
                row["seeds"] = [outcome.cell.seed for outcome in mine if outcome.record is not None]
                row["missing"] = next((outcome.why for outcome in mine if outcome.record is None), "")
                row["command"] = mine[0].cell.command(name)
                rows.append(row)
    return {
        "name": name,
        "title": maps.title,
        "claim": maps.claim,
        "dataset": maps.dataset,
        "epsilon": maps.epsilon,
        "unit": "%",
        "protocol": protocols(outcomes).get("test", ""),
        "rows": rows,
        **ending(outcomes),
    }


def page(figures: dict[str, Any]) -> Page:
    """A line for each setting and batch size, a column for each rate."""
    rates = list(dict.fromkeys(row["learning_rate"] for row in figures["rows"]))
    lines: dict[tuple[str, int], list[str]] = {}
    for row in figures["rows"]:
        text = with_spread(row, "ndcg@10") or row["missing"]
        lines.setdefault((row["setting"], row["batch_size"]), []).append(text)
    length = SMALL.get(figures["dataset"], REPAIR)["max_length"]
    notes = [
        f"NDCG@10 in % on the test item, {figures['dataset']}, epsilon {figures['epsilon']:g}, delta 1e-05, 100 epochs of one "
        f"post-norm block of width 32 with a vocabulary of 1,000 items, histories of {length} items and no dropout, last "
        f"iterate. The paper shows this as a picture, without numbers, and concludes: {figures['claim']}. HIT@10 and the "
        "validation item are in the csv and the JSON.",
        *([figures["protocol"] + "."] if figures["protocol"] else []),
    ]
    headings = ("setting", "batch size", *(f"rate {rate:g}" for rate in rates))
    rows = [(setting, str(batch), *values) for (setting, batch), values in lines.items()]
    return Page(figures["title"], f"dpformer reproduce {figures['name']} -o docs/results", headings, rows, notes)


def draw(figures: dict[str, Any]) -> Figure:
    """Draw a map for each setting, on one scale; missing cells are white."""
    import numpy as np

    settings = list(dict.fromkeys(row["setting"] for row in figures["rows"]))
    batches = list(dict.fromkeys(row["batch_size"] for row in figures["rows"]))
    rates = list(dict.fromkeys(row["learning_rate"] for row in figures["rows"]))
    measured = [row["ndcg@10"] for row in figures["rows"] if row["ndcg@10"] is not None] or [0.0]
    figure, axes = new_figure(1, len(settings), (3.4 * len(settings), 3.2))
    for axis, setting in zip(axes[0], settings, strict=True):
        values = [row["ndcg@10"] for row in figures["rows"] if row["setting"] == setting]
        shown = np.array([np.nan if value is None else value for value in values]).reshape(len(batches), len(rates))
        axis.imshow(shown, vmin=0, vmax=max(measured), cmap="viridis", aspect="auto")
        for (i, j), value in np.ndenumerate(shown):
            text, color = "" if np.isnan(value) else f"{value:.2f}", "black" if value > 0.7 * max(measured) else "white"
            axis.text(j, i, text, ha="center", va="center", color=color, fontsize=7)
        axis.set(title=setting, xlabel="learning rate", xticks=range(len(rates)), yticks=range(len(batches)))
        axis.set_xticklabels([f"{rate:g}" for rate in rates])
        axis.set_yticklabels(batches)
    axes[0, 0].set_ylabel("batch size")
    figure.suptitle(f"the paper: {figures['claim']}", fontsize=9)
    return figure
