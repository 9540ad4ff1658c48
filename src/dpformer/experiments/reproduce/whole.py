"""The best private next-item model at one total budget, on the paper's two data sets: one record a cell.

A cell is `cell(method, dataset, epsilon, seed, item)`: fit on everything before the item that is held out, rank all items for
everybody. Settings are the defaults, chosen on the validation item. Noise is seeded, so that figures can be made again.
"""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from dpformer.data import Dataset, prepare_named
from dpformer.errors import DataError, PrivacyError
from dpformer.evaluation import Evaluation, evaluate, held_out
from dpformer.evaluation.held_out import ITEMS as HELD_OUT
from dpformer.models.statistics import DPTransitions
from dpformer.privacy import gaussian_multiplier, noise_source

DELTA = 1e-5
METHODS: dict[str, Callable[[], DPTransitions]] = {"DP transitions": DPTransitions}

# NDCG@10 and HIT@10 in % on the test item: what is aimed at.
TARGETS: dict[tuple[str, float], tuple[float, float]] = {
    ("ml-1m", 5.0): (13.0, 21.5),
    ("ml-1m", 8.0): (14.2, 23.5),
    ("ml-1m", 10.0): (15.0, 25.0),
    ("amazon-games", 5.0): (4.2, 7.0),
    ("amazon-games", 8.0): (4.7, 7.9),
    ("amazon-games", 10.0): (5.0, 8.4),
}


def cell(method: str, dataset: Dataset, epsilon: float, seed: int, item: str) -> Evaluation:
    """Fit a method at (epsilon, 1e-5) with a noise seed, and evaluate it on the test or the validation item."""
    held, items = held_out(dataset.sequences, item), len(dataset.catalogue)
    model = METHODS[method]().fit(
        held.histories.items,
        held.histories.offsets,
        items,
        noise_multiplier=gaussian_multiplier(epsilon, DELTA),
        gaussian=noise_source("seeded", seed).gaussian,
    )
    return evaluate(model, held, items)


def run(
    *,
    epsilon: Sequence[float] = (5.0, 8.0, 10.0),
    seeds: int = 3,
    item: str = "test",
    from_ml_1m: Path | None = None,
    from_games: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """`protocols`, a line for each data set, and `records`, one for each data set, method and epsilon."""
    if seeds < 1:
        raise PrivacyError(f"{seeds} noise seeds measure nothing; give --seeds 1 or more")
    if item not in HELD_OUT:
        raise DataError(f"no item {item!r} is held out; there are: {', '.join(HELD_OUT)}")
    if any(not math.isfinite(eps) for eps in epsilon):
        raise PrivacyError("statistics are released with noise; give a finite --epsilon")
    sets = {"ml-1m": from_ml_1m, "amazon-games": from_games}
    # All of them first: a missing file should show before an hour has passed.
    datasets = {name: prepare_named(name, path) for name, path in sets.items()}
    return measure_sets(datasets, epsilon, seeds, item, say)


def measure_sets(
    datasets: dict[str, Dataset], epsilon: Sequence[float], seeds: int, item: str, say: Callable[[str], None]
) -> dict[str, Any]:
    """As `run`, on data sets at hand."""
    options = "".join(f" --epsilon {eps:g}" for eps in epsilon)
    command = f"dpformer reproduce whole{options} --seeds {seeds} --item {item} -o docs/results"
    result: dict[str, Any] = {"command": command, "protocols": {}, "records": []}
    for name, dataset in datasets.items():
        for method in METHODS:
            for eps in map(float, epsilon):
                found, started = [], time.monotonic()
                for seed in range(1, seeds + 1):
                    found.append(cell(method, dataset, eps, seed, item))
                    figure = found[-1].masked["ndcg@10"].value
                    say(f"{name}: {method}, epsilon {eps:g}, seed {seed}: NDCG@10 {100 * figure:.2f}")
                result["protocols"][name] = found[0].protocol.line()
                seconds = (time.monotonic() - started) / seeds
                result["records"] += [
                    {
                        "dataset": name,
                        "method": method,
                        "epsilon": eps,
                        "delta": DELTA,
                        "masked": masked,
                        **_figures([evaluation.masked if masked else evaluation.unmasked for evaluation in found]),
                        "seeds": list(range(1, seeds + 1)),
                        "command": command,
                        "item": item,
                        "seconds_per_seed": round(seconds, 1),
                    }
                    for masked in (True, False)
                ]
    return result


def _figures(found: list[dict[str, Any]]) -> dict[str, Any]:
    values = {name: [100 * one[name].value for one in found] for name in ("ndcg@10", "hit@10")}
    means: dict[str, Any] = {name: round(statistics.fmean(value), 3) for name, value in values.items()}
    spread = {name: round(statistics.stdev(value), 3) if len(value) > 1 else None for name, value in values.items()}
    return means | {"std": spread}


def show(result: dict[str, Any]) -> Table:
    """The table for people."""
    caption = "In %, items of the history masked. " + " ".join(
        f"{name}: {line}." for name, line in result["protocols"].items()
    )
    table = Table("data", "method", "epsilon", "NDCG@10 / HIT@10", "target", caption=caption, caption_justify="left")
    for record in result["records"]:
        if record["masked"]:
            target = TARGETS.get((record["dataset"], record["epsilon"])) if record["item"] == "test" else None
            table.add_row(
                record["dataset"],
                record["method"],
                f"{record['epsilon']:g}",
                f"{record['ndcg@10']:.2f} / {record['hit@10']:.2f}",
                f"{target[0]:g} / {target[1]:g}" if target else "",
            )
    return table
