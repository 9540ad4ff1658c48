"""Present the training benchmark: tables in the terminal, the page `performance.md`, and its two plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from dpformer_experiments.bench import grouping
from dpformer_experiments.bench.compare import KEPT

MEMORY_PLOT, SPEED_PLOT = "performance-memory.svg", "performance-speed.svg"
LABELS = {
    "private": "private (ours)",
    "re-attention": "private with Re-Attention (ours)",
    "own non-private": "our loop without privacy",
    "plain": "plain PyTorch, not private",
    "plain padded": "plain PyTorch, padded to L",
    "opacus hooks": "Opacus hooks, tied",
    "opacus padded": "Opacus hooks, padded to L",
    "opacus ghost": "Opacus ghost, untied, d/2",
    "fastdp": "fastDP, untied, d/2",
    "naive loop": "one user at a time",
}
Rows = list[list[str]]


def show(figures: dict[str, Any]) -> Group:
    """All tables, for the terminal."""
    tables = []
    for title, head, rows in _tables(figures):
        table = Table(title=title, title_justify="left")
        for k, column in enumerate(head):
            table.add_column(column, justify="right" if k and rows and rows[0][k][:1].isdigit() else "left")
        for row in rows:
            table.add_row(*row)
        tables.append(table)
    return Group(*tables)


def markdown(figures: dict[str, Any]) -> str:
    """The whole page; `dpformer bench -o docs/results` writes it."""
    machine = figures["machine"]
    sources = "; ".join(
        f"{key}: {w['source']}, {w['users']:,} users, {w['items']:,} items, L {w['L']}, {w['tokens']:,} tokens per epoch"
        for key, w in figures["workloads"].items()
    )
    command = "dpformer bench --quick -o docs/results" if figures["quick"] else "dpformer bench -o docs/results"
    text = f"""# Speed and memory

<!-- not run: it writes this page, and takes minutes -->
```console
{command}
```

wrote this page, its plots and [performance.json](performance.json): torch {machine["torch"]}, {machine["threads"]} threads,
{machine["processor"]}. Workloads: {sources}.
The model is the project's Transformer, d {machine["d"]}, {machine["blocks"]} blocks, item table tied.

Every contender makes whole steps: it draws a Poisson batch (all the same users), collates it, sums gradients, adds noise if it
is private, and updates with Adam. The contenders take turns in one process, so ratios are more reliable than times. Each ratio is
taken within a round, and the table shows the median and the range over rounds. Slow contenders compute the gradients of a part of
the batch, evenly from the longest to the shortest users, and their time is scaled to the whole batch. Memory is the peak of a
process that does nothing else, including interpreter, libraries and data.

Private training divides a batch into groups by people's places, sums each group in float32 and adds groups as whole numbers (see
[the privacy page](../privacy.md)). With two threads or more, two workers share the groups, each with half of the groups and half
of the token budget of a micro-batch, or less if the catalogue is large. One table shows the cost of the groups in padding,
micro-batches and time, on one thread; `dpformer bench grouping -o docs/results` updates that table alone.

Ordinary PyTorch uses micro-batches of the whole budget, one after the other, with all threads. Much of its time goes into new
memory, which the C library requests from the system for every tensor of logits and returns at once; private training reuses its
workspaces. One table shows the same steps in a process that keeps freed memory
(`{" ".join(f"{k}={v}" for k, v in KEPT.items())}`): the speed if allocating memory costs nothing.

![Peak memory over batch size]({MEMORY_PLOT})

![Users per second]({SPEED_PLOT})

