"""The paper's figures of memory and training speed, from the report of `dpformer bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpformer.errors import DPFormerError
from dpformer_experiments.reproduce.page import Page, new_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REPORT = "performance.json"
OURS, GHOST, PLAIN = "private", "opacus ghost", "plain"
UNITS = {
    "memory": ("above_mb", "MB on top of what the process held before"),
    "throughput": ("users_per_second", "users per second"),
}
CLAIMS = {
    "memory": "10 to 400 times less memory than Ghost Clipping, almost as little as without privacy",
    "throughput": "4 to 100 times as fast as Ghost Clipping, comparable to training without privacy",
}


def run(name: str, *, report: Path) -> dict[str, Any]:
    """A row for each workload and contender. report: the folder that `dpformer bench -o` wrote to."""
    path = report / REPORT
    try:
        workloads = json.loads(path.read_text(encoding="utf-8"))["workloads"]
    except (OSError, ValueError, KeyError):
        raise DPFormerError(
            f"{path}: contains no report; make it (about 15 minutes): dpformer bench -o {report}"
        ) from None
    key, rows = UNITS[name][0], []
    for workload, about in workloads.items():
        ours = about["contenders"][OURS].get(key)
        for contender, measured in about["contenders"].items():
            value = measured.get(key)
            measured_both = value is not None and ours is not None
            better = None
            if measured_both:  # of speed the median of the rounds' ratios: both take turns in a round
                better = value / ours if name == "memory" else measured["private_over_it"]["median"]
            rows.append({"workload": workload, "contender": contender, key: value, "ours is better by": better})
    return {"name": name, "rows": rows}


def page(figures: dict[str, Any]) -> Page:
    """Every contender, and by how much ours is better."""
    name = figures["name"]
    key, unit = UNITS[name]
    rows = []
    for row in figures["rows"]:
        better = row["ours is better by"]
        value = "not measured" if row[key] is None else f"{row[key]:,.0f}"
        rows.append((row["workload"], row["contender"], value, "" if better is None else f"{better:.2f}"))
    who = f"{OURS}: ours; {GHOST}: Ghost Clipping; {PLAIN}: no privacy"
    note = f"The paper claims {CLAIMS[name]}, in figures without numbers. {who}."
    headings = ("workload", "contender", unit, "ours is better by a factor of")
    return Page(
        name.capitalize(), f"dpformer reproduce {name} --report docs/results -o docs/results", headings, rows, [note]
    )


def draw(figures: dict[str, Any]) -> Figure:
    """Bars on a logarithmic axis, a panel for each workload."""
    key, unit = UNITS[figures["name"]]
    workloads = list(dict.fromkeys(row["workload"] for row in figures["rows"]))
    figure, axes = new_figure(1, len(workloads), (5.0 * len(workloads), 3.6))
    for axis, workload in zip(axes[0], workloads, strict=True):
        rows = [row for row in figures["rows"] if row["workload"] == workload and row[key] is not None]
        axis.barh([row["contender"] for row in rows], [row[key] for row in rows])
        axis.set(title=workload, xlabel=unit, xscale="log")
        axis.invert_yaxis()
    return figure
