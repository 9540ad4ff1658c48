"""The cost model of `dpformer.training.cost`: measure, fit, predict, compare.

Fitted to: steps of one process on generated sequences of many shapes; noise alone; sums between 2 and 4 processes that do nothing
else; the smallest steps that they make together; and how much slower a process is with 1 and 3 others beside it. Compared with:
training steps of 2 and 4 processes on this machine, which no coefficient has seen. Every process has one thread.
Times are processor seconds of a process (of rank 0, among several),
medians over some steps of several turns: what else the machine does meanwhile is not to be measured. So a prediction is compared
for a rank that has a core of its own; ranks that take turns on a core take longer by the clock, by as much as there are turns.
"""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from dpformer.data import PoissonSampler
from dpformer.experiments.bench import workloads
from dpformer.experiments.bench.child import forget_peak, peak_mb, run_child, run_ranks
from dpformer.models.transformer import Transformer
from dpformer.privacy import PrivacyPlan, create_ledger, noise_source
from dpformer.rows import Rows
from dpformer.training.cost import COMPUTE, MEMORY, MODES, Coefficients, Layout, Mode, Step, fit, predict, work
from dpformer.training.ranks import ALONE, Ranks, join
from dpformer.training.row_trainer import RowTrainer
from dpformer.training.speed import gemm_speed
from dpformer.training.trainer import Optimisation, Trainer

SIGMA, SEED, MB = 20.0, 0, 2**20
# Users of a batch, and the shape of the model and its data.
SHAPES: list[tuple[int, Step]] = [
    (users, Step(users * length, length, items, d, blocks, d, budget))
    for users, length, items, d, blocks, budget in (
        (48, 50, 3_000, 64, 2, 16384),
        (128, 50, 300, 64, 2, 16384),
        (12, 50, 30_000, 64, 2, 16384),
        (16, 20, 100_000, 32, 1, 16384),
        (4, 10, 200_000, 32, 1, 16384),
        (192, 10, 3_000, 64, 2, 16384),
        (12, 200, 3_000, 64, 2, 16384),
        (16, 50, 10_000, 128, 2, 16384),
        (96, 20, 10_000, 32, 1, 16384),
        (24, 30, 20_000, 64, 1, 16384),
        (256, 20, 1_000, 16, 1, 16384),
        (256, 20, 1_000, 16, 1, 400),
        (8, 10, 100, 16, 1, 16384),
    )
]
# The smallest step, whose time among several is that of being several.
TINY = SHAPES[-1]
# What 2 and 4 ranks are asked to do: shapes between those, so that the model has to be right and not only the fit.
_ASKED: tuple[tuple[Mode, int, int, int, int, int], ...] = (
    ("data", 128, 50, 3_416, 64, 2),
    ("data", 256, 20, 10_000, 32, 1),
    ("data", 32, 30, 30_000, 64, 1),
    ("rows", 128, 20, 10_000, 32, 1),
    ("rows", 32, 30, 30_000, 64, 1),
)
ASKED: list[tuple[Mode, tuple[int, Step]]] = [
    (mode, (users, Step(users * length, length, items, d, blocks, d)))
    for mode, users, length, items, d, blocks in _ASKED
]
NUMBERS = (10_000, 1_000_000, 6_000_000)
RANKS = (2, 4)
# Every so many shapes are also timed with other processes beside.
BESIDE = 3


