"""What a rank needs when the item tables are split over ranks by rows: memory, what travels, time; against one process with all.

Every contender makes the same private steps (the paper's model, the same users) in fresh processes. Memory is the greatest
resident size of any rank, less what it had when it had made such a step with a hundred items: imports, data, buffers of torch and
gloo. Whoever shares a machine's cores with the other ranks is no faster for being one of several; the time shows the price of the
exchange.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from rich.table import Table

from dpformer.experiments.bench.child import resident_mb
from dpformer.experiments.bench.ranks import start
from dpformer.experiments.bench.workloads import load

ITEMS, D, USERS, STEPS = 400_000, 64, 64, 2
# A catalogue that takes no memory.
FEW = 100


def run(quick: bool, say: Any = lambda line: None) -> dict[str, Any]:
    """Memory, bytes and seconds of a rank, for 1, 2 and 4 of them, and the ratios to one."""
    from dpformer.experiments.bench.growth import with_catalogue

    items, sizes = (50_000, (1, 2)) if quick else (ITEMS, (1, 2, 4))
    rows: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as folder:
        path = Path(folder) / "workload.npz"
        with_catalogue(items).save(path)
        for size in sizes:
            say(f"{items:,} items over {size} rank{'s' * (size > 1)}")
            rows[str(size)] = start(f"{__name__}:work", size, 1, path=str(path))
    one = rows["1"]
    for row in rows.values():
        row |= {
            "added_relative_to_1": row["added_mb"] / one["added_mb"],
            "seconds_relative_to_1": row["seconds"] / one["seconds"],
        }
    return {"items": items, "d": D, "batch": USERS, "steps": STEPS, "ranks": rows}


def work(path: str) -> dict[str, Any]:
    """One rank: steps of its rows; alone, of the whole table as ever."""
    import time
    from functools import partial

    import torch
    import torch.distributed as dist

    from dpformer.data import PoissonSampler, Sequences
    from dpformer.models.transformer import Transformer
    from dpformer.privacy import create_ledger, make_plan, noise_source
    from dpformer.rows import Rows
    from dpformer.training.ranks import join
    from dpformer.training.row_trainer import RowTrainer
    from dpformer.training.rows import seed_of
    from dpformer.training.trainer import Optimisation, Trainer

    workload = load(path)
    users = len(workload.sequences)
    plan = make_plan(users, 8.0, 1e-6, batch_size=USERS, steps=STEPS + 1, shares={})
    sent: list[int] = []
    real = dist.all_reduce

    def count(x: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        sent.append(x.numel() * x.element_size())
        return real(x, *arguments, **options)

    with join(600.0) as ranks, tempfile.TemporaryDirectory() as folder:

        def make(items: int, sequences: Sequences) -> Trainer:
            torch.manual_seed(0)
            split = partial(Rows, rank=ranks.rank, size=ranks.size) if ranks.size > 1 else None
            model = Transformer(items, workload.L, d=D, heads=1, blocks=2, split=split)
            how = Optimisation(max_length=workload.L, averaging="ema")
            sampler, noise = PoissonSampler(users, plan.rate, 0), noise_source("seeded", seed_of(0, ranks.rank))
            place = Path(folder) / str(items)
            place.mkdir()
            ledger = create_ledger(place, plan) if ranks.first else None
            common = (model, sequences, plan, how, sampler, noise, ledger)
            return Trainer(*common) if split is None else RowTrainer(*common, ranks)

        few = workload.sequences
        make(FEW, Sequences(few.users, few.items % FEW + 1, few.offsets)).make_step()
        before = resident_mb()
        trainer = make(workload.items, workload.sequences)
        trainer.make_step()
        dist.all_reduce = count  # type: ignore[assignment]
        began = time.perf_counter()
        drawn = [trainer.make_step().users for _ in range(STEPS)]
        seconds = (time.perf_counter() - began) / STEPS
        # Parameters, gradients, two moments and the average.
        state = 5 * 4 * sum(p.numel() for p in trainer.model.parameters()) / 2**20
    return {
        "step_seconds": seconds,
        "users": sum(drawn) / STEPS,
        "before_mb": before,
        "state_mb": state,
        "bytes_a_step": sum(sent) / STEPS,
        "largest_message_bytes": max(sent, default=0),
    }


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    title = f"private steps of {figures['batch']} users expected, {figures['items']:,} items, d = {figures['d']}"
    table = Table(
        "ranks", "MB added a rank", "/ 1 rank", "of it state", "MB summed a step", "s a step", "/ 1 rank", title=title
    )
    for size, row in figures["ranks"].items():
        table.add_row(
            size,
            f"{row['added_mb']:,.0f}",
            f"{row['added_relative_to_1']:.2f}",
            f"{row['state_mb']:,.0f}",
            f"{row['bytes_a_step'] / 2**20:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['seconds_relative_to_1']:.2f}",
        )
    return table