"""
    for title, head, rows in _tables(figures):
        text += f"## {title}\n\n| {' | '.join(head)} |\n|{'---|' * len(head)}\n"
        text += "".join(f"| {' | '.join(row)} |\n" for row in rows) + "\n"
    for name, reason in figures["missing"].items():
        text += f"{LABELS[name]} was not measured: {reason}.\n"
    return text.rstrip() + "\n"


def _tables(figures: dict[str, Any]) -> list[tuple[str, list[str], Rows]]:
    tables = [("Goals", ["ratio", "workload", "figure", "range", "goal", "met"], _goals(figures))]
    for key, w in figures["workloads"].items():
        head = ["contender", "users/s", "tokens/s", "speed over plain", "private over it", "peak MB", "above base"]
        tables.append((f"Steps of {w['batch']:,} users, {key}", head, _contenders(w, figures["missing"])))
    head = ["workload", "contender", "users/s", "speed over plain", "private over it"]
    tables.append(("The same steps where the allocator keeps memory", head, _kept(figures)))
    tables.append(("Memory", ["workload", "contender", "users", "peak MB"], _memory(figures)))
    tables.append(("Time of a private step of 1,024 users, by part", ["part", *figures["workloads"]], _split(figures)))
    if grouping.PART in figures:
        rows = grouping.rows(figures[grouping.PART])
        tables.append(("Groups by place / the batch cut as a whole", list(grouping.COLUMNS), rows))
    if "growth" in figures:
        tables.append(("Growth of a private step", ["over", "", *_GROWTH], _growth(figures)))
    return tables


def _goals(figures: dict[str, Any]) -> Rows:
    rows = []
    for goal in figures["goals"]:
        low, high = figures["ranges"].get(goal["ratio"], {}).get(goal["workload"], (None, None))
        rows.append(
            [
                goal["ratio"],
                goal["workload"],
                _number(goal["figure"]),
                "" if low is None else f"{low:.2f}-{high:.2f}",
                goal["goal"],
                {True: "yes", False: "no", None: "not measured"}[goal["met"]],
            ]
        )
    for key, w in figures["workloads"].items():
        rows.append(["a private epoch, seconds", key, _number(w["epoch_seconds"]), "", "report", ""])
    return rows


def _contenders(w: dict[str, Any], missing: dict[str, str]) -> Rows:
    rows = []
    for name, row in w["contenders"].items():
        at_once = f", {row['users_at_once']} at once" if row.get("users_at_once") else ""
        rows.append(
            [
                LABELS[name] + at_once,
                f"{row['users_per_second']:,.0f}",
                f"{row['tokens_per_second']:,.0f}",
                *_ratios(row),
                f"{row['peak_mb']:,.0f}" if "peak_mb" in row else "",
                f"{row['above_mb']:,.0f}" if "above_mb" in row else "",
            ]
        )
    return rows + [[LABELS[name], reason, "", "", "", "", ""] for name, reason in missing.items()]


def _kept(figures: dict[str, Any]) -> Rows:
    return [
        [key, LABELS[name], f"{row['users_per_second']:,.0f}", *_ratios(row)]
        for key, w in figures["workloads"].items()
        for name, row in w["kept_memory"].items()
    ]


def _ratios(row: dict[str, Any]) -> list[str]:
    """Of a contender: its speed over plain, and private over its speed; medians and ranges."""
    ratios = (row["over_plain"], row["private_over_it"])
    return [f"{one['median']:.2f} ({one['low']:.2f}-{one['high']:.2f})" for one in ratios]


def _memory(figures: dict[str, Any]) -> Rows:
    rows = []
    for key, w in figures["workloads"].items():
        for name, points in w["memory"].items():
            rows += [[key, LABELS[name], f"{int(batch):,}", f"{p['peak_mb']:,.0f}"] for batch, p in points.items()]
        for name, fit in w["what_fits"].items():
            largest = f"{fit['users']:,} at once fit into {figures['room_mb']:,} MB above base"
            rows.append([key, LABELS[name], largest, f"{fit['mb_per_user']:.1f} per user (line through two sizes)"])
    million = figures["million"]
    rows.append(
        ["generated, 1,000,000 items", LABELS["private"], f"{million['users']:,}", f"{million['peak_mb']:,.0f}"]
    )
    return rows


def _split(figures: dict[str, Any]) -> Rows:
    splits = [w["split"] for w in figures["workloads"].values()]
    parts = sorted({part for s in splits for part in s["shares"]}, key=lambda part: -splits[0]["shares"].get(part, 0))
    rows = [[part, *(f"{s['shares'].get(part, 0):.1%}" for s in splits)] for part in parts]
    rows.append(["seconds", *(f"{s['step_seconds']:.2f}" for s in splits)])
    rows.append(["matrix products, GFLOP/s", *(f"{s['gemm_gflops']:.0f}" for s in splits)])
    return rows


_GROWTH = ["points", "users/s", "peak MB", "exponent of time", "of memory"]


def _growth(figures: dict[str, Any]) -> Rows:
    curves = [("items", "lengths of Games", figures["growth"]["catalogue"])]
    curves.append(("length", "catalogue of ML-1M", figures["growth"]["length"]))
    for key, w in figures["workloads"].items():
        curves.append(("batch", key, w["growth"]["batch"]))
        curves += [("threads", f"{key}, {name}", curve) for name, curve in w["growth"]["threads"].items()]
    rows = []
    for over, what, curve in curves:
        points = curve["points"]
        rows.append(
            [
                over,
                what,
                ", ".join(f"{p[over]:,}" for p in points),
                ", ".join(f"{p['users_per_second']:,.0f}" for p in points),
                ", ".join(f"{p['peak_mb']:,.0f}" for p in points),
                f"{curve['exponents']['time']:.2f}" + (" (per step)" if over == "batch" else " (per user)"),
                f"{curve['exponents']['memory']:.2f}",
            ]
        )
    return rows


def plot(figures: dict[str, Any], folder: Path) -> None:
    """Draw the paper's two plots: memory over batch size, and speed; one panel per workload."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    count = len(figures["workloads"])
    with mpl.rc_context({"svg.hashsalt": "dpformer", "svg.fonttype": "none"}):  # the same figures give the same file
        memory = Figure(figsize=(5 * count, 4.1), layout="constrained")
        speed = Figure(figsize=(5.5 * count, 3.6), layout="constrained")
        panels = zip(figures["workloads"].items(), memory.subplots(1, count), speed.subplots(1, count), strict=True)
        for (key, w), left, right in panels:
            for name, points in w["memory"].items():
                left.plot([int(b) for b in points], [p["peak_mb"] for p in points.values()], "o-", label=LABELS[name])
            for name, fit in w["what_fits"].items():
                users = [1, fit["users"]]
                above = [fit["base_mb"] + n * fit["mb_per_user"] for n in users]
                base = min(p["peak_mb"] for p in w["memory"]["private"].values())
                left.plot(
                    users, [max(base, a) for a in above], "--", label=f"{LABELS[name]}, in one piece (above base)"
                )
            left.set(xscale="log", yscale="log", title=key, xlabel="users per step", ylabel="peak memory, MB")
            names = list(reversed(w["contenders"]))
            colours = ["C0" if name in ("private", "re-attention") else "0.6" for name in names]
            bars = right.barh(
                [LABELS[name] for name in names],
                [w["contenders"][name]["users_per_second"] for name in names],
                color=colours,
            )
            right.bar_label(bars, fmt="{:,.0f}", fontsize=7, padding=2)
            right.set(title=key, xlabel=f"users per second, steps of {w['batch']:,}")
            right.margins(x=0.12)
            right.tick_params(axis="y", labelsize=7)
        # One legend for both panels, below the curves.
        memory.legend(*memory.axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=2, fontsize=7)
        memory.savefig(folder / MEMORY_PLOT, metadata={"Date": None})
        speed.savefig(folder / SPEED_PLOT, metadata={"Date": None})


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
