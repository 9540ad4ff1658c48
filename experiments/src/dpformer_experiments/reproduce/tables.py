"""The paper's two tables of accuracy: reported, ours, and the difference, with baselines and non-private ceilings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce import paper
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import DELTA, FAMILIES, METHODS, POPULAR, Method, in_order, shown
from dpformer_experiments.reproduce.page import Page, Part, new_figure
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

SETS = {"table-1": "ml-1m", "table-2": "amazon-games"}
TITLES = {"table-1": "Table 1: MovieLens-1M", "table-2": "Table 2: Amazon Games"}
SEEDS = 3


def run(
    name: str, *, how: Running, seeds: int = SEEDS, method: Sequence[str] = (), epsilon: Sequence[float] = ()
) -> dict[str, Any]:
    """Run all cells of a table that are not finished. method, epsilon: run only these rows; the others show finished cells."""
    unknown = set(method) - {one.name for one in METHODS}
    if unknown:
        names = "; ".join(one.name for one in METHODS)
        raise DPFormerError(f"no method is called {min(unknown)!r}; there are: {names}")
    dataset = SETS[name]
    budgets = sorted({cell.epsilon for one in METHODS for cell in one.cells(dataset, 1)})
    if absent := set(epsilon) - set(budgets):
        raise DPFormerError(f"no row has epsilon {min(absent):g}; there are: {', '.join(f'{e:g}' for e in budgets)}")

    def wanted(cell: Cell) -> bool:
        return (not method or cell.method in method) and (not epsilon or cell.epsilon in epsilon)

    return measure(name, METHODS, run_cells(in_order(METHODS, dataset, seeds), how.prepared([dataset]), how, wanted))


def measure(name: str, methods: tuple[Method, ...], outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """The figures of a table of these methods, from the results of their cells."""
    rows = []
    dataset = outcomes[0].cell.dataset
    for method in methods:
        mine = [outcome for outcome in outcomes if outcome.cell.method == method.name]
        for epsilon in sorted({*method.shown, *(outcome.cell.epsilon for outcome in mine)}):
            rows.append(_row(name, method, dataset, epsilon, [o for o in mine if o.cell.epsilon == epsilon]))
    return {
        "name": name,
        "dataset": dataset,
        "unit": "%",
        "delta": DELTA,
        "seeds": max(outcome.cell.seed for outcome in outcomes),
        "protocol": protocols(outcomes),
        "rows": rows,
        **ending(outcomes),
    }


def _row(name: str, method: Method, dataset: str, epsilon: float, outcomes: list[CellResult]) -> dict[str, Any]:
    """A row of the table: means and spreads over finished seeds, the paper's figures, and why seeds are missing."""
    outcomes = sorted(outcomes, key=lambda outcome: outcome.cell.seed)
    by_seed = {o.cell.seed: o.record for o in outcomes if o.record is not None}
    earlier = {} if by_seed else {o.cell.seed: o.earlier for o in outcomes if o.earlier is not None}
    records = list((by_seed or earlier).values())
    row: dict[str, Any] = {
        "family": method.family,
        "dataset": dataset,
        "method": method.name,
        "epsilon": str(epsilon) if math.isinf(epsilon) else epsilon,
        "delta": DELTA,
    }
    said = paper.reported(dataset, method.compare or method.name, epsilon)
    for place, metric in enumerate(METRICS):
        row |= mean_and_spread(metric, values_of(records, metric))
        row[f"reported {metric}"] = None if said is None else said[2 * place]
        row[f"difference {metric}"] = None if said is None or not records else round(row[metric] - said[2 * place], 4)
    for label, item, kind in (("unmasked", "test", "unmasked"), ("validation", "validation", "masked")):
        for metric in METRICS:
            row |= mean_and_spread(f"{label} {metric}", values_of(records, metric, item, kind))
    privacy = records[0]["privacy"] if records else None
    row["epsilon at delta 1/N"] = None if privacy is None else privacy["epsilon_at_delta_1_over_users"]
    row["seeds"] = list(by_seed or earlier)
    row["minutes a seed"] = mean_of([record.get("minutes", record.get("core_seconds", 0) / 60) for record in records])
    row["version"] = "earlier" if earlier else "this"
    missing = [outcome for outcome in outcomes if outcome.record is None]
    row["missing"] = {str(o.cell.seed): o.why if o.failed or not method.instead else method.instead for o in missing}
    if not outcomes:
        row["missing"] = {"1": method.instead}
    row["command"] = outcomes[0].cell.command(name) if outcomes else None
    return row


HEADINGS = (
    *("method", "epsilon", "reported NDCG@10 / HIT@10", "our NDCG@10", "our HIT@10", "difference"),
    *("unmasked", "validation", "epsilon at delta 1/N", "seeds", "min a seed"),
)


