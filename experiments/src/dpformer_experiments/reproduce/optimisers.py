"""Optimisers of DP-SGD in paired runs: ours, its parts one at a time, and those of others. `optimisers` has the formulas.

Runs of one seed share their noise (`curators.KeysByPlace`), so that gains are sharp. Each optimiser has its rate from three, a
factor of 2 apart, on the validation item of MovieLens-1M with one seed, and the same rate on Amazon Games, as the preset
`dpformer` has; the comparison has other seeds. (Where the best was at an end the three were
moved; the file of runs has all that were run.)

The search has an eighth of the batch, at the epsilon that gives the mean gradient the noise that epsilon 8 gives with the whole
batch: it takes an eighth of the time, and what is added is the noise of drawing fewer users.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dpformer.errors import DPFormerError
from dpformer_experiments.optimisers import OPTIMISERS, OURS, PLAIN
from dpformer_experiments.reproduce import common
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, gain_of, mean_of, values_of

SEEDS, EPSILONS = (2, 3, 4), (8.0,)
SEARCH_SET, SEARCH_SEED, SEARCH_EPSILON = "ml-1m", 1, 69.0
SEARCH: dict[str, Any] = {"batch_size": 378, "epochs": 2.5}
# The recipe `dpformer` with shorter histories, fewer items, and half of its steps.
RECIPE: dict[str, Any] = {"max_length": 50, "vocabulary": 1000, "epochs": 20.0}
# The best rate of the search, which has half and twice of it too; a test compares them with the finished runs.
OTHER_RATES = {"DP-AdamBC": 0.02, "DOPPLER": 0.0075, "SGD with momentum": 0.004}
CHOSEN = {name: OTHER_RATES.get(name, 0.03) for name in OPTIMISERS}
# Below the table; `dpformer_experiments.optimisers` has the formulas.
FORMULAS = """
*Ours* is `dpformer.fit.adam`: momentum over a twentieth of the steps, one second moment per row of a matrix, no divisor
below the noise. *Last steps repeated*: after the last answer the last fifth of the steps is made again, at the same rates,
with the mean of their gradients; no answer is added. *DP-AdamBC* (Tang et al., 2023) subtracts the variance of the noise
from the second moment, which stays at least a tenth of that variance. *DOPPLER* (Zhang et al., 2024): a first-order low-pass
filter of gain .1, corrected for its start, before plain Adam. *DiSK* (Zhang et al., 2024): the simplified Kalman filter with
gain k = .7 before plain Adam. In general it needs two gradients of each user; with a look-ahead of (1 - k) / k it needs one,
at a point ahead of the weights, and this exact case is what was run. *SGD* has momentum .9, and divides by the noise, so
that rates are of one scale on all data.
"""


def rates_of(name: str) -> list[float]:
    """The rates of the search."""
    return [CHOSEN[name] * factor for factor in (0.5, 1.0, 2.0)]


def cell_of(name: str, dataset: str, rate: float, epsilon: float, seed: int, **changes: Any) -> Cell:
    """A training with this optimiser; the library's own needs no exchange."""
    return Cell(
        dataset,
        f"{name}, rate {rate:g}",
        epsilon,
        seed,
        preset="dpformer",
        options={**RECIPE, **common.HALF[dataset], "learning_rate": rate, **changes},
        search=bool(changes),
        paired=True,
        optimiser=None if name == OURS else name,
    )


def search() -> list[Cell]:
    """The search for rates, the middle ones first."""
    return [
        cell_of(name, SEARCH_SET, rates_of(name)[place], SEARCH_EPSILON, SEARCH_SEED, **SEARCH)
        for place in (1, 0, 2)
        for name in OPTIMISERS
    ]


def cells() -> list[Cell]:
    """The search, then the comparison, a seed at a time."""
    compared = [
        cell_of(name, dataset, CHOSEN[name], epsilon, seed)
        for seed in SEEDS
        for epsilon in EPSILONS
        for dataset in reversed(common.SETS)
        for name in OPTIMISERS
    ]
    return search() + compared


def run(*, how: Running, method: Sequence[str] = ()) -> dict[str, Any]:
    """Run all cells that are not finished. method: of these optimisers alone."""
    if unknown := set(method) - set(OPTIMISERS):
        raise DPFormerError(f"no optimiser is called {min(unknown)!r}; there are: {', '.join(OPTIMISERS)}")

    def wanted(cell: Cell) -> bool:
        return not method or _name(cell) in method

    return measure(run_cells(cells(), how.prepared(common.SETS), how, wanted))