def run(quick: bool, say: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Everything; with `quick` fewer shapes and turns, and no claim to precision."""
    shapes, asked = (SHAPES[-3:], ASKED[-2:]) if quick else (SHAPES, ASKED)
    sizes, turns = (RANKS[:1], 1) if quick else (RANKS, 3)
    seen: Seen = {}
    for turn in range(turns):
        say(f"one process, turn {turn + 1} of {turns}")
        measure_one(seen, shapes)
        for size in sizes:
            say(f"{size} processes side by side")
            measure_beside(seen, size, shapes)
            say(f"{size} ranks, turn {turn + 1} of {turns}")
            measure_ranks(seen, size, asked)
    return summary(seen, shapes, asked, sizes)


Seen = dict[str, list[dict[str, Any]]]
Shapes = list[tuple[int, Step]]
Asked = list[tuple[Mode, tuple[int, Step]]]


def measure_one(seen: Seen, shapes: Shapes) -> None:
    """Steps of one process, and noise."""
    done = run_child(f"{__name__}:alone", shapes=[_arguments(*shape) for shape in shapes])
    seen.setdefault("noise", []).append({"noise_seconds": done["noise_seconds"]})
    for place, found in enumerate(done["found"]):
        seen.setdefault(f"shape {place}", []).append(_of_all([found]))


def measure_beside(seen: Seen, size: int, shapes: Shapes) -> None:
    """Processes that do not speak with one another."""
    places = range(0, len(shapes), BESIDE)
    ranks = run_ranks(f"{__name__}:beside", size, shapes=[_arguments(*shapes[place]) for place in places])
    for k, place in enumerate(places):
        seen.setdefault(f"beside {size} {place}", []).append(_of_all([rank["found"][k] for rank in ranks]))


def measure_ranks(seen: Seen, size: int, asked: Asked) -> None:
    """Ranks: sums alone, and what the model is asked."""
    several = [{"mode": mode, **_arguments(*shape)} for mode, shape in (*asked, *((mode, TINY) for mode in MODES))]
    ranks = run_ranks(f"{__name__}:together", size, shapes=several)
    seen.setdefault(f"sums {size}", []).append(ranks[0]["sums"])
    names = [*(f"ranks {size} {place}" for place in range(len(asked))), *(f"tiny {size} {mode}" for mode in MODES)]
    for place, name in enumerate(names):
        seen.setdefault(name, []).append(_of_all([rank["found"][place] for rank in ranks]))


def summary(seen: Seen, shapes: Shapes, asked: Asked, sizes: Sequence[int]) -> dict[str, Any]:
    """Coefficients fitted to the medians of all turns, and what they predict."""
    measured = {
        name: {key: statistics.median(row[key] for row in rows) for key in rows[0]} for name, rows in seen.items()
    }
    cores = os.cpu_count() or 1
    fitted = _fitted([step for _, step in shapes], measured, sizes)
    return {
        "machine": f"{cores} cores, {platform.machine()}, torch {torch.__version__}, one thread a process",
        "cores": cores,
        "gemm": gemm_speed(threads=1),
        "coefficients": asdict(fitted),
        "shapes": [_compared(step, Layout(), fitted, measured[f"shape {k}"]) for k, (_, step) in enumerate(shapes)],
        "predictions": [
            _compared(step, Layout(size, mode, size, size), fitted, measured[f"ranks {size} {k}"])
            for size in sizes
            for k, (mode, (_, step)) in enumerate(asked)
        ],
        "measured": measured,
    }


_NOBODY = np.zeros(0, dtype=np.int64)


def _arguments(users: int, step: Step) -> dict[str, Any]:
    return {"users": users, "step": asdict(step)}


def _of_all(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of the ranks of one run: rank 0's time, the most, as it adds the noise; and the most memory of any."""
    return {"step_seconds": statistics.median(rows[0]["steps"]), "peak_mb": max(row["peak_mb"] for row in rows)}


def make(users: int, step: dict[str, Any], ranks: Ranks, mode: Mode, folder: Path) -> Trainer:
    """A trainer whose expected batch is `users` of four times as many, everybody with the same number of items."""
    s = Step(**step)
    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    data = workloads.uniform(4 * users, int(s.length), s.items, L=int(s.length)).sequences
    shape: dict[str, Any] = {"d": s.dim, "blocks": s.blocks, "feed_forward": s.feed_forward}
    plan = PrivacyPlan(4 * users, users, 100, 8.0, 1e-9, SIGMA)
    how = Optimisation(max_length=int(s.length), token_budget=s.token_budget, averaging="none")
    sampler, noise = PoissonSampler(plan.users, plan.rate, SEED), noise_source("seeded", SEED + ranks.rank)
    ledger = create_ledger(folder, plan) if ranks.first else None
    if mode == "rows":
        model = Transformer(
            s.items, int(s.length), **shape, split=lambda count: Rows(count, ranks.rank, ranks.size, ranks.tensors)
        )
        return RowTrainer(model, data, plan, how, sampler, noise, ledger, ranks)
    model, first = Transformer(s.items, int(s.length), **shape), ranks.first
    return Trainer(model, data, plan, how, sampler if first else None, noise if first else None, ledger, ranks=ranks)


def _steps(
    users: int, step: dict[str, Any], ranks: Ranks, mode: Mode = "data", before: Callable[[], Any] = lambda: None
) -> dict[str, Any]:
    """Processor seconds of some steps after one that warms up, as for the expected number of users; and the most memory."""
    forget_peak()
    with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as folder:
        trainer = make(users, step, ranks, mode, Path(folder))
        trainer.make_step()
        seconds: list[float] = []
        while len(seconds) < 4:
            before()
            start = time.process_time()
            drawn = trainer.make_step().users
            seconds.append((time.process_time() - start) * users / max(1, drawn))
    return {"steps": seconds, "peak_mb": peak_mb()}


def alone(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps of one process, and noise alone."""
    return {"found": [_steps(ranks=ALONE, **shape) for shape in shapes], "noise_seconds": _noise()}


def beside(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """Steps of one process while others do the same, each for itself."""
    with join() as ranks:
        return {"found": [_steps(ranks=ALONE, before=ranks.barrier, **shape) for shape in shapes]}


def together(shapes: list[dict[str, Any]]) -> dict[str, Any]:
    """Sums between processes that do nothing else, and steps that they make together."""
    with join() as ranks:
        return {"sums": _sums(ranks), "found": [_steps(ranks=ranks, before=ranks.barrier, **shape) for shape in shapes]}


def _noise() -> float:
    """Seconds for a parameter's noise."""
    source, gradient = noise_source("seeded", SEED), torch.zeros(3_000_000)
    seconds = []
    for _ in range(5):
        start = time.process_time()
        source.add_noise_([("table", gradient)], SIGMA)
        seconds.append(time.process_time() - start)
    return statistics.median(seconds) / gradient.numel()


def _sums(ranks: Ranks) -> dict[str, float]:
    """Seconds for what a step says, with the sum of so many numbers to rank 0 and back, or none."""
    torch.set_num_threads(1)
    found = {}
    for count in (0, *NUMBERS):
        values, seconds = [torch.ones(count)], []
        for _ in range(7):
            ranks.barrier()
            start = time.process_time()
            ranks.deal([_NOBODY] * ranks.size if ranks.first else ())
            ranks.hear([0])
            if count:
                ranks.sum_to_first_(values)
                ranks.share_(values)
            seconds.append(time.process_time() - start)
        found[f"sum of {count}"] = statistics.median(seconds)
    return found


def _fitted(steps: list[Step], measured: dict[str, dict[str, float]], sizes: Sequence[int]) -> Coefficients:
    per_noise = measured["noise"]["noise_seconds"]
    done = [work(step, Layout()) for step in steps]
    seen = [measured[f"shape {k}"] for k in range(len(steps))]
    times = [one["step_seconds"] - row["noise"] * per_noise for one, row in zip(seen, done, strict=True)]
    memory = [one["peak_mb"] * MB for one in seen]
    wire, seconds = [], []
    for size in sizes:
        for count in (0, *NUMBERS):
            wire.append({"wire_byte": 8.0 * count * (size - 1), "message": 6.0})
            seconds.append(measured[f"sums {size}"][f"sum of {count}"])
    found = {
        **fit(done, times, (*COMPUTE, "parameter")),
        **fit(done, memory, MEMORY),
        **fit(wire, seconds, ("wire_byte", "message")),
    }
    slower = [
        (size - 1, measured[f"beside {size} {k}"]["step_seconds"] / measured[f"shape {k}"]["step_seconds"] - 1)
        for size in sizes
        for k in range(0, len(steps), BESIDE)
    ]
    busy = max(0.0, sum(others * more for others, more in slower) / sum(others**2 for others, _ in slower))
    c = Coefficients(noise=per_noise, busy=busy, together=0.0, split=0.0, **found)
    tiny = [
        (work(TINY[1], layout), measured[f"tiny {layout.ranks} {layout.mode}"]["step_seconds"], layout)
        for layout in (Layout(size, mode, size, size) for size in sizes for mode in MODES)
    ]
    more = [max(1e-6, seconds - predict(TINY[1], layout, c).seconds) for _, seconds, layout in tiny]
    return replace(c, **fit([row for row, *_ in tiny], more, ("together", "split")))


def _compared(step: Step, layout: Layout, c: Coefficients, measured: dict[str, float]) -> dict[str, Any]:
    cost = predict(step, layout, c)
    mb = cost.memory_bytes / MB
    return {
        **asdict(step),
        **{"ranks": layout.ranks, "mode": layout.mode},
        **{"seconds": measured["step_seconds"], "predicted_seconds": cost.seconds},
        **{"error": cost.seconds / measured["step_seconds"] - 1},
        **{"memory_mb": measured["peak_mb"], "predicted_memory_mb": mb, "memory_error": mb / measured["peak_mb"] - 1},
    }


def show(figures: dict[str, Any]) -> Table:
    """Measured and predicted."""
    table = Table(
        "ranks", "split", "tokens", "length", "items", "d", "blocks", "seconds", "predicted", "error", "MB", "error"
    )
    for row in (*figures["shapes"], *figures["predictions"]):
        table.add_row(
            *(str(row["ranks"]), row["mode"] if row["ranks"] > 1 else "-"),
            *(f"{row[name]:,g}" for name in ("tokens", "length", "items", "dim", "blocks")),
            *(f"{row['seconds']:.3g}", f"{row['predicted_seconds']:.3g}", f"{row['error']:+.0%}"),
            *(f"{row['memory_mb']:,.0f}", f"{row['memory_error']:+.0%}"),
        )
    return table