def page(figures: dict[str, Any]) -> Page:
    """The table with its notes."""
    protocol = [f"{item[0].upper()}{item[1:]}." for item in figures["protocol"].values()]
    notes = [
        f"In %; mean and standard deviation over seeds; delta {figures['delta']:g}, user level: one user's events "
        "replaced by none. Difference: ours minus the paper's; methods that the paper does not have are compared with its "
        "DPFormer. "
        "The paper's delta is not stated, and its figures are the best of a grid of 25 settings on the test item; ours are of "
        "settings that were fixed before the test item was looked at, of the last iterate. "
        "Epsilon inf: without privacy. A row without figures says what there is instead. Minutes: of one core.",
        "The test item is predicted from all items before it. Noise is seeded so that the figures can be reproduced.",
        *protocol,
    ]
    seeds = f" --seeds {figures['seeds']}" if figures["seeds"] != SEEDS else ""
    title = TITLES.get(figures["name"], figures["name"])
    families = dict.fromkeys(row["family"] for row in figures["rows"])
    parts = [
        Part(family, FAMILIES[family], [texts(row) for row in figures["rows"] if row["family"] == family])
        for family in families
    ]
    rows = [row for part in parts for row in part.rows]
    command = f"dpformer reproduce {figures['name']}{seeds} -o docs/results"
    return Page(title, command, HEADINGS, rows, notes, brief=6, parts=parts)


def texts(row: dict[str, Any]) -> tuple[str, ...]:
    """A row as texts."""
    reasons = ["of an earlier version"] if row["version"] == "earlier" else list(dict.fromkeys(row["missing"].values()))
    at_n = row["epsilon at delta 1/N"]
    return (
        shown(row["method"]),
        f"{float(row['epsilon']):g}",
        _pair(row, "reported "),
        with_spread(row, "ndcg@10") or "; ".join(reasons),
        with_spread(row, "hit@10"),
        _pair(row, "difference ", "+.2f"),
        _pair(row, "unmasked "),
        _pair(row, "validation "),
        "" if at_n is None or at_n == "inf" else f"{at_n:.2f}",
        " ".join(map(str, row["seeds"])) + (f" ({'; '.join(reasons)})" if reasons and row["seeds"] else ""),
        "" if row["minutes a seed"] is None else f"{row['minutes a seed']:.1f}",
    )


def _pair(row: dict[str, Any], prefix: str, form: str = ".2f") -> str:
    values = [row[prefix + metric] for metric in METRICS]
    return "" if None in values else " / ".join(f"{value:{form}}" for value in values)


def _line(
    label: str, names: Sequence[str], colour: str, marker: str = "o"
) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """A line of the figure of accuracy: its label, the methods whose rows are its points, and how it is drawn."""
    return label, tuple(names), {"color": colour, "marker": marker, "markersize": 5}


def _ours(preset: str, method: str) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    """A preset: epsilon 1 to 3 with one seed, 5 to 10 with three."""
    colours = {"default": "C0", "dpformer": "C1", "distilled": "C2"}
    return _line(f"preset {preset}", [f"{method}, small budget", f"{method}, all but the test item"], colours[preset])


# The table has all rows; a figure of all of them cannot be read.
DRAWN = (
    _ours("default", "DPFormer with a private prior"),
    _ours("dpformer", "DPFormer, pure"),
    _ours("distilled", "DP transitions and the distilled Transformer"),
    _line("Transformer, common recipe", ["Transformer, common recipe"], "C4", "^"),
    _line("GRU, common recipe", ["GRU, common recipe"], "C5", "v"),
    _line("DPFormer, the paper's shape repaired", ["DPFormer, repaired"], "C3", "D"),
)


def draw(figures: dict[str, Any]) -> Figure:
    """Draw accuracy against epsilon."""
    figure, axes = new_figure(size=(7.2, 4.6))
    draw_accuracy(axes[0, 0], figures)
    return figure


def draw_accuracy(axes: Any, figures: dict[str, Any]) -> None:
    """Draw NDCG@10 against epsilon of the rows in `DRAWN`: ours with spreads, the paper's dashed, popularity as a level."""
    rows = [row for row in figures["rows"] if row["ndcg@10"] is not None and row["version"] == "this"]
    for label, methods, style in DRAWN:
        mine = sorted(
            (row for row in rows if row["method"] in methods and row["epsilon"] != "inf"),
            key=lambda row: float(row["epsilon"]),
        )
        if mine:
            x, y = [float(row["epsilon"]) for row in mine], [row["ndcg@10"] for row in mine]
            axes.errorbar(x, y, yerr=[row["ndcg@10 std"] or 0.0 for row in mine], capsize=3, label=label, **style)
    for name, colour in ((paper.DPFORMER, "black"), (paper.VANILLA, "grey")):
        if figures["dataset"] in paper.TABLES:
            values = [value[0] for value in paper.TABLES[figures["dataset"]][name]]
            label = f"the paper's {name.split(' (')[0]}, as reported"
            axes.plot(paper.EPSILONS, values, "--", marker="s", markersize=4, color=colour, label=label)
    for row in rows:
        if row["method"] == POPULAR:
            axes.axhline(row["ndcg@10"], linewidth=1, linestyle=":", color="grey", label=POPULAR)
    axes.set(xlabel="epsilon", ylabel="NDCG@10 (%), test item, seen masked", title=figures["dataset"])
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))