def _name(cell: Cell) -> str:
    return cell.optimiser or OURS


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each optimiser, data set and epsilon, with gains over ours and over plain Adam, seed by seed; and the search."""
    found = {
        (_name(o.cell), o.cell.dataset, o.cell.epsilon, o.cell.seed): o.record
        for o in outcomes
        if o.record is not None and not o.cell.search
    }
    rows = []
    for dataset in common.SETS:
        for epsilon in EPSILONS:
            for name in OPTIMISERS:
                own = {seed: found[at] for seed in SEEDS if (at := (name, dataset, epsilon, seed)) in found}
                row: dict[str, Any] = {"optimiser": name, "dataset": dataset, "epsilon": epsilon, "rate": CHOSEN[name]}
                row["seeds"] = list(own)
                for item in ("test", "validation"):
                    row[item] = mean_of(values_of(list(own.values()), item=item))
                    for other in (OURS, PLAIN):
                        pairs = [(record, found.get((other, dataset, epsilon, seed))) for seed, record in own.items()]
                        row[f"{item} gains over {other}"] = [
                            round(values_of([mine], item=item)[0] - values_of([theirs], item=item)[0], 4)
                            for mine, theirs in pairs
                            if theirs is not None
                        ]
                rows.append(row)
    return {"unit": "%", "delta": 1e-5, "rows": rows, "search": _searched(outcomes), **ending(outcomes)}


def _searched(outcomes: Sequence[CellResult]) -> dict[str, dict[str, float | None]]:
    """NDCG@10 on the validation item by rate, for each optimiser."""
    result: dict[str, dict[str, float | None]] = {
        name: {f"{rate:g}": None for rate in rates_of(name)} for name in OPTIMISERS
    }
    for outcome in outcomes:
        if outcome.cell.search and outcome.record is not None:
            rate = outcome.cell.options["learning_rate"]
            result[_name(outcome.cell)][f"{rate:g}"] = mean_of(values_of([outcome.record], item="validation"))
    return result


def page(figures: dict[str, Any]) -> Page:
    """Figures and gains over ours by data set and epsilon; the gains of all pairs; the search."""
    settings = [(dataset, epsilon) for dataset in common.SETS for epsilon in EPSILONS]
    by_setting = {(row["optimiser"], row["dataset"], row["epsilon"]): row for row in figures["rows"]}
    lines = []
    for name in OPTIMISERS:
        own = [by_setting[name, *setting] for setting in settings]
        for item in ("test", "validation"):
            over = {
                other: gain_of([gain for row in own for gain in row[f"{item} gains over {other}"]])
                for other in (OURS, PLAIN)
                if other != name
            }
            shown = [_shown(row, item) for row in own]
            lines.append((name, item, *shown, over.get(OURS, ""), over.get(PLAIN, ""), _search_of(name, figures)))
    note = (
        "NDCG@10 in %, seen items masked, full ranking, delta 1e-5; trained on all but the last two items. In brackets: mean "
        "gain over ours with the same seed and noise, and over all data sets and epsilons with its standard error over these "
        "pairs and how many of them gained. The recipe is `dpformer` with histories of 50 items, a vocabulary of 1,000 and 40 "
        f"steps of half of all users; seeds {', '.join(map(str, SEEDS))}. All optimisers see answers to the same queries with "
        "the same noise, so the guarantee is the same."
    )
    search = (
        "Search: NDCG@10 on the validation item of MovieLens-1M by rate, seed 1, an eighth of the batch with the noise on the "
        "mean gradient that epsilon 8 gives with the whole one. The best rate is used on both data sets. An optimiser without "
        "a finished search has its middle rate. DP-AdamBC and SGD had a fourth rate, below these: the best was at an end."
    )
    settled = (f"{dataset}, epsilon {epsilon:g}" for dataset, epsilon in settings)
    headings = ("optimiser", "item", *settled, "gain over ours", "gain over plain Adam", "search")
    command = "dpformer reproduce optimisers -o docs/results"
    return Page("Optimisers for DP-SGD", command, headings, lines, [note, search, FORMULAS.strip()])


def _shown(row: dict[str, Any], item: str) -> str:
    """`4.60 (-0.12)`: the mean, and the mean gain over ours."""
    if row[item] is None:
        return "queued"
    gains = row[f"{item} gains over {OURS}"]
    return f"{row[item]:.2f}" + (f" ({mean_of(gains):+.2f})" if gains and row["optimiser"] != OURS else "")


def _search_of(name: str, figures: dict[str, Any]) -> str:
    """`0.015: 11.20, 0.03: 11.31`: what is finished."""
    found = figures["search"][name].items()
    return ", ".join(f"{rate}: {value:.2f}" for rate, value in found if value is not None) or "queued"
