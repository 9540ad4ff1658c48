"""All trainings behind docs/results.md and docs/paper.md, in the order of their value; `make paper` runs them.

The other results show what is finished: they have the same cells and read the same file of runs.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.reproduce import (
    attention_limit,
    ceiling,
    common,
    convergence,
    heat_maps,
    optimisers,
    paper,
    people,
    regimes,
    tables,
    time_split,
)
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.methods import (
    BASELINES,
    COMMON,
    LITERAL,
    METHODS,
    OURS,
    REPAIRED,
    SMALL_BUDGETS,
    in_order,
)
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, mean_of

MAIN_EPSILON = (8.0,)


def phases() -> dict[str, list[Cell]]:
    """The cells of each phase, in order; a cell belongs to the first phase that names it."""
    named = {
        "rates of the common recipe, first": [cell for cell in common.cells() if _near(cell)],
        "common recipe, one seed, epsilon 8": _rows(COMMON, 1, MAIN_EPSILON),
        "popularity": _rows(BASELINES, first=0),
        "preset dpformer, one seed": [cell for cell in _rows(OURS, 1, first=0) if cell.preset == "pure"],
        "common recipe, one seed": _rows(COMMON, 1, paper.EPSILONS),
        "rates of the common recipe": common.cells(),
        "preset dpformer, three seeds": [cell for cell in _rows(OURS, first=0) if cell.preset == "pure"],
        "common recipe, three seeds": _rows(COMMON),
        "ours, one seed": _rows(OURS, 1, first=0),
        "repaired, both Transformers, epsilon 8": _rows(REPAIRED, 1, MAIN_EPSILON, first=3),
        "ours, three seeds": _rows(OURS, first=0),
        "repaired, both Transformers": _rows(REPAIRED, 1, first=3),
        "limit of attention": attention_limit.cells(),
        "ceiling": ceiling.cells(),
        "small budgets": _rows(SMALL_BUDGETS),
        "convergence": convergence.declare(convergence.SETS, paper.SEEDS_OF_CONVERGENCE),
        "heat maps": [cell for maps in heat_maps.MAPS.values() for cell in maps.cells(1)],
        "repaired": _rows(REPAIRED),
        "split by time": time_split.cells(),
        "Re-Attention, three seeds": regimes.cells(3),
        "more people": people.cells(),
        "baselines": _rows(BASELINES) + _rows(OURS),
        "optimisers": optimisers.cells(),
        "Re-Attention": regimes.cells(),
        "literal": _rows(LITERAL),
    }
    seen: set[str] = set()
    result: dict[str, list[Cell]] = {}
    for phase, cells in named.items():
        result[phase] = []
        for cell in cells:
            about = json.dumps([cell.dataset, cell.settings()], sort_keys=True)
            if about not in seen:
                seen.add(about)
                result[phase].append(cell)
    return result


def _near(cell: Cell) -> bool:
    """Whether a rate may be the best: recurrent networks take larger ones, and Amazon Games larger ones than MovieLens-1M."""
    small = 0 if cell.dataset == "ml-1m" else 1
    rates = common.RATES[2:] if "model" in cell.options else common.RATES[small:4]
    return cell.options["learning_rate"] in rates


def _rows(family: str, seeds: int = tables.SEEDS, epsilons: Sequence[float] = (), first: int = 9) -> list[Cell]:
    """Cells of a family in both tables, Amazon Games first since it takes less time. first: of methods up to this one."""
    methods = tuple(method for method in METHODS if method.family == family and method.first <= first)
    cells = [cell for dataset in reversed(tables.SETS.values()) for cell in in_order(methods, dataset, seeds)]
    return [cell for cell in cells if not epsilons or cell.epsilon in epsilons]


def run(*, how: Running) -> dict[str, Any]:
    """Run all cells that are not finished."""
    order = phases()
    cells = [cell for own in order.values() for cell in own]
    folders = how.prepared(tuple(tables.SETS.values())) | people.prepared(how) | time_split.folders(how)
    return measure(order, run_cells(cells, folders, how))


def measure(order: dict[str, list[Cell]], outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each phase: its cells, how many are finished, and the minutes of one."""
    left, rows = list(outcomes), []
    for phase, cells in order.items():
        own, left = left[: len(cells)], left[len(cells) :]
        minutes = mean_of([o.record["core_seconds"] / 60 for o in own if o.record is not None])
        finished = sum(o.record is not None for o in own)
        rows.append({"phase": phase, "cells": len(own), "finished": finished, "minutes a cell": minutes})
    return {"rows": rows, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Progress by phase."""
    rows = [
        (
            row["phase"],
            str(row["cells"]),
            str(row["finished"]),
            "" if row["minutes a cell"] is None else f"{row['minutes a cell']:.1f}",
        )
        for row in figures["rows"]
    ]
    note = "Minutes: of one core. Each finished training is a line of runs.jsonl, and is not run again."
    headings = ("phase", "trainings", "finished", "minutes of one")
    return Page("All trainings, in order", "dpformer reproduce paper -o docs/results", headings, rows, [note])
