"""Load `dpformer serve` on loopback with `hey`, at a fixed rate and as fast as it goes: p50, p99 and requests a second.

    python scripts/load_test.py            # 24 thousand items, 200 requests a second for 20 s; needs `hey` (apt-get install hey)

It makes a run of its own from an invented log, so it needs no data. Requests go to 127.0.0.1 only, and end by themselves.
"""

import argparse
import csv
import io
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl


def make_run(folder: Path, items: int, preset: str) -> Path:
    """A private run over so many items. What it learned does not matter here: the work of an answer is the same."""
    from dpformer.data import prepare, save
    from dpformer.fit.presets import make_recipe
    from dpformer.fit.run import start

    random = np.random.default_rng(0)
    item = np.concatenate([np.arange(items), random.zipf(1.3, 2 * items) % items])
    users = np.arange(len(item)) % (items // 80)
    frame = pl.DataFrame({"user_id": users, "item_id": item, "timestamp": random.integers(0, 10**6, len(item))})
    titles = pl.format("An invented title, number {}", "item_id").alias("title")
    save(prepare(frame.with_columns(titles), title="title"), folder / "data")
    settings = {"epochs": 0.5} if preset in ("dpformer", "default", "paper") else {}  # one step
    run = start(folder / "run", folder / "data", make_recipe(preset, **settings))
    run.train()
    run.close()
    return folder / "run"


def hey(url: str, body: str, seconds: float, workers: int, rate: float | None) -> dict[str, float]:
    """Latencies in ms and answers a second; a worker sends `rate / workers` requests a second, or as many as it can."""
    limit = [] if rate is None else ["-q", f"{rate / workers:g}"]
    kind = ["-m", "POST", "-T", "application/json", "-d", body, "-o", "csv"]
    command = ["hey", "-z", f"{seconds:g}s", "-c", str(workers), *limit, *kind, f"{url}/recommend"]
    rows = list(csv.DictReader(io.StringIO(subprocess.run(command, check=True, capture_output=True, text=True).stdout)))
    assert rows, "no answers"
    wrong = sum(row["status-code"] != "200" for row in rows)
    times = np.array([float(row["response-time"]) for row in rows]) * 1000
    p50, p99 = np.quantile(times, [0.5, 0.99])
    rounded = {"p50_ms": p50, "p99_ms": p99, "max_ms": times.max(), "per_second": len(rows) / seconds}
    return {"requests": len(rows), "not_200": wrong, **{name: round(float(v), 2) for name, v in rounded.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--items", type=int, default=24_000)
    parser.add_argument("--preset", default="dpformer")
    parser.add_argument("--rate", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=20)
    given = parser.parse_args()
    if shutil.which("hey") is None:
        sys.exit("error: needs hey: apt-get install hey")
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w") as log:
        run = make_run(Path(folder), given.items, given.preset)
        command = [sys.executable, "-m", "dpformer", "serve", str(run), "--port", "0", "--json"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
        try:
            assert server.stdout is not None
            text = ""
            while not text.endswith("}\n"):
                text += server.stdout.readline() or sys.exit("error: the server did not start")
            url = json.loads(text)["url"]
            body = json.dumps({"histories": [list(range(1, 31))], "k": 10})
            hey(url, body, 2, 4, None)  # warm
            figures = {
                "items": given.items,
                "preset": given.preset,
                "load_before": round(os.getloadavg()[0], 2),
                # hey's workers tick together: as many requests come at once as there are connections.
                "at_rate": {"asked_per_second": given.rate, **hey(url, body, given.seconds, 4, given.rate)},
                "as_fast_as_it_goes": hey(url, body, min(given.seconds, 5), 16, None),
                "measured_on": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
            }
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(30)
    print(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
