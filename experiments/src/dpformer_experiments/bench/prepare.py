"""Measure time and memory of `prepare` on a generated Parquet log of 50 million events.

One million users, Zipf-like items, unsorted times, ids as whole numbers and as text.
The measured work is all of `dpformer prepare`: reading, checks, numbering, sorting, hashing, plot, writing.
"""

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from rich.table import Table

from dpformer_experiments.bench.child import run_child

EVENTS, QUICK_EVENTS = 50_000_000, 1_000_000
ITEMS = 100_000
_CHUNK = 1_000_000


def run(quick: bool) -> dict[str, Any]:
    """Generate and prepare the log, once for each kind of id, each in a new process."""
    events = QUICK_EVENTS if quick else EVENTS
    figures: dict[str, Any] = {}
    for ids in ("numbers", "text"):
        with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as folder:
            size = generate(Path(folder) / "log", events, ids == "text")
            done = run_child(f"{__name__}:work", log=f"{folder}/log", output=f"{folder}/out")
        figures[ids] = {
            "events": events,
            "log_mb": size / 2**20,
            "events_per_second": events / done["seconds"],
            **done,
        }
    return figures


def generate(folder: Path, events: int, text: bool) -> int:
    """Write the log as Parquet files of a million events, one at a time; returns its size in bytes."""
    folder.mkdir()
    rng = np.random.default_rng(1)
    users = max(1, events // 50)
    for number, start in enumerate(range(0, events, _CHUNK)):
        size = min(_CHUNK, events - start)
        user = rng.integers(0, users, size)
        # A log-uniform rank is Zipf's law with exponent 1.
        item = (ITEMS ** rng.random(size)).astype(np.int64)
        time = rng.integers(1_500_000_000, 1_700_000_000, size)
        frame = pl.DataFrame({"user_id": user, "item_id": item, "timestamp": time})
        if text:
            frame = frame.with_columns(
                user_id=pl.format("customer-{}", "user_id"), item_id=pl.format("B{}", pl.col("item_id"))
            )
        frame.write_parquet(folder / f"part-{number:04}.parquet")
    return sum(file.stat().st_size for file in folder.iterdir())


def work(log: str, output: str) -> dict[str, Any]:
    """Prepare and save the log; this is measured."""
    from dpformer.data import prepare, save

    dataset = prepare(log)
    save(dataset, output)
    return {"users": len(dataset.sequences), "items": len(dataset.catalogue)}


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table("ids", "events", "log, MB", "seconds", "events/s", "peak memory, GB", title="prepare")
    for ids, row in figures.items():
        table.add_row(
            ids,
            f"{row['events']:,}",
            f"{row['log_mb']:,.0f}",
            f"{row['seconds']:.1f}",
            f"{row['events_per_second']:,.0f}",
            f"{row['peak_mb'] / 1024:.2f}",
        )
    return table
