"""What Re-Attention costs: a private step of the Transformer with it, without it, and with tracking alone.

Work as in the clipping benchmark (d 64, 2 blocks), interleaved in one process; ratios of times.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from dpformer.clipping import PhantomClipping, TiedCrossEntropy
from dpformer.experiments.bench.child import run_child
from dpformer.experiments.bench.clipping import QUICK, WORKLOADS, Workload, make_batches
from dpformer.models.transformer import ReAttention, Transformer

CORRECTIONS = {"vanilla": None, "re-attention": ReAttention(), "tracked, not corrected": ReAttention("none")}


def measure(workload: dict[str, Any], repeats: int) -> dict[str, Any]:
    """Times of a pass over all users, `[repeats]` for each kind of attention."""
    w = Workload(**workload)
    batches = make_batches(w)
    runs = {}
    for name, correction in CORRECTIONS.items():
        torch.manual_seed(0)
        model = Transformer(w.M - 1, w.L, d=w.d, reattention=correction)
        if correction is not None:
            model.set_errors(3.0, 1024.0, 1 / torch.arange(1, w.M + 1), torch.linspace(1, 0.1, w.L))
        runs[name] = (model, PhantomClipping(model), TiedCrossEntropy())

    def losses(model: Transformer, head: TiedCrossEntropy, s: Tensor, y: Tensor, weights: Tensor) -> Tensor:
        return head(model(s), model.table, y, weights, model.output_bias)

    times: dict[str, list[float]] = {name: [] for name in runs}
    for repeat in range(repeats + 1):
        for name, (model, clipping, head) in runs.items():
            start = time.perf_counter()
            for s, y, weights in batches:
                clipping.backward(partial(losses, model, head, s, y, weights))
            if repeat:
                times[name].append(time.perf_counter() - start)
    return {"times": times}


def run(quick: bool) -> dict[str, Any]:
    """Time over that of vanilla attention, by workload: median and range of the ratios."""
    figures: dict[str, Any] = {"torch": torch.__version__, "threads": torch.get_num_threads(), "workloads": {}}
    for key, workload in (QUICK if quick else WORKLOADS).items():
        here = "dpformer.experiments.bench.reattention:measure"
        times = run_child(here, workload=asdict(workload), repeats=2 if quick else 6)["times"]
        figures["workloads"][key] = {}
        for name, own in times.items():
            ratios = [t / v for t, v in zip(own, times["vanilla"], strict=True)]
            figures["workloads"][key][name] = {
                "time_over_vanilla": statistics.median(ratios),
                "spread": [min(ratios), max(ratios)],
            }
    return figures


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table("workload", "attention", "time over vanilla", "(spread)", title="A private step, by attention")
    for key, rows in figures["workloads"].items():
        for name, row in rows.items():
            low, high = row["spread"]
            table.add_row(key, name, f"{row['time_over_vanilla']:.3f}", f"{low:.2f}-{high:.2f}")
    return table
