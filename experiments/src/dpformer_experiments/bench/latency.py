"""Measure how long a ranked list takes with 24 thousand, 100 thousand and 1 million items, on one core.

    vocabulary   the model of preset `distilled`: it scores 1,500 items by the history and orders the others
    whole        a network that scores all items, as of preset `paper`

Weights are random: they do not change the work. One history of 30 items, k = 10, items of the history left out; without a filter,
and with one that half of the items pass. HTTP is not included: `scripts/load_test.py` measures it. Times are processor time.
"""

import time
from typing import Any

import numpy as np
import torch
from rich.table import Table

from dpformer.models import Ensemble, Recommender, Transformer, TransformerSpec, TransitionScorer
from dpformer.models.top import Best

ITEMS = (24_000, 100_000, 1_000_000)
HEAD, VOCABULARY, D, LENGTH, K = 1368, 1500, 64, 30, 10


def models(items: int) -> dict[str, Recommender]:
    """Models with random weights."""
    torch.manual_seed(0)
    tail = -torch.arange(items + 1, dtype=torch.float32)
    tail[1 : HEAD + 1] = 0
    tail[0] = -torch.inf
    matrix = torch.randn(HEAD + 1, HEAD)
    transitions = TransitionScorer.of(
        {"head": torch.arange(1, HEAD + 1), "matrix": matrix, "prior": torch.randn(HEAD), "tail": tail}
    )
    small = Transformer(TransformerSpec(items=items, max_length=LENGTH, d=D, vocabulary=VOCABULARY)).eval()
    whole = Transformer(TransformerSpec(items=items, max_length=LENGTH, d=D, blocks=2)).eval()
    return {"vocabulary": Ensemble.of(small, transitions, 2.0).eval(), "whole": whole}


def run(quick: bool) -> dict[str, Any]:
    """Milliseconds of one list, for each number of items and each model."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return {str(items): _measure(items, 20 if quick else 200) for items in (ITEMS[:2] if quick else ITEMS)}
    finally:
        torch.set_num_threads(threads)


def _measure(items: int, rounds: int) -> dict[str, Any]:
    random = np.random.default_rng(0)
    histories = random.integers(1, min(items, VOCABULARY) + 1, (rounds + 3, LENGTH))
    half = torch.from_numpy(random.random(items + 1) < 0.5)
    found = {}
    for name, model in models(items).items():
        for kind, allowed in (("", None), (", filtered", half)):
            best = Best(model, K, allowed)
            times = []
            for history in histories:
                began = time.process_time()
                best.rank([history], [history])
                times.append(1000 * (time.process_time() - began))
            p50, p99 = np.quantile(times[3:], [0.5, 0.99])
            found[name + kind] = {"p50_ms": round(float(p50), 2), "p99_ms": round(float(p99), 2)}
    return found


def show(figures: dict[str, Any]) -> Table:
    """One row per model."""
    table = Table("ms of one list, p50 / p99", *(f"{int(items):,} items" for items in figures))
    for name in next(iter(figures.values())):
        table.add_row(name, *(f"{one[name]['p50_ms']} / {one[name]['p99_ms']}" for one in figures.values()))
    return table
