"""What correcting attention can win at best, in networks with learned queries and keys.

A Transformer is trained without privacy, its embedding gets noise of known variance, and attention is left as it is, corrected by
Re-Attention, or taken from the network without noise (`noisy_attention`). The last is a limit for every correction of scores.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dpformer_experiments.noisy_attention import AS_IT_IS, CLEAN, CORRECTED, DRAWS, LEVELS, USERS
from dpformer_experiments.reproduce.cells import Cell
from dpformer_experiments.reproduce.page import Page
from dpformer_experiments.reproduce.runner import CellResult, Running, run_cells
from dpformer_experiments.reproduce.summary import ending, gain_of, mean_of

SETS = ("ml-1m",)
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
    """A training for each place of the layer norm."""
    return [
        Cell(
            *("ml-1m", f"noise on a trained embedding, {norm}-norm", math.inf, 1),
            preset="paper",
            options={**SHAPE, "norm": norm},
            search=True,
            noisy=True,
        )
        for norm in ("post", "pre")
    ]


def run(*, how: Running) -> dict[str, Any]:
    """Run the cells that are not finished."""
    return measure(run_cells(cells(), how.prepared(SETS), how))


def measure(outcomes: Sequence[CellResult]) -> dict[str, Any]:
    """A row for each network and level of noise: means, and what the correction and clean scores gain, draw by draw."""
    rows = []
    for outcome in outcomes:
        found = None if outcome.record is None else outcome.record["noisy"]
        for place, level in enumerate(LEVELS):
            row: dict[str, Any] = {"network": outcome.cell.method.rpartition(", ")[2], "noise": level}
            row["without noise"] = None if found is None else found["without noise"]
            values = {} if found is None else found["noisy"][place]
            row[AS_IT_IS] = mean_of(values.get(AS_IT_IS, []))
            for kind in (CORRECTED, CLEAN):
                pairs = zip(values.get(AS_IT_IS, []), values.get(kind, []), strict=True)
                row[f"{kind}, gains"] = [round(after - before, 4) for before, after in pairs]
            rows.append(row)
    return {"unit": "%", "item": "validation", "users": USERS, "draws": DRAWS, "rows": rows, **ending(outcomes)}


def page(figures: dict[str, Any]) -> Page:
    """Gains beside what noise has cost."""
    rows = []
    for row in figures["rows"]:
        numbers: tuple[str, ...] = ("queued",) * 4
        if row[AS_IT_IS] is not None:
            gains = (gain_of(row[f"{kind}, gains"]) for kind in (CORRECTED, CLEAN))
            numbers = (f"{row['without noise']:.2f}", f"{row[AS_IT_IS]:.2f}", *gains)
        rows.append((row["network"], f"{row['noise']:g}", *numbers))
    note = (
        f"NDCG@10 in % on the validation item of {figures['users']:,} users of MovieLens-1M; a block of width 64 over the whole "
        "catalogue, histories of 50 items, learned positions, trained for 20 epochs without privacy, one seed. Noise: its mean "
        "variance over the mean square of the embedding; rare items have up to 5.6 times the variance of the most popular, as "
        f"accumulated noise has. Mean gains over {figures['draws']} draws of noise, with standard errors, and in how many draws. "
        "Corrected: Re-Attention with the true variances. Clean scores: attention scores of the network without noise, all else "
        "noisy."
    )
    headings = ("network", "noise", "without noise", "noisy", "gain, corrected", "gain, clean scores")
    command = "dpformer reproduce attention-limit -o docs/results"
    return Page("What correcting attention can win at best", command, headings, rows, [note])
