"""Measure what several processes gain on one machine: the same private steps by one process and by two, as under `torchrun`.

The contenders take turns in new processes, so that a busy machine slows all of them alike. Each is judged by its median, as a
ratio. All make the same number of steps of the whole loop: draw, deal, clip, exchange, ledger, noise, Adam. Memory is the largest
resident size of the processes, and the part of it that model and training added after imports and data.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from dpformer_experiments.bench.child import resident_mb, run_ranks
from dpformer_experiments.bench.workloads import find, load

# name: processes, threads of each
CONTENDERS = {"1 process": (1, 1), "2 processes": (2, 1), "1 process, 2 threads": (1, 2)}
BASE = "1 process"
# Expected users per batch; fewer with --quick.
USERS, FEW = 1024, 256


def run(quick: bool, say: Any = lambda line: None) -> dict[str, Any]:
    """Users per second, memory, and their ratios to one process with one thread."""
    sets = ("ml-1m",) if quick else ("ml-1m", "games")
    users, steps, rounds = (FEW, 3, 3) if quick else (USERS, 6, 5)
    return {name: _measure(name, users, steps, rounds, say) for name in sets}


def _measure(name: str, users: int, steps: int, rounds: int, say: Any) -> dict[str, Any]:
    workload = find(name)
    seen: dict[str, list[dict[str, Any]]] = {contender: [] for contender in CONTENDERS}
    with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as folder:
        path = Path(folder) / "workload.npz"
        workload.save(path)
        for number in range(rounds):
            for contender, (size, threads) in CONTENDERS.items():
                say(f"{name}: {contender}, round {number + 1} of {rounds}")
                seen[contender].append(
                    start(f"{__name__}:work", size, threads, path=str(path), users=users, steps=steps)
                )
    rows = {contender: _row(rounds_of, users) for contender, rounds_of in seen.items()}
    base = [one["seconds"] for one in seen[BASE]]
    for contender, rounds_of in seen.items():
        # Round by round, since the load of the machine changes with time.
        ratios = [one / other["seconds"] for one, other in zip(base, rounds_of, strict=True)]
        rows[contender] |= {
            "speed_relative_to_1": statistics.median(ratios),
            "speed_ratios": ratios,
            "peak_relative_to_1": rows[contender]["peak_mb"] / rows[BASE]["peak_mb"],
            "added_relative_to_1": rows[contender]["added_mb"] / max(rows[BASE]["added_mb"], 1e-9),
        }
    return {"workload": workload.describe(), "batch": users, "steps": steps, "rounds": rounds, "contenders": rows}


def _row(rounds: list[dict[str, Any]], users: int) -> dict[str, Any]:
    middle = {
        key: statistics.median(one[key] for one in rounds) for key in ("seconds", "peak_mb", "added_mb", "waiting")
    }
    return {**middle, "users_per_second": users / middle["seconds"], "bytes_a_step": rounds[0]["bytes_a_step"]}


def start(target: str, size: int, threads: int, **arguments: Any) -> dict[str, Any]:
    """Run all processes of a contender; returns the largest time and memory.

    A process returns `step_seconds` and `before_mb`; the result has `seconds` and `added_mb`, the memory since then.
    """
    by_rank = run_ranks(target, size, threads, **arguments)
    for one in by_rank:
        one |= {"seconds": one.pop("step_seconds"), "added_mb": one["peak_mb"] - one.pop("before_mb")}
    return {key: max(one[key] for one in by_rank) for key in by_rank[0]}


def work(path: str, users: int, steps: int) -> dict[str, Any]:
    """The work of one process: steps of the paper's model, without counting the first."""
    import time

    import torch

    from dpformer.fit.dpsgd import Optimisation, Trainer
    from dpformer.models import Transformer, TransformerSpec
    from dpformer.privacy import make_plan
    from dpformer.training.ranks import Ranks, join
    from dpformer_experiments.curators import seeded_curator

    workload = load(path)
    population = len(workload.sequences)
    plan = make_plan(population, 8.0, 1e-6, batch_size=users, epochs=(steps + 1.5) * users / population, shares={})
    waiting: list[float] = []
    with join(600.0) as ranks, seeded_curator(workload.sequences, plan, 0) as curator:
        before = resident_mb()
        torch.manual_seed(0)
        model = Transformer(TransformerSpec(items=workload.items, max_length=workload.L, d=64, blocks=2))
        how = Optimisation(max_length=workload.L)
        trainer = Trainer(model, plan, how)
        trainer.query.ranks = ranks

        def step() -> None:
            # Rank 0 asks its Curator; the others have one too, but do not use it.
            if ranks.first:
                trainer.make_step(curator)
            else:
                trainer.query.take_part(workload.sequences, ranks.broadcast(), False)

        gather = Ranks.gather

        def timed(self: Ranks, value: Any = None) -> list[Any]:
            began = time.perf_counter()
            values = gather(self, value)
            waiting.append(time.perf_counter() - began)
            return values

        Ranks.gather = timed  # type: ignore[method-assign]
        step()
        waiting.clear()
        began = time.perf_counter()
        for _ in range(steps):
            step()
        seconds = (time.perf_counter() - began) / steps
        parameters = sum(p.numel() for p in model.parameters())
    return {
        "step_seconds": seconds,
        "waiting": sum(waiting) / steps,
        "before_mb": before,
        "bytes_a_step": 8 * parameters if ranks.size > 1 else 0,
    }


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    columns = (
        "data",
        "",
        "users/s",
        "speed / 1 process",
        "MB per process",
        "/ 1 process",
        "MB added",
        "/ 1 process ",
        "waiting",
    )
    table = Table(*columns, title="private steps, by processes and threads")
    for name, measured in figures.items():
        for contender, row in measured["contenders"].items():
            table.add_row(
                name,
                contender,
                f"{row['users_per_second']:,.0f}",
                f"{row['speed_relative_to_1']:.2f}",
                f"{row['peak_mb']:,.0f}",
                f"{row['peak_relative_to_1']:.2f}",
                f"{row['added_mb']:,.0f}",
                f"{row['added_relative_to_1']:.2f}",
                f"{row['waiting'] / row['seconds']:.0%}",
            )
    return table
