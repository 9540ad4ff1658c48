"""Compute ratios from measurements, and compare each with its goal.

private_over_plain            speed of private training over ordinary non-private PyTorch on the same micro-batches
private_over_own_nonprivate   ... over the project's own loop without privacy
private_over_opacus_hooks     ... over Opacus' per-sample gradients on the same micro-batches
private_over_opacus_padded    ... over Opacus with all users padded to L, as many at once as fit into memory
head_gemm_efficiency          6 x tokens x M x d operations over the head's time, over the speed of its matrix products
memory_over_plain             peak memory of the process over plain's, at the same batch; `_4096` at 4,096 users
memory_flatness               largest over smallest peak memory, as the batch grows
million_items_peak_gb         peak memory of steps on a catalogue of a million items
reattention_over_vanilla      time of a private step with Re-Attention over one without
noise_optimizer_share         share of noise, hash of the sum and update in a private step of 1,024 users
"""

from __future__ import annotations

import operator
from typing import Any

# (ratio, workload, how the figure must stand to the goal, goal)
GOALS: list[tuple[str, str, str, float]] = [
    ("private_over_plain", "ml-1m", ">=", 1.6),
    ("private_over_plain", "games", ">=", 4.0),
    ("private_over_own_nonprivate", "ml-1m", ">=", 0.9),
    ("private_over_own_nonprivate", "games", ">=", 0.9),
    ("private_over_opacus_hooks", "ml-1m", ">=", 3.5),
    ("private_over_opacus_hooks", "games", ">=", 12.0),
    ("private_over_opacus_padded", "ml-1m", ">=", 8.0),
    ("private_over_opacus_padded", "games", ">=", 8.0),
    ("head_gemm_efficiency", "ml-1m", ">=", 0.6),
    ("head_gemm_efficiency", "games", ">=", 0.6),
    ("memory_over_plain", "ml-1m", "<=", 1.1),
    ("memory_over_plain", "games", "<=", 1.1),
    ("memory_over_plain_4096", "ml-1m", "<=", 0.5),
    ("memory_over_plain_4096", "games", "<=", 0.5),
    ("memory_flatness", "ml-1m", "<=", 1.1),
    ("memory_flatness", "games", "<=", 1.1),
    ("million_items_peak_gb", "generated", "<=", 8.0),
    ("reattention_over_vanilla", "ml-1m", "<=", 1.05),
    ("reattention_over_vanilla", "games", "<=", 1.05),
    ("noise_optimizer_share", "ml-1m", "<=", 0.05),
]
_HOLDS = {">=": operator.ge, "<=": operator.le}
SPEEDS = {
    "private_over_plain": "plain",
    "private_over_own_nonprivate": "own non-private",
    "private_over_opacus_hooks": "opacus hooks",
    "private_over_opacus_padded": "opacus padded",
}

Ratios = dict[str, dict[str, float | None]]


def ratios(workloads: dict[str, Any], million_peak_mb: float) -> tuple[Ratios, dict[str, dict[str, list[float]]]]:
    """The ratios, and their ranges over rounds where there are rounds. None if a contender is not installed."""
    figures: Ratios = {name: {} for name, _, _, _ in GOALS}
    ranges: dict[str, dict[str, list[float]]] = {}

    def put(ratio: str, key: str, spread: dict[str, float] | None) -> None:
        figures[ratio][key] = None if spread is None else spread["median"]
        if spread is not None:
            ranges.setdefault(ratio, {})[key] = [spread["low"], spread["high"]]

    for key, workload in workloads.items():
        contenders = workload["contenders"]
        for ratio, other in SPEEDS.items():
            put(ratio, key, contenders[other]["private_over_it"] if other in contenders else None)
        put("reattention_over_vanilla", key, contenders["re-attention"]["private_over_it"])
        put("head_gemm_efficiency", key, workload["split"]["head_gemm_efficiency"])
        put("noise_optimizer_share", key, workload["split"]["noise_optimizer_share"])
        peaks = workload["memory"]
        equal = str(workload["memory_batch"])
        figures["memory_over_plain"][key] = peaks["private"][equal]["peak_mb"] / peaks["plain"][equal]["peak_mb"]
        figures["memory_over_plain_4096"][key] = peaks["private"]["4096"]["peak_mb"] / peaks["plain"]["4096"]["peak_mb"]
        own = [row["peak_mb"] for row in peaks["private"].values()]
        figures["memory_flatness"][key] = max(own) / min(own)
    figures["million_items_peak_gb"]["generated"] = million_peak_mb / 1024
    return figures, ranges


def judge(figures: Ratios) -> list[dict[str, Any]]:
    """Each goal with its figure and whether it is met; None where there is no figure."""
    rows = []
    for ratio, key, sign, goal in GOALS:
        figure = figures[ratio].get(key)
        met = None if figure is None else bool(_HOLDS[sign](figure, goal))
        rows.append({"ratio": ratio, "workload": key, "goal": f"{sign} {goal:g}", "figure": figure, "met": met})
    return rows
