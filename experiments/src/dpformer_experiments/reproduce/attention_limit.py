"""What correcting attention can win at best, in networks with learned queries and keys, and what it could act on under DP-SGD.

A Transformer is trained without privacy, its embedding gets noise of known variance, and attention is left as it is, corrected in
several ways, or taken from the network without noise (`noisy_attention`). The last is a limit for every correction of scores.
Then networks trained by DP-SGD: their learned scores times 0 (attention without queries and keys), 1 and other factors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.noisy_attention import AS_IT_IS, BY_KEY, CLEAN, CORRECTED, DRAWS, EVEN, LEVELS, SCALES, USERS
from dpformer_experiments.reproduce import regimes
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, gain_of, mean_of

SETS = ("ml-1m",)
GAINS = (CORRECTED, BY_KEY, EVEN, CLEAN)
# Of networks trained by DP-SGD: regimes of `regimes`, and seeds.
PRIVATE = ("post-norm", "whole catalogue, pre-norm", "preset dpformer as it is")
PRIVATE_SEEDS = 2
# One block, the whole catalogue and learned positions, as in the regimes of Re-Attention, with the paper's width.
SHAPE: dict[str, Any] = {
    "max_length": 50,
    "dropout": 0.0,
    "blocks": 1,
    "batch_size": 128,
    "epochs": 20.0,
    "learning_rate": 2e-3,
    "reattention": "logits",
}


def cells() -> list[Cell]:
    """A training without privacy for each place of the layer norm; then those by DP-SGD."""
    without = [
        Cell(
            *("ml-1m", f"noise on a trained embedding, {norm}-norm", math.inf, 1),
            preset="paper",
            options={**SHAPE, "norm": norm},
            search=True,
            noisy=True,
        )
        for norm in ("post", "pre")
    ]
    return without + [_private(name, seed) for seed in range(1, PRIVATE_SEEDS + 1) for name in PRIVATE]


def _private(name: str, seed: int) -> Cell:
    dataset, epsilon, change = regimes.REGIMES[name]
    options = {} if change is None else {**regimes.BASE[dataset], **change}
    label = f"learned scores, {name}"
    return Cell(dataset, label, epsilon, seed, preset="dpformer", options=options, search=True, noisy=True)


def run(*, how: Running) -> dict[str, Any]:
    """Run the cells that are not finished."""
    return measure(run_cells(cells(), how.prepared(SETS), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each network and level of noise, with gains draw by draw; and figures by factor for networks of DP-SGD."""
    rows, scales = [], []
    for outcome in outcomes:
        found = None if outcome.record is None else outcome.record["noisy"]
        name, seed = outcome.cell.method.partition(", ")[2], outcome.cell.seed
        if not math.isinf(outcome.cell.epsilon):
            figures = {f"{scale:g}": None for scale in SCALES} if found is None else found
            scales.append({"network": name, "epsilon": outcome.cell.epsilon, "seed": seed, "by factor": figures})
            continue
        for place, level in enumerate(LEVELS):
            row: dict[str, Any] = {"network": name, "noise": level}
            row["without noise"] = None if found is None else found["without noise"]
            values = {} if found is None else found["noisy"][place]
            row[AS_IT_IS] = mean_of(values.get(AS_IT_IS, []))
            for kind in GAINS:
                pairs = zip(values.get(AS_IT_IS, []), values.get(kind, []), strict=True)
                row[f"{kind}, gains"] = [round(after - before, 4) for before, after in pairs]
            rows.append(row)
    about = {"unit": "%", "item": "validation", "users": USERS, "draws": DRAWS}
    return {**about, "rows": rows, "learned scores": scales, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Gains beside what noise has cost, and below it what learned scores are worth under DP-SGD."""
    rows = []
    for row in figures["rows"]:
        numbers: tuple[str, ...] = ("queued",) * (2 + len(GAINS))
        if row[AS_IT_IS] is not None:
            gains = (gain_of(row[f"{kind}, gains"]) for kind in GAINS)
            numbers = (f"{row['without noise']:.2f}", f"{row[AS_IT_IS]:.2f}", *gains)
        rows.append((row["network"], f"{row['noise']:g}", *numbers))
    note = (
        f"NDCG@10 in % on the validation item of {figures['users']:,} users of MovieLens-1M; a block of width 64 over the whole "
        "catalogue, histories of 50 items, learned positions, trained for 20 epochs without privacy, one seed. Noise: its mean "
        "variance over the mean square of the embedding; rare items have up to 5.6 times the variance of the most popular, as "
        f"accumulated noise has. Mean gains over {figures['draws']} draws of noise, with standard errors, and in how many draws. "
        "Corrected: Re-Attention with the true variances. By key: each key times its reliability, t / (t + v) for a mean square "
        "t and a variance v of the noise (its root with pre-norm, where layer norm takes the length off). Even: all keys times "
        "the mean of these factors. Clean scores: attention scores of the network without noise, all else noisy."
    )
    scaled = [
        (
            row["network"],
            f"{row['epsilon']:g}",
            str(row["seed"]),
            *(_figure(row["by factor"][f"{s:g}"]) for s in SCALES),
        )
        for row in figures["learned scores"]
    ]
    heads = ("trained by DP-SGD", "epsilon", "seed", *(f"scores times {scale:g}" for scale in SCALES))
    worth = (
        "What learned scores are worth under DP-SGD, on the same item and users: NDCG@10 when `<q, k> / sqrt(d)` is multiplied "
        "by a factor after training. At 0 attention is even (in the preset it falls off with the lag), at 1 as trained."
    )
    headings = ("network", "noise", "without noise", "noisy", *(f"gain, {kind}" for kind in GAINS))
    command = "dpformer reproduce attention-limit -o docs/results"
    notes = [note, Page("", "", heads, scaled).grid(), worth]
    return Page("What correcting attention can win at best", command, headings, rows, notes)


def _figure(value: float | None) -> str:
    return "queued" if value is None else f"{value:.2f}"
