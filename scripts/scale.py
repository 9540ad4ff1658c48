"""Time and peak memory of prepare, fit, evaluate and recommend on a large invented log.

    python scripts/scale.py                                         # 1 million people, 88 thousand items, 20 million events
    python scripts/scale.py --people 20000 --items 5000 --json      # smaller

Each command is a process of its own. Items are drawn by Zipf's law, and the next item is often near the last one. Nothing is
downloaded, and the files are removed at the end unless --keep names a folder.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import polars as pl

PART = 100_000


def write_log(path: Path, people: int, items: int, mean: float) -> int:
    """Write a log of Parquet files, some thousand people in each; returns the number of events."""
    random = np.random.default_rng(0)
    popularity = 1 / np.arange(1, items + 1) ** 0.9
    by_rank = np.cumsum(popularity / popularity.sum())
    number = random.permutation(items) + 1
    path.mkdir()
    total = 0
    for start in range(0, people, PART):
        count = min(PART, people - start)
        lengths = np.minimum(3 + random.geometric(1 / (mean - 2), count) - 1, 500)
        user = np.repeat(np.arange(start, start + count), lengths)
        first = np.concatenate([[True], user[1:] != user[:-1]])
        # A walk that goes on from the last item with probability 1/2, else a new draw.
        rank = np.minimum(np.searchsorted(by_rank, random.random(len(user))), items - 1)
        anew = first | (random.random(len(user)) < 0.5)
        last = np.maximum.accumulate(np.where(anew, np.arange(len(user)), 0))
        rank = (rank[last] + np.arange(len(user)) - last) % items
        time_of = np.arange(len(user)) + random.integers(0, 1000)
        frame = pl.DataFrame({"user_id": user, "item_id": number[rank], "timestamp": 1_600_000_000 + time_of})
        frame.write_parquet(path / f"part-{start // PART:04d}.parquet")
        total += len(user)
    return total


def run(name: str, *arguments: str) -> dict[str, object]:
    """Run a command of dpformer; seconds by the clock, and the peak of its resident memory."""
    began = time.perf_counter()
    process = os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "dpformer", *arguments],
        os.environ,
        file_actions=[(os.POSIX_SPAWN_DUP2, 2, 1)],
    )
    _, status, used = os.wait4(process, 0)
    if status:
        sys.exit(f"error: dpformer {' '.join(arguments)} failed")
    seconds = time.perf_counter() - began
    return {
        "command": name,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(used.ru_utime + used.ru_stime, 1),
        "peak_gb": round(used.ru_maxrss * (1 if sys.platform == "darwin" else 1024) / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--people", type=int, default=1_000_000)
    parser.add_argument("--items", type=int, default=88_000)
    parser.add_argument("--mean", type=float, default=20, help="events of a person, in the mean")
    parser.add_argument("--keep", type=Path, help="write the files here, and leave them")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.keep or Path(temporary)
        folder.mkdir(exist_ok=True)
        log, data, fitted = (str(folder / name) for name in ("log", "data", "run"))
        events = write_log(Path(log), given.people, given.items, given.mean)
        rows = [
            run("prepare", "prepare", log, "-o", data),
            run(
                "fit --epsilon 8 --preset distilled",
                "fit",
                data,
                "--run",
                fitted,
                "--preset",
                "distilled",
                "--epsilon",
                "8",
                "--delta",
                f"{0.1 / given.people:g}",
            ),
            run("evaluate", "evaluate", fitted),
            run("evaluate --sample 50000", "evaluate", fitted, "--sample", "50000"),
            run("recommend --all", "recommend", fitted, "--all", data, "-o", str(folder / "recs.parquet")),
        ]
        lists = pl.scan_parquet(folder / "recs.parquet").select(pl.col("user_id").n_unique()).collect().item()
    figures = {
        "people": given.people,
        "items": given.items,
        "events": events,
        "lists": lists,
        "rows": rows,
        "load": round(os.getloadavg()[0], 2),
        "measured_on": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    if given.json:
        print(json.dumps(figures, indent=2))
        return
    print(
        f"\n{given.people:,} people, {given.items:,} items, {events:,} events; {figures['measured_on']}; load {figures['load']}\n"
    )
    print("| command | seconds | CPU seconds | peak memory | people per second |\n|---|---|---|---|---|")
    for row in rows:
        rate = f"{given.people / float(str(row['seconds'])):,.0f}"
        print(f"| `{row['command']}` | {row['seconds']} | {row['cpu_seconds']} | {row['peak_gb']} GB | {rate} |")


if __name__ == "__main__":
    main()
