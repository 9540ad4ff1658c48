"""Measure how time and memory of a private step grow with batch, catalogue, length and threads: one process per point.

A point is one step after a first step of the same size. Curves get the exponent b of the least-squares line
log y = a + b log x: 1 is proportional, 0 flat.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dpformer_experiments.bench import workloads
from dpformer_experiments.bench.child import run_child
from dpformer_experiments.bench.compare import MAKERS
from dpformer_experiments.bench.workloads import SHAPES, Workload

BATCHES = (256, 512, 1024, 2048, 4096, 8192)
CATALOGUES = (3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
LENGTHS = (10, 25, 50, 100, 200, 400)
THREADS = (1, 2)
# Users per step for the curves over catalogue, length and threads.
CATALOGUE_BATCH, LENGTH_BATCH, THREAD_BATCH = 64, 64, 256


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """The least-squares slope of log y over log x.

    >>> round(exponent([1, 2, 4], [3, 12, 48]), 6)
    2.0
    """
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def point(path: str, batch: int, name: str = "private", warm: bool = True, threads: int = 0) -> dict[str, Any]:
    """Make one step of a contender in this process; `run_child` measures its peak memory."""
    if threads:
        torch.set_num_threads(threads)
    w = workloads.load(path)
    contender = MAKERS[name](w, batch, None, 0)
    if warm:
        contender.step()
    turn = contender.step()
    return {"users": len(turn.users), "tokens": w.tokens(turn.users), "step_seconds": turn.seconds}


def measure_point(path: Path, **arguments: Any) -> dict[str, Any]:
    """Run `point` in a new process."""
    return run_child("dpformer_experiments.bench.growth:point", path=str(path), **arguments)


def with_catalogue(items: int, users: int = 20 * CATALOGUE_BATCH) -> Workload:
    """Lengths of Games, a catalogue of any size."""
    return workloads.generate(f"{items:,} items", replace(SHAPES["games"], items=items, users=users))


def over_catalogue(folder: Path, catalogues: Sequence[int]) -> dict[str, Any]:
    """Private steps on growing catalogues."""
    points = []
    for items in catalogues:
        path = folder / f"items-{items}.npz"
        with_catalogue(items).save(path)
        points.append(measure_point(path, batch=CATALOGUE_BATCH))
    return curve("items", catalogues, points)


def over_length(folder: Path, lengths: Sequence[int]) -> dict[str, Any]:
    """Private steps on longer and longer sequences, all users with the same length; catalogue of ML-1M."""
    points = []
    for length in lengths:
        path = folder / f"length-{length}.npz"
        workloads.uniform(20 * LENGTH_BATCH, length, SHAPES["ml-1m"].items, L=max(lengths)).save(path)
        points.append(measure_point(path, batch=LENGTH_BATCH))
    return curve("length", lengths, points)


def over_threads(path: Path) -> dict[str, Any]:
    """Private and plain steps with 1 and 2 threads."""
    curves = {}
    for name in ("private", "plain"):
        points = [measure_point(path, batch=THREAD_BATCH, name=name, threads=n) for n in THREADS]
        curves[name] = curve("threads", THREADS, points)
    return curves


def curve(over: str, x: Sequence[int], points: list[dict[str, Any]]) -> dict[str, Any]:
    """Points and the exponents of time (per user, except over the batch itself) and of memory."""
    seconds = [p["step_seconds"] / (1 if over == "batch" else max(1, p["users"])) for p in points]
    peaks = [p["peak_mb"] for p in points]
    exponents = {"time": exponent(x, seconds), "memory": exponent(x, peaks)}
    assert all(map(math.isfinite, exponents.values()))
    rows = [{over: k, **p, "users_per_second": p["users"] / p["step_seconds"]} for k, p in zip(x, points, strict=True)]
    return {"over": over, "points": rows, "exponents": exponents}
