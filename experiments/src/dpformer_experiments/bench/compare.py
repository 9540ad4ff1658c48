"""Compare the contenders: time them in turns in one process, and measure the memory of each in its own process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from dpformer_experiments.bench import workloads
from dpformer_experiments.bench.child import resident_mb
from dpformer_experiments.bench.contenders import Contender, Naive, Own, Plain, PlainPadded, build
from dpformer_experiments.bench.peers import FastDP, OpacusGhost, OpacusHooks, OpacusPadded, missing
from dpformer_experiments.bench.workloads import Workload

# Makes a contender from a workload, the batch size, the users to take of a batch (None: all), and the users at once.
Make = Callable[[Workload, int, int | None, int], Contender]
MAKERS: dict[str, Make] = {
    "private": lambda w, batch, take, rows: Own(w, batch, private=True),
    "re-attention": lambda w, batch, take, rows: Own(w, batch, private=True, reattention=True),
    "own non-private": lambda w, batch, take, rows: Own(w, batch, private=False),
    "plain": lambda w, batch, take, rows: Plain(w, batch, build(w), take),
    "plain padded": lambda w, batch, take, rows: PlainPadded(w, batch, build(w), take, rows),
    "opacus hooks": lambda w, batch, take, rows: OpacusHooks(w, batch, take),
    "opacus padded": lambda w, batch, take, rows: OpacusPadded(w, batch, take, rows or 32),
    "opacus ghost": lambda w, batch, take, rows: OpacusGhost(w, batch, take),
    "fastdp": lambda w, batch, take, rows: FastDP(w, batch, take),
    "naive loop": lambda w, batch, take, rows: Naive(w, batch, build(w), take),
}
# These take a part of the batch: all of it would take minutes. Our own loop and plain training always take the whole batch.
PARTIAL = ("plain padded", "opacus hooks", "opacus padded", "opacus ghost", "fastdp", "naive loop")
FEW = ("naive loop",)
# glibc returns large blocks to the system when they are freed, and new pages cost more than the arithmetic on them. Ordinary
# training allocates hundreds of MB of logits in every micro-batch. With these settings glibc keeps freed memory: much faster.
KEPT = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_TOP_PAD_": str(2**28)}
KEPT_NAMES = ("private", "own non-private", "plain")


def present() -> list[str]:
    """The contenders whose libraries are installed."""
    return [name for name in MAKERS if name not in missing()]


def time_all(
    path: str, batch: int, rounds: int, take: int, few: int, rows: dict[str, int], names: list[str] | None = None
) -> dict[str, Any]:
    """Seconds of a step of each contender, `[rounds]` each, and the users and tokens of the steps (the same for all).

    All take turns, so that a busy machine slows all alike. take, few: for how many users the slow and the slowest contenders
    compute gradients; rows: users at once, if padded; names: only these contenders.
    """
    w = workloads.load(path)
    names = names or present()
    made = {name: MAKERS[name](w, batch, taken(name, take, few, rows), rows.get(name, 0)) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    users, tokens = [], []
    for repeat in range(rounds + 1):
        turns = {name: made[name].step() for name in names}
        if repeat:  # the first fills caches and memory
            for name, turn in turns.items():
                seconds[name].append(turn.seconds)
            users.append(len(turns["private"].users))
            tokens.append(w.tokens(turns["private"].users))
    return {"threads": torch.get_num_threads(), "times": seconds, "users": users, "tokens": tokens}


def taken(name: str, take: int, few: int, rows: dict[str, int]) -> int | None:
    """For how many users of a batch a contender computes gradients; None: for all."""
    if name in FEW:
        return few
    return max(take, rows.get(name, 0)) if name in PARTIAL else None


def weigh(path: str, name: str, batch: int, take: int | None = None, rows: int = 0) -> dict[str, Any]:
    """Make one step of a contender, in its own process: the memory before it (interpreter, torch, data), and its users."""
    w = workloads.load(path)
    contender = MAKERS[name](w, batch, take, rows)
    before = resident_mb()
    start = time.perf_counter()
    turn = contender.step()
    return {"before_mb": before, "users": len(turn.users), "step_seconds": time.perf_counter() - start}


def summarise(own: list[float], reference: list[float]) -> dict[str, float]:
    """Median and range over rounds of the speedup `reference / own`."""
    ratios = [r / o for r, o in zip(reference, own, strict=True)]
    return {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)}
