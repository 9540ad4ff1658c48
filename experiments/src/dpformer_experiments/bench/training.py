"""`dpformer bench`: compare private training with ordinary training and other libraries.

Full steps (see `contenders`) on two workloads (see `workloads`), d 64, 2 blocks:

    speed     all contenders take turns in one process; medians and ranges over rounds of the ratios within a round
    memory    one process per contender and batch size; the peak of the process, and the part of it since the data was loaded
    breakdown shares of the time of a private step, and the head against its matrix products
    growth    over batch, catalogue, length, threads (not with `--quick`, which has two batch sizes)
    grouping  the cost of groups of people against a batch that is cut as a whole (see `grouping`)
"""

from __future__ import annotations

import platform
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpformer_experiments.bench import compare, goals, grouping, growth, peers, workloads
from dpformer_experiments.bench.child import run_child
from dpformer_experiments.bench.contenders import BLOCKS, D
from dpformer_experiments.bench.report import markdown, plot, show

__all__ = ["markdown", "plot", "run", "show"]

# Memory for "as many users as fit", on top of what the process holds before.
ROOM_MB = 2048
# Users at once of the two points through which the line of memory over users is drawn.
FIT_ROWS = (16, 48)
BREAKDOWN_BATCH = 1024
MILLION = 1_000_000
_COMPARE, _BREAKDOWN = "dpformer_experiments.bench.compare", "dpformer_experiments.bench.breakdown"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Sizes:
    """How much is measured.

    batch: users per step when times are compared; take, few: of those, how many slow contenders get; most: the largest number of
    users at once for a padded contender; memory_batch: batch for which memory is compared; batches: of the memory curve;
    every_contender: measure memory of every contender, and growth over these catalogues and lengths.
    """

    batch: int
    rounds: int
    take: int
    few: int
    most: int
    memory_batch: int
    batches: tuple[int, ...]
    breakdown_steps: int
    million_batch: int
    every_contender: bool
    catalogues: tuple[int, ...] = ()
    lengths: tuple[int, ...] = ()


FULL = Sizes(
    1024,
    7,
    96,
    16,
    256,
    256,
    growth.BATCHES,
    3,
    64,
    every_contender=True,
    catalogues=growth.CATALOGUES,
    lengths=growth.LENGTHS,
)
QUICK = Sizes(256, 3, 32, 4, 48, 256, (256, 4096), 1, 16, every_contender=False)


def run(quick: bool, say: Say = lambda line: None) -> dict[str, Any]:
    """All figures, ready for JSON."""
    sizes = QUICK if quick else FULL
    loads = {name: workloads.find(name) for name in workloads.SHAPES}
    figures = measure(loads, sizes, say)
    return figures | {"quick": quick, grouping.PART: grouping.run(quick, say)}


def measure(loads: dict[str, workloads.Workload], sizes: Sizes, say: Say) -> dict[str, Any]:
    """All figures for these workloads."""
    figures: dict[str, Any] = {"machine": _machine(), "missing": peers.missing(), "room_mb": ROOM_MB, "workloads": {}}
    with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as name:
        folder = Path(name)
        for key, workload in loads.items():
            figures["workloads"][key] = _one(key, workload, sizes, folder, say)
        say("a million items")
        path = folder / "million.npz"
        growth.with_catalogue(MILLION).save(path)
        figures["million"] = growth.measure_point(path, batch=sizes.million_batch, warm=False)
        if sizes.every_contender:
            say("growth with the catalogue")
            figures["growth"] = {"catalogue": growth.over_catalogue(folder, sizes.catalogues)}
            say("growth with the length")
            figures["growth"]["length"] = growth.over_length(folder, sizes.lengths)
    figures["ratios"], figures["ranges"] = goals.ratios(figures["workloads"], figures["million"]["peak_mb"])
    figures["goals"] = goals.judge(figures["ratios"])
    return figures


