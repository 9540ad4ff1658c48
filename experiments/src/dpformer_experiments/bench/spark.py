"""Measure `prepare --engine spark` with little memory: 20 million generated events, 2 GB for Spark's JVM.

The log is the one of the benchmark of `prepare`, with ids as text. Spark is local, on two cores. Memory is sampled four times per
second: the JVM, the sum of its Python workers, and the driver's Python, each as proportional set size.
"""

import os
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from dpformer_experiments.bench import prepare
from dpformer_experiments.bench.child import run_child

EVENTS, QUICK_EVENTS = 20_000_000, 300_000
DRIVER_MEMORY = "2g"


def run(quick: bool) -> dict[str, Any]:
    """Generate the log; prepare it with Spark and with polars, each in a new process; compare the sequences."""
    events = QUICK_EVENTS if quick else EVENTS
    with tempfile.TemporaryDirectory(prefix="dpformer-bench-") as folder:
        size = prepare.generate(Path(folder) / "log", events, text=True)
        spark = run_child(f"{__name__}:work", log=f"{folder}/log", output=f"{folder}/spark")
        polars = run_child("dpformer_experiments.bench.prepare:work", log=f"{folder}/log", output=f"{folder}/polars")
        same = run_child(f"{__name__}:same", one=f"{folder}/spark", other=f"{folder}/polars")["same"]
    return {"events": events, "log_mb": size / 2**20, "same": same, "spark": spark, "polars": polars}


def work(log: str, output: str) -> dict[str, Any]:
    """Prepare the log with Spark; this is measured."""
    from dpformer.data.spark import prepare_spark

    arguments = f"--master local[2] --driver-memory {DRIVER_MEMORY} --conf spark.ui.enabled=false pyspark-shell"
    os.environ["PYSPARK_SUBMIT_ARGS"] = arguments
    peaks = {"jvm_mb": 0.0, "workers_mb": 0.0, "driver_mb": 0.0}
    done = threading.Event()
    sampler = threading.Thread(target=_sample, args=(peaks, done), daemon=True)
    sampler.start()
    manifest = prepare_spark(log, output)
    done.set()
    sampler.join()
    return {"users": manifest["counts"]["users"], "items": manifest["counts"]["items"], **peaks}


def same(one: str, other: str) -> dict[str, Any]:
    """Whether two folders hold the same sequences and the same catalogue."""
    import numpy as np

    from dpformer.data import load

    a, b = load(one), load(other)
    equal = np.array_equal(a.sequences.items, b.sequences.items) and a.sequences.users.equals(b.sequences.users)
    return {
        "same": bool(
            equal and np.array_equal(a.sequences.offsets, b.sequences.offsets) and a.catalogue.equals(b.catalogue)
        )
    }


def _sample(peaks: dict[str, float], done: threading.Event) -> None:
    while not done.is_set():
        now = dict.fromkeys(peaks, 0.0)
        for pid, name in _family(os.getpid()):
            kind = "jvm_mb" if name == "java" else "driver_mb" if pid == os.getpid() else "workers_mb"
            now[kind] += _proportional_mb(pid)
        for kind, value in now.items():
            peaks[kind] = max(peaks[kind], value)
        time.sleep(0.25)


def _family(root: int) -> list[tuple[int, str]]:
    """The process and its descendants, with their names."""
    parents: dict[int, tuple[int, str]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:
                continue
            parents[int(entry.name)] = (int(tail.split()[1]), head.partition("(")[2])
    family, added = {root}, True
    while added:
        children = {pid for pid, (parent, _) in parents.items() if parent in family}
        added = not children <= family
        family |= children
    return [(pid, parents[pid][1]) for pid in family if pid in parents]


def _proportional_mb(pid: int) -> float:
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


def show(figures: dict[str, Any]) -> Table:
    """The figures as a table."""
    table = Table("engine", "seconds", "events/s", "memory, MB", title=f"prepare, {figures['events']:,} events")
    spark, polars = figures["spark"], figures["polars"]
    parts = f"JVM {spark['jvm_mb']:,.0f}, workers {spark['workers_mb']:,.0f}, driver {spark['driver_mb']:,.0f}"
    for name, row, memory in (("spark", spark, parts), ("polars", polars, f"{polars['peak_mb']:,.0f}")):
        table.add_row(name, f"{row['seconds']:.1f}", f"{figures['events'] / row['seconds']:,.0f}", memory)
    table.caption = "the same sequences" if figures["same"] else "the sequences DIFFER"
    return table