def _one(key: str, workload: workloads.Workload, sizes: Sizes, folder: Path, say: Say) -> dict[str, Any]:
    path = folder / f"{key}.npz"
    workload.save(path)
    say(f"{key}: memory")
    fits = _what_fits(path, sizes)
    memory, enlarged = _memory(workload, sizes, folder / f"{key}-large.npz")
    rows = {name: min(sizes.most, fit["users"]) for name, fit in fits.items() if name == "opacus padded"}
    peaks = _peaks(path, sizes, rows) if sizes.every_contender else {}
    say(f"{key}: speed, {sizes.rounds} rounds of {len(compare.present())} contenders")
    how = {"batch": sizes.batch, "rounds": sizes.rounds, "take": sizes.take, "few": sizes.few}
    timed = run_child(f"{_COMPARE}:time_all", None, path=str(path), rows=rows, **how)
    say(f"{key}: speed, with freed memory kept")
    kept = run_child(
        f"{_COMPARE}:time_all", compare.KEPT, path=str(path), rows={}, names=list(compare.KEPT_NAMES), **how
    )
    say(f"{key}: breakdown of time")
    breakdown = run_child(f"{_BREAKDOWN}:measure", path=str(path), batch=BREAKDOWN_BATCH, steps=sizes.breakdown_steps)
    about = workload.describe()
    contenders = _contenders(timed)
    for name, row in contenders.items():
        row |= peaks.get(name, {})
        row["users_at_once"] = rows.get(name)
    result = {
        **about,
        "batch": sizes.batch,
        "contenders": contenders,
        "kept_memory": _contenders(kept),
        "epoch_seconds": about["users"] / contenders["private"]["users_per_second"],
        "memory_batch": sizes.memory_batch,
        "memory": memory,
        "what_fits": fits,
        "split": breakdown,
    }
    if sizes.every_contender:
        say(f"{key}: growth with batch and threads")
        result["growth"] = {"batch": _batch_curve(memory), "threads": growth.over_threads(path)}
    enlarged.unlink()
    return result


def _contenders(timed: dict[str, Any]) -> dict[str, Any]:
    """Speeds and ratios by contender, over the rounds."""
    private, plain = timed["times"]["private"], timed["times"]["plain"]
    rows = {}
    for name, own in timed["times"].items():
        rows[name] = {
            "users_per_second": statistics.median(u / t for u, t in zip(timed["users"], own, strict=True)),
            "tokens_per_second": statistics.median(n / t for n, t in zip(timed["tokens"], own, strict=True)),
            "over_plain": compare.summarise(own, plain),
            "private_over_it": compare.summarise(private, own),
        }
    return rows


def _memory(workload: workloads.Workload, sizes: Sizes, path: Path) -> tuple[dict[str, dict[str, Any]], Path]:
    """Peak memory by contender and batch; users are repeated if there are fewer than twice the largest batch."""
    workloads.enlarge(workload, 2 * max(sizes.batches)).save(path)
    peaks: dict[str, dict[str, Any]] = {"private": {}, "plain": {}}
    for batch in sizes.batches:
        peaks["private"][str(batch)] = growth.measure_point(path, batch=batch, warm=False)
    for batch in sorted({sizes.memory_batch, 4096, *((1024,) if sizes.every_contender else ())}):
        peaks["plain"][str(batch)] = growth.measure_point(path, batch=batch, warm=False, name="plain")
    return peaks, path


def _batch_curve(memory: dict[str, dict[str, Any]]) -> dict[str, Any]:
    batches = [int(batch) for batch in memory["private"]]
    return growth.curve("batch", batches, list(memory["private"].values()))


def _what_fits(path: Path, sizes: Sizes) -> dict[str, dict[str, Any]]:
    """Users at once, padded to L, that fit into `ROOM_MB`: by a line through the peaks at two sizes."""
    fits: dict[str, dict[str, Any]] = {}
    for name in ("opacus padded", "plain padded"):
        if name not in compare.present() or (name == "plain padded" and not sizes.every_contender):
            continue
        peaks = []
        for rows in FIT_ROWS:
            done = run_child(
                f"{_COMPARE}:weigh", path=str(path), name=name, batch=BREAKDOWN_BATCH, take=rows, rows=rows
            )
            peaks.append(done["peak_mb"] - done["before_mb"])
        slope, base = np.polyfit(FIT_ROWS, peaks, 1)
        users = max(1, int((ROOM_MB - base) / slope))
        fits[name] = {"users": users, "mb_per_user": float(slope), "base_mb": float(base)}
    return fits


def _peaks(path: Path, sizes: Sizes, rows: dict[str, int]) -> dict[str, dict[str, float]]:
    """Peak memory of every contender, in a step as it is timed."""
    peaks = {}
    for name in compare.present():
        take, at_once = compare.taken(name, sizes.take, sizes.few, rows), rows.get(name, 0)
        done = run_child(f"{_COMPARE}:weigh", path=str(path), name=name, batch=sizes.batch, take=take, rows=at_once)
        peaks[name] = {"peak_mb": done["peak_mb"], "above_mb": done["peak_mb"] - done["before_mb"]}
    return peaks


def _machine() -> dict[str, Any]:
    return {
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": platform.machine(),
        "d": D,
        "blocks": BLOCKS,
    }
